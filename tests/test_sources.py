"""Digests of source files and the memo that saves reading them."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import image_bytes, make_clip, make_image

from wangen.generator.dataset import read_facts
from wangen.runtime.sources import MEMO, Source, digest_file, read_sources, relative_name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two old pictures and an old clip beside an empty cache folder."""
    (tmp_path / "cache").mkdir()
    for path in (make_image(tmp_path / "a.png"), make_image(tmp_path / "b.jpg"), make_clip(tmp_path / "c.mp4")):
        os.utime(path, (1e9, 1e9))
    return tmp_path


def read(folder: Path, **options: bool) -> dict[str, Source]:
    found, problems = read_sources(sorted(folder.glob("?.*")), folder / "cache", **options)
    assert not problems
    return {path.name: source for path, source in found.items()}


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files just made count as old enough for the memo; a change time cannot be set back."""
    monkeypatch.setattr("wangen.runtime.sources.YOUNG_NS", 0)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose content is read from now on."""
    seen: list[str] = []
    read = digest_file
    monkeypatch.setattr("wangen.runtime.sources.digest_file", lambda path: (seen.append(path.name), read(path))[1])
    return seen


def memo(folder: Path) -> dict[str, list[Any]]:
    """What the memo says of each file."""
    lines = [json.loads(line)[1] for line in (folder / "cache" / MEMO).read_text().splitlines()]
    return {row[0]: row for rows in lines[1:] for row in rows}


def test_a_source_is_its_content_and_its_header(folder: Path):
    found = read(folder)
    for name, source in found.items():
        assert source.digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert source.facts == read_facts(folder / name)


@pytest.mark.usefixtures("settled")
def test_what_is_unchanged_is_not_read_again_and_what_changed_is(folder: Path, monkeypatch: pytest.MonkeyPatch):
    first = read(folder)
    seen = watch(monkeypatch)
    assert read(folder) == first
    assert seen == []
    assert read(folder, trust_memo=False) == first
    assert sorted(seen) == ["a.png", "b.jpg", "c.mp4"]

    seen.clear()
    # Another content of the same size, with the old time put back: only the change time tells.
    content = bytearray((folder / "b.jpg").read_bytes())
    content[-10] ^= 1
    (folder / "b.jpg").write_bytes(content)
    os.utime(folder / "b.jpg", (1e9, 1e9))
    if os.name == "posix":
        assert read(folder)["b.jpg"].digest == hashlib.sha256(content).hexdigest()
        assert seen == ["b.jpg"]
    assert read(folder, trust_memo=False)["b.jpg"].digest == hashlib.sha256(content).hexdigest()

    assert memo(folder)["../a.png"][2] == first["a.png"].digest


def test_young_files_are_not_memoised(folder: Path, monkeypatch: pytest.MonkeyPatch):
    read(folder)
    assert not (folder / "cache" / MEMO).exists()  # their change times are seconds old
    seen = watch(monkeypatch)
    read(folder)
    assert len(seen) == 3


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"../a.png": 3, "../b.jpg": {"state": 1}}\n[]\n',
        b"[" * 100_000,
    ],
)
def test_a_broken_memo_is_ignored(folder: Path, broken: bytes):
    (folder / "cache" / MEMO).write_bytes(broken)
    assert read(folder) == read(folder, trust_memo=False)


@pytest.mark.usefixtures("settled")
def test_a_memo_whose_values_are_nonsense_is_ignored(folder: Path):
    honest = read(folder)
    path = folder / "cache" / MEMO
    whole = path.read_text()
    for old, new in ((honest["a.png"].digest, "f" * 64), ("64", "65"), ("sources-2", "sources-1"), ("]]]", "]]")):
        assert old in whole
        path.write_text(whole.replace(old, new))
        assert read(folder) == honest


@pytest.mark.usefixtures("settled")
def test_the_memo_is_never_needed(folder: Path):
    first = read(folder)
    (folder / "cache" / MEMO).unlink()
    assert read(folder) == first
    shutil.rmtree(folder / "cache")
    assert read(folder) == first
    assert not (folder / "cache").exists()
    (folder / "cache").mkdir()
    (folder / "cache" / MEMO).mkdir()  # nothing can be written there
    assert read(folder) == first


@pytest.mark.usefixtures("settled")
def test_files_of_one_name_in_two_folders_do_not_share_a_record(tmp_path: Path):
    (tmp_path / "cache").mkdir()
    paths = [make_image(tmp_path / side / "a.png", seed=seed) for seed, side in enumerate(("left", "right"), 1)]
    first, _ = read_sources(paths, tmp_path / "cache")
    again, _ = read_sources(paths, tmp_path / "cache")
    assert again == first
    assert len(memo(tmp_path)) == 2
    assert first[paths[0]].digest != first[paths[1]].digest


def test_unreadable_files_are_all_named_and_the_others_are_read(folder: Path):
    (folder / "d.png").write_bytes(image_bytes(format="PNG")[:20])
    (folder / "e.mp4").write_bytes(b"nothing")
    paths = [*sorted(folder.glob("?.*")), folder / "gone.png"]
    found, problems = read_sources(paths, folder / "cache")
    assert {path.name for path in found} == {"a.png", "b.jpg", "c.mp4"}
    assert {Path(problem.where).name for problem in problems} == {"d.png", "e.mp4", "gone.png"}


def test_names_are_relative_with_forward_slashes(tmp_path: Path):
    assert relative_name(tmp_path / "512" / "a b.png", tmp_path / "512_cache") == "../512/a b.png"
