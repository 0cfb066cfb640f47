"""Packs that are damaged, foreign or in use elsewhere: no good entry is lost, and nothing ends in a traceback."""

import gzip
import logging
import os
import shutil
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_entries import ENCODER, put, recipes, tensors
from killing import end_of, fork

from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.runtime.cache import (
    CorruptEntryError,
    EmbeddingCache,
    Entry,
    Folder,
    Recipe,
    claims,
    load,
    packing,
    packs,
    reading,
)
from wangen.runtime.cache.entries import UnreadableEntryError
from wangen.runtime.cache.index import Found, look
from wangen.runtime.cache.leftovers import repair
from wangen.runtime.cache.pack_index import PackIndex
from wangen.runtime.cache.packing import Moved, fold, pack, unpack
from wangen.runtime.cache.packs import index_path, look_at_packs
from wangen.runtime.cache.writer import Writer

Move = Callable[[Path], Moved]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Five latents in a pack."""
    put(tmp_path, *recipes(5))
    pack(tmp_path)
    return tmp_path


def tar_of(folder: Path) -> Path:
    (path,) = (folder / packs.FOLDER).glob("*.tar")
    return path


def keys(folder: Path, *, deep: bool = False) -> set[str]:
    return {entry.key for entry in Folder(folder, deep=deep).all_entries}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


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


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A drive that does not give one of a pack's entries now."""
    real = packs.read_packed_entry

    def read(folder: Path, pack: str, file: str, *words: Any, **named: Any) -> Entry | None:
        if file == recipes(5)[number].file_name(ENCODER):
            raise UnreadableEntryError("cannot be read: Input/output error", where=file, cure="fix its rights")
        return real(folder, pack, file, *words, **named)

    monkeypatch.setattr(packs, "read_packed_entry", read)


@pytest.mark.parametrize("with_index", [True, False])
def test_what_cannot_be_read_now_stays_in_its_pack(packed: Path, with_index: bool, monkeypatch: pytest.MonkeyPatch):
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
            assert main(["cache", "pack", str(packed)]) == 1
        assert main(["cache", "unpack", str(packed)]) == 1
        assert tar_of(packed).exists()
    assert keys(packed) == before
    assert repair(Folder(packed, deep=True))[0] == 1


COLUMNS = ["content_keys", "keys", "items", "encoders", "kinds", "offsets", "sizes", "texts", "text_ends",
           "source_lengths"]  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("change", ["short", "high", "low", "wide"])
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
    else:
        column[:] = np.iinfo(column.dtype).max if change == "high" else np.array(-1).astype(column.dtype)
    replace(good, columns={**good.columns, name: column}).write(index_path(path))
    folder = Folder(packed)
    for recipe in recipes(5):
        for encoder in (ENCODER, None):
            folder.judge(recipe, encoder)
    for entry in folder.all_entries:
        try:
            assert load(entry)["latent"].equal(tensors()["latent"])
        except CorruptEntryError:
            continue
        assert (entry.content_key, entry.key) in {(each.content_key, each.key(ENCODER)) for each in recipes(5)}
    assert len(keys(packed, deep=True)) == 5


@pytest.mark.parametrize("facts", [{"removed_bytes": "x"}, {"encoders": [["a"]]}, {"kinds": ["a", "latent"]}])
def test_a_wrong_fact_in_an_index_ends_in_no_traceback(packed: Path, facts: dict[str, Any]):
    path = tar_of(packed)
    good = PackIndex.read(index_path(path), path.stat().st_size)
    assert good is not None
    if "encoders" in facts:
        facts = {"encoders": []}
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


def again(folder: Path, *which: Recipe) -> None:
    """Encode entries anew, to other values."""
    with Writer(folder, again=True) as writer:
        for recipe in which:
            writer.put(recipe, ENCODER, tensors(2.0))


def value(folder: Path, recipe: Recipe) -> float:
    entry = Folder(folder).find(recipe.key(ENCODER))
    assert entry is not None
    return load(entry)["latent"].flatten()[0].item()


def test_a_packed_run_beside_unpack_loses_nothing(packed: Path, monkeypatch: pytest.MonkeyPatch):
    """It would take the files for those of a pack that a kill left, when unpack is about to remove that pack."""
    before = keys(packed)
    real = packing.remove_pack

    def remove(path: Path) -> None:
        assert fold(packed, Folder(packed).files) is None
        real(path)

    monkeypatch.setattr(packing, "remove_pack", remove)
    assert unpack(packed).num_entries == 5
    assert keys(packed) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_unpack_waits_for_those_who_fold(packed: Path):
    with claims.folding(packed) as may:
        assert may
        child = fork(lambda: int(unpack(packed).num_entries != 5))
        time.sleep(0.3)
        assert not list(packed.glob("*.safetensors"))
    assert end_of(child) == 0
    assert len(list(packed.glob("*.safetensors"))) == 5


def test_a_writer_that_may_not_pack_packs_later(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    put(tmp_path, recipes(5)[0])
    caplog.set_level(logging.INFO, "wangen")
    with claims.packing(tmp_path), Writer(tmp_path, packed=True) as writer:
        writer.put(recipes(5)[1], ENCODER, tensors())
    assert len(Folder(tmp_path).files) == 2
    assert "another process packs or unpacks" in caplog.text
    with Writer(tmp_path, packed=True) as writer:
        writer.put(recipes(5)[2], ENCODER, tensors())
        with claims.packing(tmp_path):
            writer.commit()
            writer._pack()
        writer.put(recipes(5)[3], ENCODER, tensors())
    assert (len(Folder(tmp_path).files), len(look_at_packs(tmp_path))) == (2, 2)


def test_what_is_encoded_anew_while_it_is_packed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path, *recipes(5))
    real = packing.whole_bytes

    def read(entry: Entry) -> bytes:
        data = real(entry)
        if entry.key == recipes(5)[1].key(ENCODER):
            again(tmp_path, recipes(5)[1])
        return data

    with monkeypatch.context() as patched:
        patched.setattr(packing, "whole_bytes", read)
        pack(tmp_path)
    assert value(tmp_path, recipes(5)[1]) == 2
    pack(tmp_path)
    assert value(tmp_path, recipes(5)[1]) == 2
    assert (len(Folder(tmp_path).files), len(look_at_packs(tmp_path))) == (0, 5)


def test_all_entries_of_a_pack_encoded_anew_take_its_place(packed: Path):
    again(packed, *recipes(5))
    assert fold(packed, Folder(packed).files) is not None
    assert [value(packed, recipe) for recipe in recipes(5)] == [2.0] * 5
    assert (len(Folder(packed).files), len(look_at_packs(packed, deep=True))) == (0, 5)


def test_packs_of_one_name_have_the_same_bytes(tmp_path: Path):
    """Or the index of one would be taken for that of the other, which may be as long."""
    for name in ("one", "other"):
        put(tmp_path / name, *recipes(5))
    again(tmp_path / "other", recipes(5)[2])
    for name in ("one", "other"):
        pack(tmp_path / name)
    one, other = tar_of(tmp_path / "one"), tar_of(tmp_path / "other")
    assert one.stat().st_size == other.stat().st_size
    assert one.name != other.name


def test_the_good_one_of_two_stays(packed: Path):
    """Two packs have an entry, as a kill leaves them, and it is damaged in the one that is not written anew."""
    (wanted,) = (entry for entry in Folder(packed).all_entries if entry.key == recipes(5)[0].key(ENCODER))
    place = packed / "other"
    put(place, *recipes(9))
    pack(place)
    for path in (place / packs.FOLDER).iterdir():
        shutil.copy(path, packed / packs.FOLDER)
    (twin,) = (entry for entry in look_at_packs(packed) if entry.key == wanted.key and entry.pack != wanted.pack)
    flip(twin.held_by, twin.offset + twin.num_bytes - 1)
    found = look_at_packs(packed).packs
    merged = [pack for pack in found if pack.name == wanted.pack]
    kept = packs.Packs(packed, [pack for pack in found if pack.name != wanted.pack])
    packing._into_packs(packed, [], merged, kept)
    repair(Folder(packed, deep=True))
    assert keys(packed) == {recipe.key(ENCODER) for recipe in recipes(9)}


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


@pytest.mark.parametrize("move", [pack, unpack])
def test_what_moves_while_a_folder_is_looked_at_is_found(packed: Path, move: Move, monkeypatch: pytest.MonkeyPatch):
    put(packed, *recipes(9)[5:])
    real = look

    def meanwhile(folder: Path, *, deep: bool) -> Found:
        with monkeypatch.context() as patched:
            patched.setattr("wangen.runtime.cache.folder.look", real)
            if move is pack:
                move(packed)
            found = real(folder, deep=deep)
            if move is unpack:
                move(packed)
        return found

    monkeypatch.setattr("wangen.runtime.cache.folder.look", meanwhile)
    folder = Folder(packed)
    if move is unpack:
        assert all(folder.find(recipe.key(ENCODER)) for recipe in recipes(9))
    assert {entry.key for entry in folder.all_entries} == {recipe.key(ENCODER) for recipe in recipes(9)}


def test_what_is_packed_anew_while_packs_are_looked_at_is_found(packed: Path, monkeypatch: pytest.MonkeyPatch):
    put(packed, *recipes(9)[5:])
    real = packs._open
    opened: list[str] = []

    def meanwhile(folder: Path, path: Path, *words: Any) -> packs.Pack | None:
        if not opened:
            with monkeypatch.context() as patched:
                patched.setattr(packs, "_open", real)
                pack(packed)
        opened.append(path.name)
        return real(folder, path, *words)

    monkeypatch.setattr(packs, "_open", meanwhile)
    assert len(look_at_packs(packed)) == 9
    assert len(opened) == 2, "the pack that was there first is gone"


def test_entries_that_moved_are_not_looked_for_one_by_one(packed: Path, monkeypatch: pytest.MonkeyPatch):
    looked = Folder(packed).all_entries
    put(packed, *recipes(9)[5:])
    pack(packed)
    calls: list[Path] = []
    monkeypatch.setattr(reading, "look_at_packs", lambda folder: (calls.append(folder), look_at_packs(folder))[1])
    assert all(load(entry)["latent"].equal(tensors()["latent"]) for entry in looked)
    assert len(calls) == 1


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
