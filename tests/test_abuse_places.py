"""Every step that works, where the machine does not: full disks, clocks that jump, folders that vanish, signals."""

import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from abuse import Outcome, run, sources
from abuse_cases import Words, line, valid
from report_runs import step_line
from tiny import TinyRun

from wangen.generator.cli import main
from wangen.generator.steps import STEPS
from wangen.generator.stopping import stop
from wangen.generator.table import Step

pytest_plugins = ["abuse_fixtures"]

BY_COMMAND = {step.command: step for step in STEPS}
HEAVY = ("generate", "evaluate", "preprocess", "watch")
"""The steps that take a second or two."""
COMMANDS = [pytest.param(name, marks=pytest.mark.slow if name in HEAVY else ()) for name in BY_COMMAND]
QUICK = [param for param in COMMANDS if param.values[0] != "evaluate"]
"""Without the one that takes longest, and does what training and generating do."""
FAILS = {"preprocess": 1, "world_model": 1}
"""What the tiny dataset is no input for: its clip is too short to be cut, and it is no raw data of a world model."""


class Place:
    """A folder of its own for each line, and copies of what it reads that may come to harm."""

    def __init__(self, known: Words, source: Path, folder: Path) -> None:
        self.known, self.source, self.folder = known, source, folder
        self.work, self.here = folder / "work", folder / "here"

    def __call__(self, step: type[Step], before: Callable[[], object] = lambda: None, **changes: object) -> Outcome:
        """Run a step in a new folder, with absolute paths: the working folder may be gone."""
        shutil.rmtree(self.work, ignore_errors=True)
        (self.work / "run").mkdir(parents=True)
        self.here.mkdir(exist_ok=True)
        (self.work / "run" / "metrics.jsonl").write_text(json.dumps(step_line(1, output_name="lora")) + "\n")
        return self.again(step, before, **changes)

    def again(self, step: type[Step], before: Callable[[], object] = lambda: None, **changes: object) -> Outcome:
        """Run it once more in the same folder."""
        words = {**valid(step, self.known), **changes}
        for name in ("output", "output_dir", "save_path"):
            if name in words and not Path(words[name]).is_absolute():
                words[name] = self.work / words[name]
        return run(line(step, words), self.here, before)


@pytest.fixture
def place(known: Words, tiny_run: TinyRun, tmp_path: Path) -> Iterator[Place]:
    before = sources(tiny_run.folder)
    yield Place(known, tiny_run.folder, tmp_path)
    assert sources(tiny_run.folder) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_without_anything_hostile_the_lines_work(place, command):
    """Else what is tested here and in `test_abuse` would be refused for other reasons."""
    found = place(BY_COMMAND[command])
    assert (found.code != 0, found.fault) == (command in FAILS, ""), found.said


def limit(kind: int, number: int) -> Callable[[], object]:
    return lambda: resource.setrlimit(kind, (number, number))


@pytest.mark.parametrize(
    ("command", "num_bytes"),
    [
        pytest.param(param.values[0], num_bytes, marks=pytest.mark.slow if param.marks or num_bytes else ())
        for param in COMMANDS
        for num_bytes in (3000, 0)
    ],
)
def test_a_disk_that_is_full(place, command, num_bytes):
    """As far as a limit on the length of files is one; `test_train_full_disk` has real ones."""
    before, folder = limit(resource.RLIMIT_FSIZE, num_bytes), place.work
    found = place(BY_COMMAND[command], before)
    assert found.fault == ""
    assert not [path for path in folder.rglob("*.tmp") if path.is_file()]
    found = place.again(BY_COMMAND[command])
    assert (found.code != 0, found.fault) == (command in FAILS, ""), found.said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_working_folder_that_is_gone(place, command):
    found = place(BY_COMMAND[command], lambda: place.here.rmdir())
    assert (found.code, found.fault) == (1, "")
    assert "the working folder is gone" in found.said


def bare() -> None:
    for name in ("HOME", "TMPDIR", "USER", "LANG", "PATH", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    os.environ["TMPDIR"] = "/nowhere"


def no_files_left() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))


def no_input() -> None:
    os.close(0)


def nobody_listens() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def in_1970() -> None:
    time.time = lambda: 5.0


def in_2100() -> None:
    real, then = time.time, time.time()
    time.time = lambda: real() - then + 4_102_444_800


def backwards() -> None:
    real, then = time.time, time.time()
    time.time = lambda: 2 * then - 100 * (real() - then) - then


def shared_out(*befores: Callable[[], None]) -> list[Any]:
    """Every command with each of these; in the fast tests each with one of them."""
    names = [param.values[0] for param in QUICK]
    return [pytest.param(name, before, marks=() if number % len(befores) == place and name not in HEAVY
                         else pytest.mark.slow) for number, name in enumerate(names)
            for place, before in enumerate(befores)]  # fmt: skip


@pytest.mark.parametrize(("command", "before"), shared_out(bare, no_input, in_1970, in_2100, backwards))
def test_what_does_not_matter(place, command, before):
    found = place(BY_COMMAND[command], before)
    assert (found.code != 0, found.fault) == (command in FAILS, ""), found.said


@pytest.mark.parametrize(("command", "before"), shared_out(no_files_left, nobody_listens))
def test_what_may_end_it(place, command, before):
    assert place(BY_COMMAND[command], before).fault == ""


@pytest.mark.parametrize("year_s", [pytest.param(0, marks=pytest.mark.slow), -(10**9), 4_102_444_800])
def test_times_of_files_that_cannot_be(place, tmp_path, year_s):
    media = tmp_path / "media"
    shutil.copytree(place.source / "media", media)
    for path in media.iterdir():
        os.utime(path, (year_s, year_s))
    toml = tmp_path / "tiny.toml"
    text = (place.source / "tiny.toml").read_text().replace(str(place.source), str(tmp_path))
    toml.write_text(text)
    for command in ("check", "cache_latents", "cache_text", "check_cache"):
        found = place(BY_COMMAND[command], dataset_config=toml)
        assert (found.code, found.fault) == (0, ""), found.said


def vanishing(folder: Path, after_s: float) -> Callable[[], object]:
    def begin() -> None:
        threading.Timer(after_s, lambda: shutil.rmtree(folder, ignore_errors=True)).start()

    return begin


@pytest.mark.slow
@pytest.mark.parametrize("command", QUICK)
def test_a_folder_that_vanishes_while_it_runs(place, command):
    for after_s in (0.05, 0.4) if command in HEAVY else (0.01, 0.05, 0.1, 0.2, 0.4):
        assert place(BY_COMMAND[command], vanishing(place.work, after_s)).fault == ""


def stop_in_main(number: int, frame: FrameType | None) -> None:
    """What the console script does; but when `main` is done, only this test's own process could be interrupted."""
    place = frame
    while place and place.f_code is not main.__code__:
        place = place.f_back
    if place:
        stop(number, frame)


def signalled(number: int, after_s: float) -> Callable[[], object]:
    def begin() -> None:
        signal.signal(signal.SIGINT, stop_in_main)
        threading.Timer(after_s, lambda: os.kill(os.getpid(), number)).start()

    return begin


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", QUICK)
def test_a_signal_at_any_moment_and_the_same_line_again(place, command, number):
    choice = random.Random(f"{command} {number}")
    for _ in range(2 if command in HEAVY else 4):
        found = place(BY_COMMAND[command], signalled(number, choice.uniform(0.0, 0.4)))
        killed = found.code == -number and number != signal.SIGINT
        assert killed or found.fault == "", found.said
        found = place.again(BY_COMMAND[command])
        assert (found.code != 0, found.fault) == (command in FAILS, ""), found.said
