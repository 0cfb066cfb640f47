"""The caching steps killed at any moment: no torn entry, nothing lost, and run again the same bytes as unbroken."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cached_bundle import Bundle, entry_files
from helpers import make_clip, make_image, read_tree
from killing import KILLED, forked

from wangen.generator import lock
from wangen.generator.cli import main
from wangen.runtime import cache_text, encoding
from wangen.runtime.cache import Folder, writer
from wangen.runtime.tiny import TinySizes, write_tiny_wan

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="trials are forked"),
    pytest.mark.usefixtures("one_thread"),
]
pytest_plugins = ("bundle_fixtures",)

CACHES = ("photos_cache", "clips_cache")


@dataclass(frozen=True)
class Scene:
    """A dataset in which much is to be done, what is cached before, and what an unbroken run makes of it."""

    bundle: Bundle
    before: dict[str, bytes]
    after: dict[str, bytes]
    flags: Sequence[str]
    calls: Sequence[str]

    @property
    def lines(self) -> list[list[str]]:
        return lines_of(self.bundle, self.flags)


def lines_of(bundle: Bundle, flags: Sequence[str]) -> list[list[str]]:
    return [bundle.latents_line("--num_workers", "1", *flags), bundle.text_line()]


def run_all(lines: Sequence[list[str]]) -> Callable[[], int]:
    return lambda: max(main(line) for line in lines)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the trials; in memory, where there is such a place, because it is quicker."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path_factory.mktemp("kills")
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="wangen-test-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Small groups, so that a run has many; and nothing waits for a clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "START_S", 0.0)  # a claim that was being made counts as held for so long
        patch.setattr("wangen.runtime.sources.YOUNG_NS", 0)  # else neither memo nor index would be written
        patch.setattr(writer, "_GROUP_FILES", 2)
        patch.setattr(cache_text, "CPU_GROUP", 3)
        for module in (encoding, cache_text):
            patch.setattr(module, "POLL_S", 0.01)
        patch.setattr(os, "fsync", lambda _: None)  # a killed process loses nothing that it gave to the system
        yield


@pytest.fixture(scope="module")
def weights(room: Path) -> dict[str, Path]:
    return write_tiny_wan(room / "models", ["picture of many", "clip"], sizes=TinySizes(vae_dim=2))


def make_set(folder: Path, weights: dict[str, Path]) -> Bundle:
    """Four pictures and a clip; each has a control, one a mask, and batches are of three."""
    bundle = Bundle(folder, weights)
    for number in range(4):
        picture(bundle, number)
    make_clip(folder / "clips" / "walk.mp4", num_frames=5, fps=16, size=(32, 32), seed=9)
    make_clip(folder / "clip_controls" / "walk.mp4", num_frames=5, fps=16, size=(32, 32), seed=8)
    (folder / "clips" / "walk.txt").write_text("picture 1", encoding="utf-8")
    return write_toml(bundle)


def picture(bundle: Bundle, number: int, caption: str = "") -> None:
    make_image(bundle.photos / f"{number}.png", (32, 32), seed=number + 1)
    (bundle.photos / f"{number}.txt").write_text(caption or f"picture {number}", encoding="utf-8")


def write_toml(bundle: Bundle, *, controls: bool = False, batch_size: int = 3) -> Bundle:
    folder = bundle.folder.as_posix()
    text = f"[general]\nresolution = [32, 32]\nbatch_size = {batch_size}\n"
    text += f"[[datasets]]\nimage_directory = '{folder}/photos'\ncache_directory = '{folder}/photos_cache'\n"
    text += f"[[datasets]]\nvideo_directory = '{folder}/clips'\ncache_directory = '{folder}/clips_cache'\n"
    text += "target_frames = [1, 5]\n"
    text += f"control_directory = '{folder}/clip_controls'\n" if controls else ""
    bundle.toml.write_text(text, encoding="utf-8")
    return bundle


def changed(bundle: Bundle) -> None:
    """What a user does between two runs; some entries are stale then, some are not needed any more."""
    picture(bundle, 0, caption="picture of another kind")
    make_image(bundle.photos / "1.png", (32, 32), seed=50)
    for suffix in (".png", ".txt"):
        (bundle.photos / f"2{suffix}").unlink()
        (bundle.photos / f"3{suffix}").rename(bundle.photos / f"three{suffix}")
    for number in (5, 6):
        picture(bundle, number)


SCENES = {
    "nothing is cached": (False, (), lambda bundle: None),
    "the dataset changed": (True, (), changed),
    "it becomes image-to-video with controls": (
        True, ("--task", "i2v-A14B"), lambda bundle: [changed(bundle), write_toml(bundle, controls=True)],
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
    return Scene(bundle, before, kept(whole), flags, calls)


def copy(bundle: Bundle, to: Path) -> Bundle:
    shutil.copytree(bundle.folder, to)
    made = Bundle(to, bundle.models)
    text = bundle.toml.read_text(encoding="utf-8").replace(bundle.folder.as_posix(), to.as_posix())
    made.toml.write_text(text, encoding="utf-8")
    return made


def kept(bundle: Bundle) -> dict[str, bytes]:
    """All that is in the cache folders, but the index and the memo, which hold times."""
    found = {
        f"{cache}/{name}": data
        for cache in CACHES
        for name, data in (read_tree(bundle.folder / cache) if (bundle.folder / cache).is_dir() else {}).items()
    }
    return {name: data for name, data in found.items() if not name.endswith(("index.jsonl", "sources.jsonl"))}


def leftovers(bundle: Bundle) -> list[str]:
    names = [path.name for path in bundle.folder.rglob(".*")]
    return [name for name in names if name.endswith(".tmp") or name.startswith(".claim")]


def assert_whole(bundle: Bundle, scene: Scene) -> None:
    """Every entry is as it was or as it will be, and of those that stay none is missing."""
    for cache in CACHES:
        assert not Folder(bundle.folder / cache, deep=True).damaged
    found = bundle.files()
    for name, data in found.items():
        assert data in (scene.before.get(name), scene.after.get(name)), name
    assert scene.before.keys() & scene.after.keys() <= found.keys()


def assert_complete(bundle: Bundle, scene: Scene) -> None:
    assert kept(bundle) == scene.after
    assert leftovers(bundle) == []
    assert bundle.check("--deep", *scene.flags) == 0


def trial(scene: Scene, place: Path, at: int, draw: random.Random) -> str:
    """Kill a run at a call, sometimes the next one too, then let one end; returns what the first kill hit."""
    bundle = copy(scene.bundle, place)
    moved = Scene(bundle, scene.before, scene.after, scene.flags, ())
    lines = moved.lines if at <= len(scene.calls) else moved.lines[::-1]
    code, calls = forked(run_all(lines), (at - 1) % len(scene.calls) + 1)
    assert code in (KILLED, 0)  # in the other order there are a few calls less
    assert_whole(bundle, moved)
    hit = calls[-1] if code == KILLED else ""
    if draw.random() < 0.25:
        forked(run_all(moved.lines), draw.randint(1, len(scene.calls) // 2))
        assert_whole(bundle, moved)
    assert run_all(draw.sample(moved.lines, 2))() == 0
    assert_complete(bundle, moved)
    shutil.rmtree(place)
    return hit


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


def test_a_few_kills(scenes: Callable[[str], Scene], room: Path):
    scene = scenes("it becomes image-to-video with controls")
    hits = kill_often(scene, room / "few", 20, seed=1)
    assert hits.total() - hits[""] >= 15


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_many_kills(scenes: Callable[[str], Scene], room: Path, name: str):
    scene = scenes(name)
    hits = kill_often(scene, room / "many", 80, seed=2)
    print(len(scene.calls), hits)
    assert hits.total() - hits[""] >= 67
    wanted = {"write half entry", "replace half entry", "io.open claim", "write claim", "unlink claim", "write needs",
              "replace needs", "write index", "replace index", "write memo", "write report"}  # fmt: skip
    assert hits.keys() >= wanted | ({"unlink entry"} if scene.before else set())
