"""The caching steps and training on packs: the same results as on files, also when killed at any call."""

import os
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cache_entries import ENCODER, put, recipes, tensors
from cached_bundle import Bundle
from killing import KILLED, end_of, fork, forked
from test_cache_merge import cached, entries, step, with_cache
from tiny import TinyRun
from tiny_set import CACHES, copy, leftovers, lines_of, make_set, picture, run_all

from wangen.generator.cli import main
from wangen.generator.files import machine
from wangen.runtime import train
from wangen.runtime.cache import Folder, load, packing
from wangen.runtime.cache.packing import pack
from wangen.runtime.cache.packs import FOLDER, look_at_packs
from wangen.runtime.cache.reading import whole_bytes
from wangen.runtime.cache.writer import Writer

pytestmark = pytest.mark.usefixtures("one_thread", "quick")
pytest_plugins = ("bundle_fixtures", "tiny_set_fixtures")
forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


def found(*folders: Path) -> dict[str, bytes]:
    """Every entry by its name, wherever it lies."""
    return {entry.file: whole_bytes(entry) for folder in folders for entry in Folder(folder).all_entries}


def caches(bundle: Bundle) -> list[Path]:
    return [bundle.folder / cache for cache in CACHES]


def packed_lines(bundle: Bundle, *flags: str) -> list[list[str]]:
    latents, _ = lines_of(bundle, ["--packed", *flags])
    return [latents, bundle.text_line("--packed", *flags)]


def test_training_on_packs_leaves_the_bytes_of_training_on_files(tiny_run: TinyRun, tmp_path: Path):
    packed = cached(with_cache(tiny_run, tmp_path / "packed"), "--packed")
    assert entries(packed) == {}
    assert found(packed.folder / "cache") == entries(tiny_run)
    assert step(packed, "check_cache", "--deep") == 0
    loras = []
    for run, out in ((tiny_run, tmp_path / "loose-out"), (packed, tmp_path / "packed-out")):
        report = train.run(run.options(out, max_train_steps=3))
        assert report.counts["computed"] == 0
        loras.append((out / "lora.safetensors").read_bytes())
    assert loras[0] == loras[1]
    assert main(["cache", "unpack", str(packed.dataset_config)]) == 0
    assert entries(packed) == entries(tiny_run)
    assert step(packed, "check_cache") == 0


def test_a_packed_run_encodes_once_and_takes_in_what_is_there(tmp_path: Path, weights: dict[str, Path]):
    bundle = make_set(tmp_path / "set", weights)
    assert run_all(lines_of(bundle, ()))() == 0
    before = found(*caches(bundle))
    for _ in range(2):
        assert run_all(packed_lines(bundle))() == 0
        assert [bundle.counts(name)["computed"] for name in ("cache_latents", "cache_text")] == [0, 0]
        assert (found(*caches(bundle)), bundle.files().keys() & before.keys()) == (before, set())
    assert not list((bundle.folder / "photos_cache").glob("*.safetensors"))
    picture(bundle, 0, caption="another caption")
    half = caches(bundle)[0] / FOLDER / f".{'0' * 20}-{machine()}{2**31 - 1:08x}01234567.tmp"  # of no process
    half.write_bytes(b"half a pack")
    assert run_all(packed_lines(bundle))() == 0
    assert not half.exists()
    counts = bundle.counts("cache_text")
    assert (counts["computed"], counts["removed"]) == (1, 1)
    assert bundle.counts("cache_latents")["computed"] == 0
    assert len(found(*caches(bundle)).keys() - before.keys()) == 1
    assert bundle.check("--deep") == 0
    assert main(["cache", "prune", str(bundle.toml), "--yes"]) == 0
    assert bundle.check("--deep") == 0


@forking
@pytest.mark.slow
def test_parts_write_packs_of_their_own_side_by_side(tmp_path: Path, weights: dict[str, Path]):
    whole, bundle = (make_set(tmp_path / name, weights) for name in ("whole", "parts"))
    assert run_all(lines_of(whole, ()))() == 0
    children = [fork(run_all(packed_lines(bundle, "--shard", f"{part}/3", "--report_dir", str(tmp_path / f"{part}"))))
                for part in range(3)]  # fmt: skip
    assert [end_of(child) for child in children] == [0, 0, 0]
    assert found(*caches(bundle)) == found(*caches(whole))
    for cache in caches(bundle):
        packs = look_at_packs(cache, deep=True)
        assert len(packs) == len({entry.key for entry in packs})
        assert not list(cache.glob("*.safetensors"))
    assert bundle.check("--deep") == 0
    assert leftovers(bundle) == []


def some_packed(folder: Path) -> None:
    """Two packs with a gap in one, and entries that are files."""
    put(folder, *recipes(6))
    assert main(["cache", "pack", str(folder)]) == 0
    put(folder, *recipes(4), encoder=replace(Folder(folder).all_entries[0].encoder, dtype="bfloat16"))


@pytest.mark.slow
@forking
@pytest.mark.parametrize("every", [5, 1])
@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_killed_at_any_call_no_entry_is_lost_and_the_next_call_finishes(command: str, every: int, tmp_path: Path):
    some_packed(tmp_path / "before")
    wanted = found(tmp_path / "before")
    whole = shutil.copytree(tmp_path / "before", tmp_path / "whole")
    code, calls = forked(lambda: main(["cache", command, str(whole)]), 0)
    assert code == 0
    for at in range(1, len(calls) + 1, every):
        place = shutil.copytree(tmp_path / "before", tmp_path / f"at{at}")
        code, _ = forked(partial(main, ["cache", command, str(place)]), at)
        assert code == KILLED, calls[at - 1]
        folder = Folder(place, deep=True)
        assert ({entry.file: whole_bytes(entry) for entry in folder.all_entries}, folder.damaged) == (wanted, {})
        assert main(["cache", command, str(place)]) == 0
        assert found(place) == wanted
        assert bool(list(place.glob("*.safetensors"))) == (command == "unpack"), calls[at - 1]
        assert bool(list((place / FOLDER).glob("*.tar"))) == (command == "pack")
        assert not [path.name for path in place.rglob(".*") if path.name.endswith(".tmp")], calls[at - 1]
        shutil.rmtree(place)


def values(folder: Path) -> list[float]:
    """What the five entries hold."""
    looked = Folder(folder)
    entries = [looked.find(recipe.key(ENCODER)) for recipe in recipes(5)]
    return [load(entry)["latent"].flatten()[0].item() for entry in entries if entry]


@pytest.mark.slow
@forking
@pytest.mark.parametrize(("num_again", "merged"), [(2, True), (2, False), (5, False)])
def test_killed_at_any_call_what_was_encoded_anew_counts(
    tmp_path: Path, num_again: int, merged: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(packing, "_is_small", lambda _pack: merged)
    place = tmp_path / "before"
    put(place, *recipes(5))
    pack(place)
    with Writer(place, again=True) as writer:
        for recipe in recipes(num_again):
            writer.put(recipe, ENCODER, tensors(2.0))
    wanted = [2.0] * num_again + [1.0] * (5 - num_again)
    whole = shutil.copytree(place, tmp_path / "whole")
    code, calls = forked(lambda: main(["cache", "pack", str(whole)]), 0)
    assert code == 0
    for at in range(1, len(calls) + 1):
        killed = shutil.copytree(place, tmp_path / f"at{at}")
        assert forked(partial(main, ["cache", "pack", str(killed)]), at)[0] == KILLED
        assert values(killed) == wanted, calls[at - 1]
        assert main(["cache", "pack", str(killed)]) == 0
        assert values(killed) == wanted, calls[at - 1]
        assert (len(Folder(killed).files), len(look_at_packs(killed))) == (0, 5), calls[at - 1]


@forking
@pytest.mark.slow
def test_packed_caching_killed_at_any_call_goes_on(tmp_path: Path, weights: dict[str, Path]):
    before = make_set(tmp_path / "before", weights)
    whole = copy(before, tmp_path / "whole")
    code, calls = forked(run_all(packed_lines(whole)), 0)
    assert code == 0
    wanted = found(*caches(whole))
    draw = random.Random(7)
    for at in draw.sample(range(1, len(calls) + 1), 25):
        bundle = copy(before, tmp_path / f"at{at}")
        code, _ = forked(run_all(packed_lines(bundle)), at)
        assert code == KILLED
        assert all(not Folder(cache, deep=True).damaged for cache in caches(bundle))
        assert run_all(packed_lines(bundle))() == 0
        assert found(*caches(bundle)) == wanted, calls[at - 1]
        assert not [path for cache in caches(bundle) for path in cache.glob("*.safetensors")], calls[at - 1]
        assert leftovers(bundle) == [], calls[at - 1]
        assert bundle.check("--deep") == 0
        shutil.rmtree(bundle.folder)


@forking
@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_reading_goes_on_while_another_process_moves_the_entries(command: str, tmp_path: Path):
    put(tmp_path, *recipes(30))
    if command == "unpack":
        assert main(["cache", "pack", str(tmp_path)]) == 0
    looked = Folder(tmp_path).all_entries
    wanted = [whole_bytes(entry) for entry in looked]
    done = tmp_path / "done"

    def work() -> int:
        code = main(["cache", command, str(tmp_path)])
        done.touch()
        return code

    child = fork(work)
    rounds = 0
    while not done.exists() or not rounds:
        assert [whole_bytes(entry) for entry in looked] == wanted
        rounds += 1
    assert end_of(child) == 0
    assert [whole_bytes(entry) for entry in looked] == wanted
    assert [entry.pack == "" for entry in Folder(tmp_path).all_entries] == [command == "unpack"] * 30
