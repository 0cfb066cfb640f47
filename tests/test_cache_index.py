"""The index of a cache folder: it saves reading headers, and is never the truth."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cache_entries import CONTENT, ENCODER, LATENT, TEXT, put, recipes, states

from wangen.runtime import rows
from wangen.runtime.cache import Entry, Folder, index
from wangen.runtime.cache.index import INDEX, look
from wangen.runtime.rows import read_rows, write_rows

OTHER = replace(LATENT, content=CONTENT | {"width": 128})


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files just made count as old enough; a change time cannot be set back."""
    monkeypatch.setattr("wangen.runtime.sources.YOUNG_NS", 0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose headers are read from now on."""
    seen: list[str] = []
    read = index.read_entry

    def noted(path: Path, *, deep: bool = False) -> Entry | None:
        seen.append(path.name)
        return read(path, deep=deep)

    monkeypatch.setattr(index, "read_entry", noted)
    return seen


@pytest.mark.usefixtures("settled")
def test_a_second_look_opens_no_entry_and_sees_the_same(tmp_path: Path, opened: list[str]):
    paths = put(tmp_path, *recipes(30), TEXT, replace(LATENT, name="Übermut\n.jpg"))
    put(tmp_path, LATENT, encoder=replace(ENCODER, dtype="bfloat16"))
    first = Folder(tmp_path).all_entries
    assert len(opened) == len(first) == len(paths) + 1
    opened.clear()
    assert Folder(tmp_path).all_entries == first
    assert states(tmp_path, TEXT) == "valid"
    assert opened == []
    assert Folder(tmp_path, deep=True).all_entries == first
    assert len(opened) == len(first)


def test_young_files_are_not_trusted(tmp_path: Path, opened: list[str]):
    put(tmp_path, LATENT)
    for _ in range(2):
        assert states(tmp_path, LATENT) == "valid"
    assert len(opened) == 2
    assert not (tmp_path / INDEX).exists()


@pytest.mark.usefixtures("settled")
def test_a_file_that_changed_behind_the_index_is_read_again(tmp_path: Path):
    path, kept = put(tmp_path, LATENT, TEXT)
    Folder(tmp_path).all_entries  # noqa: B018 - leaves the index
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert states(tmp_path, LATENT) == "corrupt"
    assert states(tmp_path, TEXT) == "valid"
    path.write_bytes(whole)
    assert states(tmp_path, LATENT) == "valid"
    kept.unlink()
    assert states(tmp_path, TEXT) == "missing"


@pytest.mark.skipif(os.name != "posix", reason="Windows keeps no change time that a program cannot set")
@pytest.mark.usefixtures("settled")
def test_an_edit_that_keeps_size_and_time_shows_in_the_change_time(tmp_path: Path):
    path, other = put(tmp_path, LATENT, OTHER)
    Folder(tmp_path).all_entries  # noqa: B018
    stat = path.stat()
    path.write_bytes(other.read_bytes())  # of the same size
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    verdict = Folder(tmp_path).judge(LATENT, ENCODER)
    assert (verdict.state, verdict.reason) == ("corrupt", "the header does not belong to the file name")


@pytest.mark.usefixtures("settled")
def test_a_damaged_index_costs_reading_headers_and_no_more(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rows, "ROWS_PER_LINE", 12)
    put(tmp_path, *recipes(20))
    honest = Folder(tmp_path).all_entries
    path = tmp_path / INDEX
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 3
    altered = whole.replace(honest[7].content_key.encode(), b"0" * 20)
    other_version = whole.replace(b"index-1", b"index-2")
    for broken in (b"", whole[: len(whole) // 2], lines[0] + lines[2], b"[" * 90_000, other_version, altered):
        opened.clear()
        path.write_bytes(broken)
        assert Folder(tmp_path).all_entries == honest
        assert opened
    opened.clear()
    assert Folder(tmp_path).all_entries == honest
    assert opened == []


@pytest.mark.usefixtures("settled")
def test_the_index_of_another_folder_is_of_no_use_here(tmp_path: Path, opened: list[str]):
    put(tmp_path / "a", LATENT)
    put(tmp_path / "b", LATENT)
    Folder(tmp_path / "a").all_entries  # noqa: B018
    (tmp_path / "a" / INDEX).rename(tmp_path / "b" / INDEX)
    opened.clear()
    assert states(tmp_path / "b", LATENT) == "valid"
    assert len(opened) == (1 if os.name == "posix" else 0)


@pytest.mark.usefixtures("settled")
def test_an_index_is_written_when_much_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written: list[int] = []
    monkeypatch.setattr(index, "write_index", lambda folder, entries, states: written.append(len(entries)))
    put(tmp_path, *recipes(40))
    look(tmp_path)
    assert written == [40]
    monkeypatch.undo()
    monkeypatch.setattr("wangen.runtime.sources.YOUNG_NS", 0)
    look(tmp_path)
    before = (tmp_path / INDEX).stat().st_mtime_ns
    put(tmp_path, LATENT)
    assert len(look(tmp_path).entries) == 41
    assert (tmp_path / INDEX).stat().st_mtime_ns == before
    put(tmp_path, OTHER, TEXT)
    assert len(look(tmp_path).entries) == 43
    assert (tmp_path / INDEX).stat().st_mtime_ns > before


@pytest.mark.usefixtures("settled")
def test_where_no_index_can_be_written_all_works_without(tmp_path: Path):
    put(tmp_path, LATENT)
    (tmp_path / INDEX).mkdir()
    assert states(tmp_path, LATENT) == states(tmp_path, LATENT) == "valid"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [INDEX]


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
def test_a_folder_with_brackets_and_a_name_that_is_no_unicode(tmp_path: Path):
    folder = tmp_path / "[a] b"
    (path,) = put(folder, LATENT)
    path.rename(folder / os.fsdecode(b"caf\xe9-" + path.name[-len("0" * 20 + ".latent.safetensors") :].encode()))
    assert states(folder, LATENT) == "valid"


def test_rows_come_back_as_they_went(tmp_path: Path):
    written = [[number, "ü\udcff", None, [1.5, True]] for number in range(2500)]
    write_rows(tmp_path / "rows", "numbers 1", written)
    assert list(read_rows(tmp_path / "rows", "numbers 1")) == written
    assert list(read_rows(tmp_path / "rows", "numbers 2")) == list(read_rows(tmp_path / "none", "numbers 1")) == []
