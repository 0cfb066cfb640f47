"""Files that are whole or absent, and patience around replace and delete."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from footage import BUNNY, EXAMPLE
from helpers import read_tree, write_tree

from wangen.generator import files
from wangen.generator.cli import main
from wangen.generator.errors import WangenError, in_words
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


def test_rights_that_a_file_system_does_not_give_are_done_without(tmp_path, monkeypatch):
    """As to a user who does not own what is mounted: a FAT stick, a share of Windows."""

    def refused(*_words, **_named):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", refused)
    files.write_whole(tmp_path / "a.sh", [b"x"], mode=0o755)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.sh": b"x"}


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


@pytest.fixture
def no_answer(monkeypatch):
    """A disk that takes the bytes and then does not answer."""

    def refuse(_number: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)


@pytest.mark.usefixtures("no_answer")
def test_a_disk_that_does_not_answer_is_said_with_the_file(tmp_path):
    with pytest.raises(OSError, match=r"a\.txt") as refused:
        files.write_whole(tmp_path / "a.txt", [b"a"])
    said = in_words(refused.value)
    assert said
    assert (said.where, said.found) == (str(tmp_path / "a.txt"), os.strerror(errno.EIO))
    assert "whether the disk or network drive answers" in said.cure
    assert not read_tree(tmp_path)
    nameless = in_words(OSError(errno.EIO, "no answer"))
    assert nameless
    assert (nameless.found, nameless.where) == ("no answer", "")
    assert in_words(OSError(errno.EBADF, "ours")) is None


@pytest.mark.parametrize("step", ["preprocess", "publish"])
@pytest.mark.usefixtures("no_answer")
def test_steps_name_the_file_that_a_disk_does_not_take(tmp_path, capsys, step):
    write_tree(tmp_path, {"wangen.toml": "", "datasets/cats/a.txt": "a cat"})
    shutil.copy(EXAMPLE / "coffee.jpg", tmp_path / "datasets/cats/a.jpg")
    write_tree(tmp_path / "raw", {"b.txt": "a rabbit"})
    shutil.copy(BUNNY, tmp_path / "raw" / "b.mp4")
    words = ["publish", "cats", "--workspace", str(tmp_path)]
    if step == "preprocess":
        words = ["preprocess", "--videos", str(tmp_path / "raw"), "--output", str(tmp_path / "o"),
                 "--resolution", "64x64", "--frames", "5"]  # fmt: skip
    assert main(words) == 1
    said = capsys.readouterr().err
    assert os.strerror(errno.EIO) in said
    assert f"where: {tmp_path}" in said


def test_a_report_takes_away_what_a_killed_writer_of_it_left(tmp_path):
    """Also where the disk refused to remove it when the write had failed."""
    write_tree(tmp_path, {"wangen.toml": "", "datasets/cats/a.txt": "a cat"})
    shutil.copy(EXAMPLE / "coffee.jpg", tmp_path / "datasets/cats/a.jpg")
    os.utime(tmp_path / "datasets/cats/a.jpg", (1e9, 1e9))  # what was changed just now is not remembered
    assert main(["publish", "cats", "--workspace", str(tmp_path)]) == 0
    memo = tmp_path / ".wangen" / "cats.media.json"
    assert memo.is_file()
    left = memo.with_name(f".{memo.name}-{files.machine()}{0x7FFFFFF0:08x}{'0' * 8}.tmp")
    left.write_text("{", encoding="utf-8")
    memo.write_text(json.dumps({}), encoding="utf-8")
    assert main(["publish", "cats", "--workspace", str(tmp_path)]) == 0
    assert not left.exists()
