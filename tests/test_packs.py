"""Packs: entries in large files are found, judged, read, removed and unpacked as files of their own are."""

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_entries import CONTENT, ENCODER, LATENT, TEXT, put, recipes, states, tensors

from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.runtime.cache import CorruptEntryError, EmbeddingCache, Folder, claims, load, packing, packs
from wangen.runtime.cache.leftovers import repair
from wangen.runtime.cache.packing import fold, pack, unpack
from wangen.runtime.cache.packs import index_path, look_at_packs
from wangen.runtime.cache.removal import remove_entries
from wangen.runtime.cache.writer import Writer

OTHER = replace(ENCODER, dtype="bfloat16")


def files(folder: Path) -> dict[str, bytes]:
    """The entries that are files of their own."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def pack_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / packs.FOLDER).iterdir()}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of eight entries."""
    for module in (packs, packing):
        monkeypatch.setattr(module, "PACK_ENTRIES", 8)


@pytest.fixture
def packed(tmp_path: Path, small: None) -> Path:
    """Twenty latents, two of another encoder, and a text, in packs."""
    put(tmp_path, *recipes(20), TEXT)
    put(tmp_path, *recipes(2), encoder=OTHER)
    moved = pack(tmp_path)
    assert (moved.num_entries, moved.damaged) == (23, {})
    return tmp_path


def test_what_is_packed_is_judged_and_read_as_before(tmp_path: Path, small: None):
    put(tmp_path, *recipes(20), TEXT)
    put(tmp_path, *recipes(2), encoder=OTHER)
    before = {entry.key: (entry._replace(pack="", offset=0), load(entry)) for entry in Folder(tmp_path).all_entries}
    pack(tmp_path)
    folder = Folder(tmp_path)
    assert (files(tmp_path), folder.files, folder.damaged) == ({}, [], {})
    assert len(folder.packs.packs) == 3
    after = {entry.key: (entry._replace(pack="", offset=0), load(entry)) for entry in folder.all_entries}
    assert {key: entry for key, (entry, _) in after.items()} == {key: entry for key, (entry, _) in before.items()}
    assert all(torch.equal(tensor, before[key][1][name]) for key, (_, loaded) in after.items()
               for name, tensor in loaded.items())  # fmt: skip
    for number, recipe in enumerate(recipes(20)):
        assert folder.judge(recipe, ENCODER).state == folder.judge(recipe, None).state == "valid"
        assert folder.judge(recipe, OTHER).state == ("valid" if number < 2 else "stale")
    changed = replace(LATENT, content=CONTENT | {"width": 4096}, name="3.jpg")
    assert folder.judge(changed, ENCODER).reason == "the size changed from 3x48 to 4096x48"
    assert folder.judge(replace(TEXT, content={"caption": "a dog"}), ENCODER).reason == "the caption changed"
    assert folder.judge(replace(LATENT, name="new.jpg", content={"source": "ef"}), ENCODER).state == "missing"
    entry = folder.find(recipes(20)[7].key(ENCODER))
    assert entry is not None
    assert torch.equal(load(entry)["latent"], tensors()["latent"])


def test_a_pack_is_a_tar_of_the_same_files(tmp_path: Path):
    put(tmp_path, *recipes(5), TEXT)
    before = files(tmp_path)
    pack(tmp_path)
    (tar_path,) = (tmp_path / packs.FOLDER).glob("*.tar")
    with tarfile.open(tar_path) as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar} == before  # type: ignore[union-attr]
    assert unpack(tmp_path).num_entries == 6
    assert files(tmp_path) == before
    assert pack_files(tmp_path) == {}


def test_packing_again_does_nothing_and_the_same_entries_give_the_same_bytes(packed: Path, tmp_path: Path):
    before = pack_files(packed)
    assert pack(packed).num_entries == 0
    assert pack_files(packed) == before
    again = tmp_path / "again"
    put(again, *reversed(recipes(20)), TEXT)
    put(again, *recipes(2), encoder=OTHER)
    pack(again)
    assert pack_files(again) == before


@pytest.mark.usefixtures("small")
def test_what_is_new_is_added_and_small_packs_grow(tmp_path: Path):
    put(tmp_path, *recipes(18))
    pack(tmp_path)
    full = {pack.name for pack in look_at_packs(tmp_path).packs if len(pack.index) == 8}
    assert len(full) == 2
    put(tmp_path, TEXT)
    assert pack(tmp_path).num_entries == 3
    found = look_at_packs(tmp_path)
    assert {pack.name for pack in found.packs if pack.name in full} == full
    assert sorted(len(pack.index) for pack in found.packs) == [3, 8, 8]
    assert len(pack_files(tmp_path)) == 6
    assert states(tmp_path, recipes(18)[17]) == states(tmp_path, TEXT, deep=True) == "valid"


def test_removed_entries_leave_the_index_and_with_time_the_pack(packed: Path, capsys: pytest.CaptureFixture[str]):
    cache = EmbeddingCache(packed)
    num_bytes = sum(map(len, pack_files(packed).values()))
    assert main(["cache", "clear", str(packed), "--kind", "text_encoder_output", "--yes"]) == 0
    assert cache.get_cache_stats()["latent"] == 22
    assert states(packed, TEXT, deep=True) == "missing"
    capsys.readouterr()
    assert main(["cache", "stats", str(packed)]) == 0
    assert "22 of them in 3 packs; " in capsys.readouterr().out
    for recipe in recipes(20)[:12]:
        entry = look_at_packs(packed).find(recipe.key(ENCODER))
        assert entry is not None
        remove_entries([entry])
    assert main(["cache", "pack", str(packed)]) == 0
    assert sum(map(len, pack_files(packed).values())) < num_bytes
    left = Folder(packed, deep=True)
    assert (len(left.all_entries), left.damaged) == (10, {})
    assert all(pack.index.removed_bytes <= pack.index.pack_bytes / 4 for pack in left.packs.packs)
    assert cache.clear_cache() == 10
    assert pack_files(packed) == {}


def test_a_lost_or_damaged_index_is_made_anew(packed: Path):
    indexes = sorted((packed / packs.FOLDER).glob("*.index.safetensors"))
    before = pack_files(packed)
    indexes[0].unlink()
    data = bytearray(indexes[1].read_bytes())
    data[-1] ^= 1
    indexes[1].write_bytes(data)
    indexes[2].write_bytes(indexes[2].read_bytes()[:-1])
    assert len(Folder(packed).all_entries) == 23
    assert pack_files(packed) == before


def damaged_tar(folder: Path, change: int) -> Path:
    """Flip a bit in the payload of the entry of TEXT; its pack."""
    entry = look_at_packs(folder).find(TEXT.key(ENCODER))
    assert entry is not None
    data = bytearray(entry.held_by.read_bytes())
    data[entry.offset + entry.num_bytes - 3] ^= change
    entry.held_by.write_bytes(data)
    return entry.held_by


def test_damage_is_found_never_loaded_and_repaired(packed: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["cache", "verify", str(packed)]) == 0
    assert "23 entries in 3 packs" in capsys.readouterr().out
    damaged_tar(packed, 1)
    entry = Folder(packed).find(TEXT.key(ENCODER))
    assert entry is not None
    with pytest.raises(CorruptEntryError, match="the payload is not what was written"):
        load(entry)
    assert main(["cache", "verify", str(packed)]) == 1
    said = capsys.readouterr().out
    assert f"damaged: {entry.pack}/{entry.file}: the payload is not what was written" in said
    assert main(["cache", "unpack", str(packed)]) == 1  # what is good comes out, and what is not stays
    assert len(files(packed)) == 22
    assert [pack.name for pack in look_at_packs(packed).packs] == [entry.pack]
    folder = Folder(packed, deep=True)
    assert folder.judge(TEXT, ENCODER).state == "corrupt"
    assert repair(folder)[0] == 1
    assert folder.judge(TEXT, ENCODER).state == Folder(packed, deep=True).judge(TEXT, ENCODER).state == "missing"
    assert main(["cache", "pack", str(packed)]) == 0
    assert len(Folder(packed, deep=True).all_entries) == 22


def test_a_pack_that_ends_in_the_middle_keeps_what_is_whole(packed: Path):
    path = sorted((packed / packs.FOLDER).glob("*.tar"))[0]
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    path.write_bytes(path.read_bytes()[: last.offset_data + 10])
    folder = Folder(packed)
    assert len(folder.all_entries) == 22
    assert any(name.startswith(f"packs/{path.name}") for name in folder.damaged)
    assert repair(folder)[0] >= 1
    assert (Folder(packed).damaged, len(Folder(packed).all_entries)) == ({}, 22)


def test_a_kill_between_two_files_loses_nothing_and_is_finished(packed: Path, monkeypatch: pytest.MonkeyPatch):
    """Files that were packed and not yet removed, and a half-written pack."""
    new = [replace(recipe, name=f"new-{recipe.name}", content=CONTENT | {"height": number})
           for number, recipe in enumerate(recipes(8))]  # fmt: skip
    put(packed, *new)
    kept = files(packed)
    with monkeypatch.context() as patched:
        patched.setattr(packing, "remove_entries", lambda _entries: {})
        patched.setattr(packing, "take_out", lambda _pack, _keys: None)
        pack(packed)
    assert files(packed) == kept
    assert len({entry.key for entry in Folder(packed).all_entries}) == 31
    pack(packed)
    found = look_at_packs(packed, deep=True)
    assert (files(packed), len(found), found.damaged) == ({}, 31, {})
    assert len(pack_files(packed)) == 8


def test_an_index_without_its_pack_goes_with_the_next_packing(packed: Path):
    path = next((packed / packs.FOLDER).glob("*.tar"))
    lonely = path.with_name(f"{'ab' * 10}.index.safetensors")
    lonely.write_bytes(index_path(path).read_bytes())
    assert len(Folder(packed).all_entries) == 23
    pack(packed)
    assert not lonely.exists()
    assert len(pack_files(packed)) == 6


def test_a_disk_that_refuses_leaves_every_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path, *recipes(5))
    before = files(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(packing.os, "fsync", full)
        with pytest.raises(WangenError, match="No space left on device") as caught:
            pack(tmp_path)
    assert "no entry is lost" in str(caught.value)
    assert (files(tmp_path), pack_files(tmp_path)) == (before, {})


def test_a_run_that_looked_before_finds_what_was_packed_and_unpacked_since(tmp_path: Path):
    put(tmp_path, *recipes(3))
    looked = Folder(tmp_path).all_entries
    pack(tmp_path)
    assert all(torch.equal(load(entry)["latent"], tensors()["latent"]) for entry in looked)
    looked = Folder(tmp_path).all_entries
    put(tmp_path, TEXT)
    pack(tmp_path)  # into another pack
    assert all(torch.equal(load(entry)["latent"], tensors()["latent"]) for entry in looked)
    unpack(tmp_path)
    assert all(torch.equal(load(entry)["latent"], tensors()["latent"]) for entry in looked)
    for entry in Folder(tmp_path).all_entries:
        entry.path.unlink()
    with pytest.raises(CorruptEntryError, match="cannot be read"):
        load(looked[0])


def test_an_entry_encoded_anew_counts_before_its_packed_twin(packed: Path):
    with Writer(packed, again=True) as writer:
        writer.put(TEXT, ENCODER, tensors(2.0))
    for _ in range(2):
        entry = Folder(packed).find(TEXT.key(ENCODER))
        assert entry is not None
        assert torch.equal(load(entry)["latent"], tensors(2.0)["latent"])
        pack(packed)
    assert len(look_at_packs(packed, deep=True)) == 23


def test_a_writer_packs_what_it_wrote_whenever_there_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in (packs, packing):
        monkeypatch.setattr(module, "PACK_ENTRIES", 4)
    monkeypatch.setattr("wangen.runtime.cache.writer.PACK_ENTRIES", 4)
    theirs = put(tmp_path, TEXT)
    most = 0
    with Writer(tmp_path, packed=True) as writer:
        for recipe in recipes(10):
            assert writer.claim(recipe, ENCODER) == "mine"
            writer.put(recipe, ENCODER, tensors())
            writer.commit()
            most = max(most, len(files(tmp_path)))
        assert writer.claim(recipes(10)[0], ENCODER) == "done"
    assert most == 4
    assert sorted(len(pack.index) for pack in look_at_packs(tmp_path, deep=True).packs) == [2, 4, 4]
    assert [path.name for path in theirs] == list(files(tmp_path))
    with Writer(tmp_path, again=True) as writer:
        assert writer.claim(recipes(10)[0], ENCODER) == "mine"


def test_two_who_fold_leave_each_other_alone(tmp_path: Path):
    put(tmp_path, *recipes(6))
    entries = Folder(tmp_path).all_entries
    fold(tmp_path, entries[:3])
    fold(tmp_path, entries)  # three are packed already, and their files are gone
    found = Folder(tmp_path, deep=True)
    assert (len(found.all_entries), found.files, found.damaged) == (6, [], {})


def test_one_process_packs_at_a_time(packed: Path, capsys: pytest.CaptureFixture[str]):
    with claims.packing(packed) as mine:
        assert mine
        assert main(["cache", "pack", str(packed)]) == 1
        assert "another process packs or unpacks this cache" in capsys.readouterr().err
    assert main(["cache", "unpack", str(packed)]) == 0


def test_names_in_a_foreign_tar_lead_nowhere(tmp_path: Path):
    (path,) = put(tmp_path, LATENT)
    place = tmp_path / packs.FOLDER
    place.mkdir()
    with tarfile.open(place / "theirs.tar", "w") as tar:
        tar.add(path, f"../../{path.name}")
        tar.add(__file__, "notes.py")
    path.unlink()
    assert Folder(tmp_path).all_entries == []
    unpack(tmp_path)
    assert not (tmp_path.parent / path.name).exists()
    assert (place / "theirs.tar").exists()
