"""Packs while others read, write, pack and unpack, and entries that are encoded anew: the youngest of each counts."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_entries import ENCODER, put, recipes, tensors
from killing import end_of, fork
from packed_folder import flip, keys, tar_of

from wangen.runtime.cache import Entry, Folder, Recipe, claims, load, packing, packs, reading, removal
from wangen.runtime.cache.index import Found, look
from wangen.runtime.cache.leftovers import repair
from wangen.runtime.cache.packing import Moved, fold, pack, unpack
from wangen.runtime.cache.packs import look_at_packs
from wangen.runtime.cache.writer import Writer

pytest_plugins = ("packed_fixtures",)
Move = Callable[[Path], Moved]


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


@pytest.mark.parametrize("move", [pack, unpack])
def test_what_only_moved_is_still_encoded_anew(packed: Path, move: Move):
    put(packed, *recipes(9)[5:])
    with Writer(packed, again=True) as writer:
        move(packed)
        assert [writer.claim(recipe, ENCODER) for recipe in recipes(9)] == ["mine"] * 9
        for recipe in recipes(9):
            writer.put(recipe, ENCODER, tensors(2.0))
        writer.commit()
        fold(packed, Folder(packed).files)
        assert [writer.claim(recipe, ENCODER) for recipe in recipes(9)] == ["done"] * 9


def test_a_file_stays_while_an_older_twin_cannot_be_removed(packed: Path, monkeypatch: pytest.MonkeyPatch):
    again(packed, recipes(5)[1])
    with monkeypatch.context() as patched:
        patched.setattr(removal, "take_out", refused)
        fold(packed, Folder(packed).files)
    assert (value(packed, recipes(5)[1]), len(Folder(packed).files)) == (2.0, 1)
    pack(packed)
    assert (value(packed, recipes(5)[1]), len(Folder(packed).files), len(look_at_packs(packed))) == (2.0, 0, 5)


def refused(*_words: object) -> None:
    raise PermissionError(13, "in use")


@pytest.mark.parametrize("values", [(2.0, 3.0), (3.0, 2.0), (4.0, 5.0)])
def test_of_two_packs_the_last_counts_also_when_they_are_unpacked(tmp_path: Path, values: tuple[float, float]):
    (recipe,) = recipes(1)
    names: dict[str, float] = {}
    for number in values:
        with Writer(tmp_path / f"{number}", packed=True) as writer:
            writer.put(recipe, ENCODER, tensors(number))
        names[tar_of(tmp_path / f"{number}").name] = number
        shutil.copytree(tmp_path / f"{number}", tmp_path / "both", dirs_exist_ok=True)
    wanted = names[max(names)]
    assert value(tmp_path / "both", recipe) == wanted
    unpack(tmp_path / "both")
    assert value(tmp_path / "both", recipe) == wanted
