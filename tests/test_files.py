"""Files that are whole or absent, and patience around replace and delete."""

import os
import shutil
from pathlib import Path

import pytest
from helpers import read_tree, write_tree

from wangen.generator import files
from wangen.generator.errors import WangenError
from wangen.generator.files import read_file, special

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX file system calls")


@pytest.fixture
def busy(monkeypatch):
    """Makes a function of `Path` or `shutil` refuse some times, as Windows does while a scanner reads a file."""
    monkeypatch.setattr(files, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))

    def make(owner: object, name: str, times: int) -> list[int]:
        real, left = getattr(owner, name), [times]

        def refusing(*words: object, **named: object) -> object:
            if left[0]:
                left[0] -= 1
                raise PermissionError(13, "The process cannot access the file")
            return real(*words, **named)

        monkeypatch.setattr(owner, name, refusing)
        return left

    return make


def test_a_text_is_written_whole_or_not_at_all(tmp_path):
    files.write_text(tmp_path / "new" / "a.txt", "é\n")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "é\n".encode()
    (tmp_path / "new" / "folder").mkdir()
    with pytest.raises(WangenError, match="cannot write"):
        files.write_text(tmp_path / "new" / "folder", "x")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.txt", "folder"]


@pytest.mark.parametrize(
    ("name", "cure"),
    [("x" * 256, "a shorter name"), ("a.txt/b.txt", "a file is where a folder"), ("folder", "a folder has this name")],
)
def test_a_path_that_cannot_be_is_not_answered_with_free_space(tmp_path, name, cure):
    write_tree(tmp_path, {"a.txt": "x", "folder/b.txt": "x"})
    with pytest.raises(WangenError) as error:
        files.write_text(tmp_path / name, "new")
    assert cure in error.value.cure
    assert read_tree(tmp_path) == {"a.txt": b"x", "folder/b.txt": b"x"}


def test_what_is_open_for_a_moment_is_replaced_and_removed(tmp_path, busy):
    write_tree(tmp_path, {"a.txt": "old", "b.txt": "x", "c/d.txt": "x"})
    left = [busy(Path, "replace", 3)]
    files.write_text(tmp_path / "a.txt", "new")
    left += [busy(Path, "unlink", 3)]
    files.remove(tmp_path / "b.txt")
    left += [busy(shutil, "rmtree", 3)]
    files.remove_tree(tmp_path / "c")
    assert left == [[0], [0], [0]]
    assert read_tree(tmp_path) == {"a.txt": b"new"}
    assert not (tmp_path / "c").exists()


def test_what_stays_refused_is_an_error_and_leaves_no_litter(tmp_path, busy):
    write_tree(tmp_path, {"a.txt": "old"})
    busy(Path, "replace", 99)
    with pytest.raises(WangenError, match="cannot write"):
        files.write_text(tmp_path / "a.txt", "new")
    assert read_tree(tmp_path) == {"a.txt": b"old"}


def test_what_is_not_there_is_removed_already(tmp_path):
    files.remove(tmp_path / "a.txt")
    files.remove_tree(tmp_path / "b")


@posix
def test_the_bytes_are_durable_before_the_name_and_the_name_at_the_end(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (calls.append(Path(f"/proc/self/fd/{number}").resolve()), fsync(number))
    )
    monkeypatch.setattr(Path, "replace", lambda self, target: (calls.append("replace"), replace(self, target)))
    files.write_text(tmp_path / "a.txt", "x")
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc to name an open file")
    assert [calls[0].suffix, *calls[1:]] == [".tmp", "replace", tmp_path]


@posix
def test_the_rights_are_those_that_were_asked_for(tmp_path):
    files.write_whole(tmp_path / "a.sh", [b"x"], mode=0o755)
    assert (tmp_path / "a.sh").stat().st_mode & 0o777 == 0o755


@posix
def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    named = {"pipe": "a named pipe", "loop": "a link that leads to itself", "a\0b": "a NUL character"}
    for name, words in named.items():
        with pytest.raises(OSError, match=words):
            read_file(tmp_path / name)
    (tmp_path / "file").write_bytes(b"x")
    assert (special(tmp_path / "file"), read_file(tmp_path / "file")) == ("", b"x")
