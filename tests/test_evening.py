"""An evening on one workspace: publish, edit, cache, kill, train, kill, resume, move, check, in any order.

Hypothesis draws the operations; each runs in a forked process, and most may be killed at any call that changes the file
system. After each one nothing of the user's is lost and nobody saw a traceback. In the end the dataset is trained, and
the LoRA has the bytes that a new workspace, in which nothing ever went wrong, makes of the same dataset.
`WANGEN_EVENINGS=100 pytest -n 0 -m slow tests/test_evening.py` spends longer.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from helpers import image_bytes
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from killing import KILLED, Killer, end_of, fork

from wangen.generator import lock, scripts
from wangen.generator.cli import main
from wangen.runtime import cache_latents, cache_text, pack_tools, train  # forked processes have them  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="operations are forked")]

NUM_EVENINGS = int(os.environ.get("WANGEN_EVENINGS", "3"))
NUM_OPERATIONS = 25
MODELS = Path(str(files("wangen.examples"))) / "tiny-wan"
TOML = """\
model = "t2v-1.3B"
resolution = [64, 64]
platforms = ["linux"]
report = false
[platform.linux]
models = '{models}'
[steps.cache_latents]
vae_dtype = "float32"
[steps.cache_text]
t5_dtype = "float32"
[steps.train]
max_train_epochs = 2
mixed_precision = "no"
checkpointing = "none"
save_state_every_n_steps = 2
log_with = ["none"]
"""
CACHING = ("check", "cache_latents", "cache_text", "check_cache")
NEVER = 10**9
JUST_STARTING = "one that is just starting"
KILLS = st.one_of(st.integers(1, 20), st.integers(1, 80), st.just(NEVER))
KILLS_OF_TRAINING = st.one_of(st.integers(1, 300), st.integers(1, 2700), st.just(NEVER))


class Workspace:
    """A workspace with the operations of its user, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = folder.with_name(f"{folder.name}.said")
        self.dataset.mkdir(parents=True)
        (folder / "wangen.toml").write_text(TOML.format(models=MODELS.as_posix()), encoding="utf-8")

    @property
    def dataset(self) -> Path:
        return self.folder / "datasets" / "cats"

    @property
    def bundle(self) -> Path:
        return self.folder / "published" / "linux"

    @property
    def lora(self) -> Path:
        return self.bundle / "outputs" / "cats" / "cats.safetensors"

    def add(self, name: str, seed: int) -> None:
        (self.dataset / f"{name}.png").write_bytes(image_bytes((80, 64), format="PNG", seed=seed))
        (self.dataset / f"{name}.txt").write_text(f"cat number {seed}", encoding="utf-8")

    def run(self, *words: str, kill_at: int = NEVER) -> int:
        """A command of wangen's in the workspace."""
        return self.in_fork(lambda: main([*words, "--workspace", str(self.folder)]), kill_at)

    def step(self, name: str, *more: str, kill_at: int = NEVER) -> int:
        """A step as the published script has it."""
        lines = scripts.read_steps((self.bundle / "train_cats.sh").read_bytes(), "sh")
        words = next(words for words in lines if words[0] == name)

        def work() -> int:
            torch.set_num_threads(1)
            with chdir(self.bundle):
                return main([*words, *more])

        return self.in_fork(work, kill_at)

    def in_fork(self, work: Callable[[], int], kill_at: int) -> int:
        """Its exit code; nothing that it says may be a traceback.

        A process that was killed while it wrote its lock is taken for one that is just starting, for two seconds.
        """
        code, text = self.once(work, kill_at)
        if code == 1 and JUST_STARTING in text:
            time.sleep(lock.START_S)
            code, text = self.once(work, kill_at)
            assert JUST_STARTING not in text
        assert "Traceback" not in text, text
        return code

    def once(self, work: Callable[[], int], kill_at: int) -> tuple[int, str]:
        """Its exit code, and what it said."""

        def watched() -> int:
            with self.said.open("w", encoding="utf-8") as out:
                sys.stdout = sys.stderr = out
                Killer(kill_at, lambda _: None).install()
                try:
                    return work()
                except BaseException:
                    import traceback

                    traceback.print_exc()
                    raise
                finally:
                    out.flush()

        return end_of(fork(watched)), self.said.read_text(encoding="utf-8", errors="replace")

    def finish(self) -> bytes:
        """Publish, cache and train to the end; the bytes of the LoRA."""
        assert self.run("publish", "cats") == 0, self.said.read_text(encoding="utf-8")
        for name in CACHING:
            assert self.step(name) == 0, self.said.read_text(encoding="utf-8")
        if self.step("train") != 0:
            assert "--fresh" in self.said.read_text(encoding="utf-8"), "only another dataset stops it"
            assert self.step("train", "--fresh") == 0, self.said.read_text(encoding="utf-8")
        return self.lora.read_bytes()


class Evening(RuleBasedStateMachine):
    """What a user may do, and what must hold after each of it."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="evening"))
        self.place = Workspace(self.home / "work 0")
        self.user: dict[str, bytes] = {}
        self.count = 0

    @initialize(number=st.integers(1, 3))
    def begin(self, number: int) -> None:
        for seed in range(number):
            self.add(seed)
        self.published = False

    # ---- the user's own hands ----------------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 9))
    def add(self, seed: int) -> None:
        self.place.add(f"picture {seed}", seed)
        self.remember()

    @rule(number=st.integers(0, 9), text=st.sampled_from(["a dog", "two cats, ünïcode", "cat number 1"]))
    def edit_a_caption(self, number: int, text: str) -> None:
        captions = sorted(self.place.dataset.glob("*.txt"))
        captions[number % len(captions)].write_text(text, encoding="utf-8")
        self.remember()

    @precondition(lambda self: len(self.user) > 2)
    @rule(number=st.integers(0, 9))
    def remove(self, number: int) -> None:
        pictures = sorted(self.place.dataset.glob("*.png"))
        gone = pictures[number % len(pictures)]
        gone.unlink()
        gone.with_suffix(".txt").unlink()
        self.remember()

    @rule(number=st.integers(0, 9))
    def rename(self, number: int) -> None:
        pictures = sorted(self.place.dataset.glob("*.png"))
        old = pictures[number % len(pictures)]
        self.count += 1
        for path in (old, old.with_suffix(".txt")):
            path.rename(path.with_name(f"new {self.count}{path.suffix}"))
        self.remember()

    @rule()
    def move_everything(self) -> None:
        self.count += 1
        new = self.home / f"moved {self.count}"
        self.place.folder.rename(new)
        self.place.folder = new

    @precondition(lambda self: self.place.bundle.is_dir())
    @rule(number=st.integers(0, 99))
    def lose_a_cache_file(self, number: int) -> None:
        found = [path for path in self.place.bundle.rglob("*_cache/*") if path.is_file()]
        if found:
            path = sorted(found)[number % len(found)]
            data = path.read_bytes()
            if number % 2:
                path.unlink()
            else:
                path.write_bytes(data[: len(data) // 2])

    def remember(self) -> None:
        self.user = {path.name: path.read_bytes() for path in self.place.dataset.iterdir()}

    # ---- the program -------------------------------------------------------------------------------------------------

    @rule(kill_at=KILLS)
    def publish(self, kill_at: int) -> None:
        code = self.place.run("publish", "cats", kill_at=kill_at)
        assert code in (0, KILLED)
        self.published |= code == 0

    @precondition(lambda self: self.published)
    @rule(kill_at=KILLS)
    def fit(self, kill_at: int) -> None:
        code = self.place.run("publish", "cats", "--fit", "--gpu", "24GB", kill_at=kill_at)
        assert code in (0, KILLED)

    @precondition(lambda self: self.published)
    @rule(name=st.sampled_from(CACHING), kill_at=KILLS)
    def cache(self, name: str, kill_at: int) -> None:
        assert self.place.step(name, kill_at=kill_at) in (0, 1, KILLED)

    @precondition(lambda self: self.published)
    @rule(more=st.sampled_from([(), ("--fresh",), ("--smoke",)]), kill_at=KILLS_OF_TRAINING)
    def train(self, more: tuple[str, ...], kill_at: int) -> None:
        assert self.place.step("train", *more, kill_at=kill_at) in (0, 1, KILLED)

    @precondition(lambda self: self.published)
    @rule(name=st.sampled_from(["pack", "unpack", "verify"]), kill_at=KILLS)
    def tidy(self, name: str, kill_at: int) -> None:
        toml = self.place.bundle / "files" / "tomls" / "cats_linux.toml"

        def work() -> int:
            with chdir(self.place.bundle):
                return main(["cache", name, str(toml)])

        assert self.place.in_fork(work, kill_at) in (0, 1, KILLED)

    @rule(words=st.sampled_from([("check", "cats"), ("plan", "cats", "--gpu", "24GB")]))
    def look(self, words: tuple[str, ...]) -> None:
        before = self.everything()
        assert self.place.run(*words) in (0, 1)
        assert self.everything() == before, "looking changes nothing"

    def everything(self) -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in self.place.folder.rglob("*") if path.is_file()}

    # ---- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_of_the_users_is_lost(self) -> None:
        if self.user:
            assert {path.name: path.read_bytes() for path in self.place.dataset.iterdir()} == self.user

    @invariant()
    def every_file_is_whole(self) -> None:
        for path in self.place.bundle.glob("*.sh") if self.place.bundle.is_dir() else ():
            assert scripts.untouched(path.read_bytes()), path

    def teardown(self) -> None:
        try:
            if self.user and sys.exc_info()[0] is None:
                found = self.place.finish()
                clean = Workspace(self.home / "clean")
                shutil.rmtree(clean.dataset)
                shutil.copytree(self.place.dataset, clean.dataset)
                shutil.copy(self.place.folder / "wangen.toml", clean.folder)
                assert found == clean.finish(), "as if nothing had ever gone wrong"
        finally:
            shutil.rmtree(self.home, ignore_errors=True)


def test_an_evening_ends_as_if_nothing_had_gone_wrong():
    run_state_machine_as_test(
        Evening,
        settings=settings(
            max_examples=NUM_EVENINGS,
            stateful_step_count=NUM_OPERATIONS,
            derandomize=NUM_EVENINGS <= 3,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
