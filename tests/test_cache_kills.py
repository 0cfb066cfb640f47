"""The caching steps killed at any moment: no torn entry, nothing lost, and run again the same bytes as unbroken."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cached_bundle import Bundle, uncached
from helpers import make_image
from killing import KILLED, Killer, forked
from tiny_set import CACHES, copy, kept, leftovers, lines_of, make_set, picture, run_all, write_tiny_toml

from wangen.runtime.cache import Folder

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="trials are forked"),
    pytest.mark.usefixtures("one_thread", "quick"),
]
pytest_plugins = ("bundle_fixtures", "tiny_set_fixtures")


@dataclass(frozen=True)
class Scene:
    """A dataset in which much is to be done.

    Attributes:
        before: what is cached.
        after: what an unbroken run makes of it.
        last: what it makes of it when the dataset changes once more before.
        calls: what an unbroken run changes in the file system.
    """

    bundle: Bundle
    flags: Sequence[str]
    before: dict[str, bytes]
    after: dict[str, bytes]
    last: dict[str, bytes]
    calls: Sequence[str]


def changed(bundle: Bundle) -> None:
    """What a user does between two runs; some entries are stale then, some are not needed any more."""
    picture(bundle, 0, caption="picture of another kind")
    make_image(bundle.photos / "1.png", (32, 32), seed=50)
    for suffix in (".png", ".txt"):
        (bundle.photos / f"2{suffix}").unlink()
        (bundle.photos / f"3{suffix}").rename(bundle.photos / f"three{suffix}")
    for number in (5, 6):
        picture(bundle, number)


def changed_again(bundle: Bundle) -> None:
    """What the user changes after an interruption: some of what was being made is not needed any more."""
    picture(bundle, 0, caption="picture of a third kind")
    make_image(bundle.photos / "1.png", (32, 32), seed=51)
    for path in (*bundle.photos.glob("[35].*"), *bundle.photos.glob("three.*")):
        path.unlink()


SCENES = {
    "nothing is cached": (False, (), lambda bundle: None),
    "the dataset changed": (True, (), changed),
    "it becomes image-to-video with controls": (
        True, ("--task", "i2v-A14B"), lambda bundle: [changed(bundle), write_tiny_toml(bundle, controls=True)],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def scenes(room: Path, weights: dict[str, Path]) -> Callable[[str], Scene]:
    """Each scene, made when it is first asked for; the trials work on copies."""
    made: dict[str, Scene] = {}

    def scene(name: str) -> Scene:
        if name not in made:
            made[name] = make_scene(room / f"scene{len(made)}", weights, *SCENES[name])
        return made[name]

    return scene


def make_scene(
    folder: Path, weights: dict[str, Path], cached: bool, flags: Sequence[str], change: Callable[[Bundle], object]
) -> Scene:
    bundle = make_set(folder / "set", weights)
    if cached:
        assert run_all(lines_of(bundle, ()))() == 0
    change(bundle)
    before = bundle.files()
    whole = copy(bundle, folder / "whole")
    code, calls = forked(run_all(lines_of(whole, flags)), 0)
    assert code == 0
    last = copy(bundle, folder / "last")
    changed_again(last)
    assert run_all(lines_of(last, flags))() == 0
    return Scene(bundle, flags, before, kept(whole), kept(last), calls)


def assert_whole(bundle: Bundle, scene: Scene) -> None:
    """Every entry is as it was or as it will be, and of those that stay none is missing."""
    for cache in CACHES:
        assert not Folder(bundle.folder / cache, deep=True).damaged
    found = bundle.files()
    for name, data in found.items():
        assert data in (scene.before.get(name), scene.after.get(name)), name
    assert scene.before.keys() & scene.after.keys() <= found.keys()


def assert_complete(bundle: Bundle, scene: Scene, wanted: dict[str, bytes]) -> None:
    assert kept(bundle) == wanted
    assert leftovers(bundle) == []
    assert bundle.check("--deep", *scene.flags) == 0


def trial(scene: Scene, place: Path, at: int, draw: random.Random) -> str:
    """Kill a run at a call, sometimes the next run too, then let one end; returns what the first kill hit."""
    bundle = copy(scene.bundle, place)
    lines = lines_of(bundle, scene.flags)
    code, calls = forked(run_all(lines if at <= len(scene.calls) else lines[::-1]), (at - 1) % len(scene.calls) + 1)
    assert code in (KILLED, 0)  # in the other order there are a few calls less
    assert_whole(bundle, scene)
    if draw.random() < 0.25:
        forked(run_all(lines), draw.randint(1, len(scene.calls) // 2))
        assert_whole(bundle, scene)
    again = draw.random() < 0.3
    if again:
        changed_again(bundle)
    assert run_all(draw.sample(lines, 2))() == 0
    assert_complete(bundle, scene, scene.last if again else scene.after)
    shutil.rmtree(place)
    return calls[-1] if code == KILLED else ""


def points(scene: Scene, number: int, draw: random.Random) -> list[int]:
    """Where to kill: once at each sort of call, the rest at random; beyond the last call the steps change places."""
    sorts: dict[str, list[int]] = {}
    for at, call in enumerate(scene.calls, 1):
        sorts.setdefault(call, []).append(at)
    each = [draw.choice(places) for places in sorts.values()]
    draw.shuffle(each)
    chosen = [*each, *(draw.randint(1, 2 * len(scene.calls)) for _ in range(number))]
    return chosen[:number]


def kill_often(scene: Scene, place: Path, number: int, seed: int) -> Counter[str]:
    draw = random.Random(seed)
    return Counter(trial(scene, place / str(at), at, draw) for at in points(scene, number, draw))


@pytest.mark.slow
def test_a_few_kills(scenes: Callable[[str], Scene], room: Path):
    scene = scenes("the dataset changed")
    hits = kill_often(scene, room / "few", 6, seed=1)
    assert hits.total() - hits[""] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_many_kills(scenes: Callable[[str], Scene], room: Path, name: str):
    scene = scenes(name)
    hits = kill_often(scene, room / "many", 80, seed=2)
    assert hits.total() - hits[""] >= 67
    wanted = {"write half entry", "replace half entry", "io.open claim", "write claim", "unlink claim", "write needs",
              "replace needs", "write index", "replace index", "write memo", "write report"}  # fmt: skip
    assert hits.keys() >= wanted | ({"unlink entry"} if scene.before else set())


def start(line: Sequence[str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "wangen.runtime", *line]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_processes_that_are_killed_from_outside(unbroken: Bundle, tmp_path: Path):
    bundle = uncached(unbroken, tmp_path / "bundle")
    cache = bundle.folder / "photos_cache"
    draw = random.Random(3)
    wanted, killed = unbroken.files(), 0
    for line in itertools.cycle((bundle.latents_line(), bundle.text_line())):
        with start(line) as process:
            while process.poll() is None and not list(cache.glob(".claim-*")):
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
        killed += process.returncode == KILLED
        assert not Folder(cache, deep=True).damaged
        found = bundle.files()
        assert all(found[name] == wanted[name] for name in found)
        if killed == 5:
            break
        if found.keys() == wanted.keys():
            shutil.rmtree(cache)
    bundle.latents()
    bundle.text()
    assert kept(bundle).keys() == kept(unbroken).keys()
    assert bundle.files() == wanted
    assert leftovers(bundle) == []
    assert bundle.check("--deep") == 0


def test_calls_of_several_threads_are_counted_one_after_the_other(monkeypatch):
    deaths = []
    monkeypatch.setattr(os, "kill", lambda *_: deaths.append(1))
    killer = Killer(2, lambda _line: time.sleep(0.05))  # long enough for the others to count meanwhile
    threads = [threading.Thread(target=killer.met, args=("open", "a")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (killer.count, len(deaths)) == (4, 1)
