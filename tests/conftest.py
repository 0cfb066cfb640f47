"""Fixtures that several test files share."""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from wangen.generator.lint import fix
from wangen.generator.publish import plan
from wangen.generator.setup import wheel

# What loads torch is imported where it is used: the process that hands out the tests to others starts sooner without.
if TYPE_CHECKING:
    from tiny import TinyRun
    from tiny_qwen import TinyQwen

collect_ignore = ["fuzz.py", "stand_in_gpu.py"]  # one needs atheris, the other has to be loaded before torch

# The models are tiny: a second thread only waits for the first, here and in processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis lets an example take 200 ms, which on a busy machine says nothing.
settings.register_profile("wangen", deadline=None)
settings.load_profile("wangen")

# A shell's job in the background ignores Ctrl-C, and so would every script that tests start and stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays to the end: the garbage collector need not walk through it each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # a test makes many objects and few circles
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a mark that is borrowed from another file: `.ci/run` reads only the files in which it stands."""
    read = cache(partial(Path.read_text, encoding="utf-8"))
    for item in items:
        for mark in ("slow", "browser", "slurm"):
            if item.get_closest_marker(mark) and f"mark.{mark}" not in read(item.path):
                raise pytest.UsageError(f"{item.nodeid}: write pytest.mark.{mark} in this file, where CI looks for it")


@pytest.fixture(scope="session", autouse=True)
def _quick() -> Iterator[None]:
    """The disk is not waited for, since a killed process loses nothing that it gave to the system; the wheel that each
    bundle carries is made once, since no test that publishes or lints changes what it is made of."""
    import torch

    torch.set_num_threads(1)
    made = cache(wheel.wheel_bytes)

    def write_wheel(folder: Path) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wheel, "wheel_bytes", made)
            return wheel.write_wheel(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(plan, "wheel_bytes", made)
        patch.setattr(fix, "write_wheel", write_wheel)
        yield


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> "TinyRun":
    """A cached tiny dataset; tests must not change it."""
    from tiny import make_tiny_run

    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> "TinyQwen":
    """Tiny models of Qwen-Image; tests must not change them."""
    from tiny_qwen import write_tiny_qwen  # the libraries' pipelines, which most tests do not need

    return write_tiny_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the trials; in memory, where there is such a place, because it is quicker."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path_factory.mktemp("kills")
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="wangen-test-") as folder:
        yield Path(folder)
