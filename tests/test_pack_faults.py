"""Packs that are damaged or foreign: no good entry is lost, and nothing ends in a traceback."""

import gzip
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_entries import ENCODER, LATENT, put, recipes, tensors
from packed_folder import flip, keys, tar_of

from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.runtime.cache import CorruptEntryError, EmbeddingCache, Entry, Folder, load, packs
from wangen.runtime.cache.entries import UnreadableEntryError
from wangen.runtime.cache.leftovers import repair
from wangen.runtime.cache.pack_index import PackIndex
from wangen.runtime.cache.packing import pack, unpack
from wangen.runtime.cache.packs import index_path, look_at_packs

pytest_plugins = ("packed_fixtures",)


def test_a_damaged_header_of_the_tar_costs_no_entry_that_the_index_knows(packed: Path):
    before = keys(packed)
    path = tar_of(packed)
    with tarfile.open(path) as tar:
        flip(path, tar.getmembers()[2].offset + 150)
    assert main(["cache", "verify", str(packed)]) == 0
    assert keys(packed) == keys(packed, deep=True) == before


def test_without_its_index_a_damaged_header_costs_one_entry_and_is_said(packed: Path):
    before = keys(packed)
    path = tar_of(packed)
    index_path(path).unlink()
    with tarfile.open(path) as tar:
        flip(path, tar.getmembers()[2].offset + 150)
    folder = Folder(packed)
    assert len(before - keys(packed)) == 1
    assert folder.damaged[f"packs/{path.name}"].found == "a part of the pack is damaged"
    assert main(["cache", "unpack", str(packed)]) == 1
    assert path.exists()
    assert repair(Folder(packed))[0] == 1
    assert (Folder(packed).damaged, len(keys(packed))) == ({}, 4)


def test_zeros_where_a_header_was_do_not_end_the_pack(packed: Path):
    path = tar_of(packed)
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1].offset
    index_path(path).unlink()
    data = bytearray(path.read_bytes())
    data[last : last + 512] = bytes(512)
    path.write_bytes(data)
    assert (len(keys(packed)), list(Folder(packed).damaged)) == (4, [f"packs/{path.name}"])
    path.write_bytes(data[:last])  # and without the end of a tar
    assert (len(keys(packed)), list(Folder(packed).damaged)) == (4, [f"packs/{path.name}"])


def test_clear_takes_a_damaged_pack_with_it(packed: Path, capsys: pytest.CaptureFixture[str]):
    path = tar_of(packed)
    index_path(path).unlink()
    with tarfile.open(path) as tar:
        flip(path, tar.getmembers()[2].offset + 150)
    assert main(["cache", "clear", str(packed), "--kind", "latent", "--yes"]) == 1
    assert "a part of its pack is damaged" in capsys.readouterr().err
    assert main(["cache", "clear", str(packed), "--yes"]) == 0
    assert "removed 5 entries" in capsys.readouterr().out
    assert not path.exists()


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A drive that does not give one of a pack's entries now."""
    real = packs.read_packed_entry

    def read(folder: Path, pack: str, file: str, *words: Any, **named: Any) -> Entry | None:
        if file == recipes(5)[number].file_name(ENCODER):
            raise UnreadableEntryError("cannot be read: Input/output error", where=file, cure="fix its rights")
        return real(folder, pack, file, *words, **named)

    monkeypatch.setattr(packs, "read_packed_entry", read)


@pytest.mark.parametrize("with_index", [True, False])
def test_what_cannot_be_read_now_stays_in_its_pack(
    packed: Path, with_index: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    before = keys(packed)
    entry = look_at_packs(packed).find(recipes(5)[0].key(ENCODER))
    assert entry is not None
    flip(tar_of(packed), entry.offset + entry.num_bytes - 1)
    if not with_index:
        index_path(tar_of(packed)).unlink()
    with monkeypatch.context() as patched:
        refuse(patched, 3)
        folder = Folder(packed, deep=True)
        assert len(folder.damaged) == 2
        assert repair(folder) == (0, 0)
        if not with_index:
            with pytest.raises(WangenError, match="a part of its pack is damaged"):
                EmbeddingCache(packed).clear_cache()
            more = put(packed, LATENT)
            assert main(["cache", "pack", str(packed)]) == 1
            assert not more[0].exists()
            assert "cannot write" not in capsys.readouterr().err
        assert main(["cache", "unpack", str(packed)]) == 1
        assert len(look_at_packs(packed).names) == 1
    assert keys(packed) >= before
    assert repair(Folder(packed, deep=True))[0] == 1


COLUMNS = ["content_keys", "keys", "items", "encoders", "kinds", "offsets", "sizes", "texts", "text_ends",
           "source_lengths"]  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("change", ["short", "high", "low", "wide", "narrow"])
def test_a_wrong_index_ends_in_no_traceback_and_lends_no_entry(packed: Path, name: str, change: str):
    path = tar_of(packed)
    good = PackIndex.read(index_path(path), path.stat().st_size)
    assert good is not None
    assert set(good.columns) == set(COLUMNS)
    column = np.array(good.columns[name])
    if change == "short":
        column = column[:-1]
    elif change == "wide":
        column = column.astype("<f8")
    elif change == "narrow":
        column = column[:, :5] if column.ndim > 1 else column.astype("i1")
    else:
        column[:] = np.iinfo(column.dtype).max if change == "high" else np.array(-1).astype(column.dtype)
    replace(good, columns={**good.columns, name: column}).write(index_path(path))
    folder = Folder(packed)
    for recipe in recipes(5):
        for encoder in (ENCODER, None):
            state = folder.judge(recipe, encoder).state
            assert state == "valid" or change in ("high", "low")
    for entry in folder.all_entries:
        try:
            assert load(entry)["latent"].equal(tensors()["latent"])
        except CorruptEntryError:
            continue
        assert (entry.content_key, entry.key) in {(each.content_key, each.key(ENCODER)) for each in recipes(5)}
    assert len(keys(packed, deep=True)) == 5


def test_an_index_that_cuts_a_letter_in_two_is_made_anew(tmp_path: Path):
    put(tmp_path, LATENT)
    pack(tmp_path)
    path = tar_of(tmp_path)
    good = PackIndex.read(index_path(path), path.stat().st_size)
    assert good is not None
    changed = {**good.columns, "source_lengths": good.columns["source_lengths"] + 1}
    replace(good, columns=changed).write(index_path(path))
    assert [entry.name for entry in Folder(tmp_path).all_entries] == [LATENT.name]


@pytest.mark.parametrize("facts", [{"removed_bytes": "x"}, {"encoders": []}, {"kinds": ["a", "latent"]}])
def test_a_wrong_fact_in_an_index_ends_in_no_traceback(packed: Path, facts: dict[str, Any]):
    path = tar_of(packed)
    good = PackIndex.read(index_path(path), path.stat().st_size)
    assert good is not None
    replace(good, **facts).write(index_path(path))
    assert len(Folder(packed).all_entries) == 5
    assert main(["cache", "stats", str(packed)]) == 0


def test_files_that_are_no_packs_of_ours_stay(packed: Path):
    place = packed / packs.FOLDER
    (place / "photos.tar").write_bytes(gzip.compress(b"theirs"))
    (place / "folder.tar").mkdir()
    (place / "loop.tar").symlink_to("loop.tar")
    if hasattr(os, "mkfifo"):
        os.mkfifo(place / "pipe.tar")
    assert len(Folder(packed).all_entries) == 5
    repair(Folder(packed, deep=True))
    assert (place / "photos.tar").exists()
    assert main(["cache", "unpack", str(packed)]) == 1
    assert (place / "photos.tar").exists()
    assert len(keys(packed)) == 5


def test_a_full_disk_leaves_no_half_file(packed: Path, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, data: bytes) -> int:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    before = keys(packed)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(WangenError, match="No space left on device"):
        unpack(packed)
    assert [path.name for path in packed.iterdir()] == [packs.FOLDER]
    assert keys(packed) == before


def test_a_number_that_no_file_has_in_a_tar_is_damage(packed: Path):
    path = tar_of(packed)
    index_path(path).unlink()
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        members[2].size = 1 << 80
        header = members[2].tobuf(tarfile.GNU_FORMAT)
    data = bytearray(path.read_bytes())
    data[members[2].offset : members[2].offset + len(header)] = header
    path.write_bytes(data)
    folder = Folder(packed)
    assert len(folder.all_entries) == 2
    assert "the pack is damaged" in folder.damaged[f"packs/{path.name}"].found
    assert main(["cache", "unpack", str(packed)]) == 1
    assert path.exists()
