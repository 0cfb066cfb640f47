"""Several processes at once on one cache folder: no work twice, no entry lost, the same bytes as from one."""

import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_entries import CONTENT, ENCODER, LATENT, put
from cached_bundle import Bundle
from killing import beside, end_of, fork, forked
from tiny_set import copy, kept, leftovers, lines_of, make_set, picture, run_all

from wangen.generator import lock
from wangen.generator.cli import main
from wangen.generator.lock import LEASE_S, START_S
from wangen.runtime import needs as needs_module
from wangen.runtime.cache import Encoder, Entry, Folder, needed, writer
from wangen.runtime.cache.claims import Claims
from wangen.runtime.cache.needed import DatasetNeeds
from wangen.runtime.needs import encoders_before

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked"),
    pytest.mark.usefixtures("one_thread", "quick"),
]
pytest_plugins = ("bundle_fixtures", "tiny_set_fixtures")

NUM_LATENTS, NUM_CAPTIONS = 14, 14
"""The empty prompt is among the captions; both folders have it, which is encoded once."""


@pytest.fixture(scope="module", autouse=True)
def slower(quick: None) -> Iterator[None]:
    """Each entry takes a few milliseconds, now more and now less, so that processes get in each other's way."""
    judge = writer.judge_values

    def slow(*words: Any) -> None:
        time.sleep(random.Random(time.monotonic_ns()).uniform(0, 0.01))
        judge(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "judge_values", slow)
        patch.setattr(lock, "START_S", START_S)  # here a claim without content is one that is just being made
        yield


@pytest.fixture(scope="module")
def whole(room: Path, weights: dict[str, Path]) -> Bundle:
    """Twelve pictures and a clip, cached by one process after the other; tests must not change it."""
    bundle = make_set(room / "whole", weights)
    for number in range(4, 12):
        picture(bundle, number)
    (bundle.folder / "clips" / "walk.txt").write_text("a walk", encoding="utf-8")
    assert run_all(lines_of(bundle, ()))() == 0
    return bundle


@pytest.fixture
def bundle(whole: Bundle, tmp_path: Path) -> Bundle:
    """The same with nothing cached."""
    made = copy(whole, tmp_path / "set")
    for cache in made.folder.glob("*_cache"):
        for file in cache.iterdir():
            file.unlink()
    return made


def works(bundle: Bundle, *lines: list[str]) -> list[Callable[[], int]]:
    """Each line as a process of its own, with its own report."""
    reports = [bundle.folder / f"report{number}" for number in range(len(lines))]
    return [partial(main, [*line, "--report_dir", str(place)]) for line, place in zip(lines, reports, strict=True)]


def computed(bundle: Bundle) -> list[int]:
    """How many entries each process encoded, by its report."""
    reports = sorted(bundle.folder.glob("report*/*.report.json"))
    return [json.loads(path.read_text(encoding="utf-8"))["counts"]["computed"] for path in reports]


def assert_same(bundle: Bundle, whole: Bundle) -> None:
    assert kept(bundle) == kept(whole)
    assert leftovers(bundle) == []
    assert bundle.check("--deep") == 0


@pytest.mark.parametrize("number", [2, 3])
def test_processes_share_the_work(bundle: Bundle, whole: Bundle, number: int):
    for line, count in ((bundle.latents_line(), NUM_LATENTS), (bundle.text_line(), NUM_CAPTIONS)):
        assert beside(works(bundle, *[line] * number)) == [0] * number
        assert count <= sum(computed(bundle)[:number]) <= count + number
        for report in bundle.folder.glob("report*/*"):
            report.unlink()
    assert_same(bundle, whole)


def test_both_steps_at_once_each_twice(bundle: Bundle, whole: Bundle):
    lines = lines_of(bundle, ())
    assert beside(works(bundle, *lines, *lines)) == [0] * 4
    total = NUM_LATENTS + NUM_CAPTIONS
    assert total <= sum(computed(bundle)) <= total + 4
    assert_same(bundle, whole)


@pytest.mark.parametrize("at_once", [True, False])
def test_shards_are_disjoint_and_together_whole(bundle: Bundle, whole: Bundle, at_once: bool):
    lines = [[*line, "--shard", f"{i}/2"] for line in lines_of(bundle, ()) for i in range(2)]
    run = beside if at_once else lambda works: [end_of(fork(work)) for work in works]
    assert run(works(bundle, *lines)) == [0] * 4
    assert sum(computed(bundle)) == NUM_LATENTS + NUM_CAPTIONS
    assert max(computed(bundle)) < NUM_LATENTS
    assert_same(bundle, whole)


def test_who_waits_for_another_keeps_nothing_back(bundle: Bundle, whole: Bundle, monkeypatch: pytest.MonkeyPatch):
    """Else two processes could wait for what the other one has encoded and not yet shown."""
    names = [name for name in whole.files() if ".latent." in name]
    assert len(names) % 2 == 0  # in groups of two one stays alone
    other = Claims(bundle.folder / "photos_cache")
    assert other.take(names[-1].split(".")[-3][-20:])
    seen = []

    def wait(_seconds: float) -> None:
        seen.append(len(bundle.files()))
        other.close()

    monkeypatch.setattr(needs_module, "time", SimpleNamespace(sleep=wait))
    bundle.latents("--batch_size", "1")
    assert seen == [11]
    bundle.text()
    assert_same(bundle, whole)


# What a process holds that was killed


def killed_on_the_way(bundle: Bundle, line: list[str], prepare: Callable[[], object] = lambda: None) -> list[str]:
    """Kill the step while it holds claims; returns their names."""

    def work() -> int:
        prepare()
        return main(line)

    _, calls = forked(work, call_of_the_third_entry(bundle, line))
    claims = [path.name for path in bundle.folder.glob("*_cache/.claim-*")]
    assert claims
    assert calls
    return claims


def call_of_the_third_entry(bundle: Bundle, line: list[str]) -> int:
    """The call that moves the third entry into place."""
    probe = copy(bundle, bundle.folder.parent / "probe")
    _, calls = forked(partial(main, [word.replace(str(bundle.folder), str(probe.folder)) for word in line]), 0)
    return [at for at, call in enumerate(calls, 1) if call == "replace half entry"][2]


def no_waiting(_seconds: float) -> None:
    pytest.fail("it waits for a process that is dead")


@pytest.mark.parametrize("step", [0, 1])
def test_what_a_killed_process_held_is_taken_over_without_waiting(
    bundle: Bundle, whole: Bundle, step: int, monkeypatch: pytest.MonkeyPatch
):
    lines = lines_of(bundle, ())
    killed_on_the_way(bundle, lines[step])
    there = len(bundle.files())
    assert there == 2
    monkeypatch.setattr(needs_module, "time", SimpleNamespace(sleep=no_waiting))
    assert main(lines[step]) == 0
    assert bundle.counts(lines[step][0])["computed"] == (NUM_LATENTS, NUM_CAPTIONS)[step] - there
    assert main(lines[1 - step]) == 0
    assert_same(bundle, whole)


@pytest.mark.parametrize("step", [0, 1])
def test_what_a_killed_process_of_another_machine_held_is_taken_over_after_its_lease(
    bundle: Bundle, whole: Bundle, step: int, monkeypatch: pytest.MonkeyPatch
):
    lines = lines_of(bundle, ())
    claims = killed_on_the_way(bundle, lines[step], lambda: setattr(socket, "gethostname", lambda: "elsewhere"))
    waited = []

    def wait(_seconds: float) -> None:
        """The lease runs out."""
        waited.append({path.name for path in bundle.folder.glob("*_cache/.claim-*")})
        for path in bundle.folder.glob("*_cache/.*"):
            os.utime(path, (time.time() - 10 * LEASE_S,) * 2)

    monkeypatch.setattr(needs_module, "time", SimpleNamespace(sleep=wait))
    assert main(lines[step]) == 0
    assert waited == [set(claims)]
    assert main(lines[1 - step]) == 0
    for path in bundle.folder.glob("*_cache/.*.tmp"):  # nobody can know whether that process lives
        os.utime(path, (time.time() - 3601,) * 2)
    assert main(lines[1 - step]) == 0
    assert_same(bundle, whole)


# Removing


def second_dataset(bundle: Bundle) -> Bundle:
    """Another TOML with pictures of its own, equal to those of the first one, on the same cache folders."""
    other = copy(bundle, bundle.folder.parent / "other")
    text = other.toml.read_text(encoding="utf-8")
    for cache in ("photos_cache", "clips_cache"):
        text = text.replace(f"{other.folder.as_posix()}/{cache}", f"{bundle.folder.as_posix()}/{cache}")
    other.toml.write_text(text, encoding="utf-8")
    return other


def without_two(bundle: Bundle) -> None:
    for number in (2, 3):
        for path in bundle.photos.glob(f"{number}.*"):
            path.unlink()


def wait_for(path: Path, seconds: float = 60.0) -> bool:
    """Whether a file has come into being in time."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.002)
    return path.exists()


def test_entries_that_another_running_dataset_needs_stay(bundle: Bundle, whole: Bundle):
    other = second_dataset(bundle)
    assert run_all(lines_of(bundle, ()))() == 0
    picture(other, 20)
    without_two(bundle)
    folder = Folder(bundle.folder / "photos_cache")
    needs = [DatasetNeeds(folder, other.toml, kind).path for kind in ("latent", "text_encoder_output")]
    running = [fork(work) for work in works(other, *lines_of(other, ()))]
    assert all(map(wait_for, needs))
    assert run_all(lines_of(bundle, ()))() == 0
    assert bundle.counts("cache_latents")["removed"] == 0
    assert [end_of(child) for child in running] == [0, 0]
    assert computed(other) == [1, 1]
    assert other.check("--deep") == bundle.check("--deep") == 0


def test_a_dataset_that_comes_while_another_removes_gets_what_it_needs(bundle: Bundle, whole: Bundle):
    """Between the decision to remove and the removal the other one looks at the folder, or waits."""
    other = second_dataset(bundle)
    assert run_all(lines_of(bundle, ()))() == 0
    without_two(bundle)
    needs = DatasetNeeds(Folder(bundle.folder / "photos_cache"), other.toml, "latent").path
    removing = bundle.folder / "removing"
    remove = needed.remove_entries

    def slow(entries: Iterable[Entry]) -> dict[Entry, OSError]:
        if not removing.exists():
            removing.touch()
            if wait_for(needs, 0.5):  # it may have found the entry by now
                time.sleep(0.1)
        return remove(entries)

    def work() -> int:
        needed.remove_entries = slow
        return main(bundle.latents_line())

    child = fork(work)
    assert wait_for(removing)
    other.latents()
    assert end_of(child) == 0
    assert bundle.counts("cache_latents")["removed"] == 2
    assert other.counts("cache_latents")["computed"] == 2
    other.text()
    assert other.check("--deep") == 0
    assert {name for name in whole.files() if ".latent." in name} == {n for n in bundle.files() if ".latent." in n}


def test_what_a_later_run_of_the_same_dataset_needs_stays(tmp_path: Path):
    """A run that began before the dataset grew may end last."""
    old, new = (replace(LATENT, content=CONTENT | {"width": width}) for width in (1, 2))
    keys = old.key(ENCODER), new.key(ENCODER)
    first, later = (DatasetNeeds(Folder(tmp_path), tmp_path / "a.toml", "latent") for _ in range(2))
    first.extend({keys[0]}, ENCODER)
    later.extend({*keys}, ENCODER)
    paths = put(tmp_path, old, new)
    assert later.reduce({*keys}, ENCODER) == 0
    assert first.reduce({keys[0]}, ENCODER) == 0
    assert all(path.exists() for path in paths)
    last = DatasetNeeds(Folder(tmp_path), tmp_path / "a.toml", "latent")
    last.extend({keys[1]}, ENCODER)
    assert last.reduce({keys[1]}, ENCODER) == 1
    assert [path.exists() for path in paths] == [False, True]


def test_what_cannot_be_removed_now_is_removed_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On Windows an entry may be open in another program."""
    (path,) = put(tmp_path, LATENT)
    unlink = Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            raise PermissionError(13, "Permission denied")
        unlink(self, missing_ok)

    def run() -> int:
        claim = DatasetNeeds(Folder(tmp_path), tmp_path / "a.toml", "latent")
        claim.extend(set(), ENCODER)
        return claim.reduce(set(), ENCODER)

    DatasetNeeds(Folder(tmp_path), tmp_path / "a.toml", "latent").extend({LATENT.key(ENCODER)}, ENCODER)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        assert run() == 0
    assert run() == 1
    assert not path.exists()


def test_who_made_the_entries_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another process may replace the record meanwhile, and a network drive may not answer a second time."""
    answers = iter([Encoder("a", "float32"), None])
    monkeypatch.setattr(DatasetNeeds, "encoder", property(lambda _: next(answers)))
    assert encoders_before([Folder(tmp_path)], [], "latent", tmp_path / "a.toml") == {Encoder("a", "float32")}
