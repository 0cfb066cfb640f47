"""Several signals to a launcher: what is told to stop ends, and nothing of it stays behind."""

import os
import signal
import time
from collections.abc import Sequence

import psutil
import pytest
from test_together import alone, kill_rank, losses, started
from tiny import TinyRun

from wangen.generator.errors import WAS_STOPPED
from wangen.runtime.interrupt import ECHO_S
from wangen.runtime.training import checkpoint
from wangen.runtime.training.agent import END_S


def left(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; what stays is ended, so that one test is not another's trouble."""
    found = psutil.wait_procs(processes, timeout=10)[1]
    for process in found:
        process.kill()
    return found


@pytest.mark.slow
def test_ctrl_c_that_is_pressed_three_times_at_once_is_one(tiny_run: TinyRun, tmp_path):
    options = tiny_run.options(tmp_path, gpus="2", max_train_steps=5000)
    launcher = started(alone(options), tmp_path, 5)
    everyone = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    try:
        kill_rank(launcher, 1, signal.SIGSTOP)  # as one in a long step
        for _ in range(3):
            os.kill(launcher.pid, signal.SIGINT)
            time.sleep(0.15)
        kill_rank(launcher, 1, signal.SIGCONT)
        _, told = launcher.communicate(timeout=60)
        assert launcher.returncode == WAS_STOPPED
        assert told.splitlines()[-1] == "train: stopped. Nothing saved is lost: run the same line again to go on."
        assert "Traceback" not in told
        newest = checkpoint.newest(options.output_dir / "lora-state")
        assert newest
        assert newest.name == f"step-{len(losses(tmp_path)):08d}"
    finally:
        assert left(everyone) == []


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_a_process_that_hangs(tiny_run: TinyRun, tmp_path):
    options = tiny_run.options(tmp_path, gpus="2", max_train_steps=5000, save_state_every_n_steps=5)
    launcher = started(alone(options), tmp_path, 10)
    everyone = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    try:
        kill_rank(launcher, 1, signal.SIGSTOP)
        os.kill(launcher.pid, signal.SIGINT)
        time.sleep(ECHO_S + 0.5)
        assert launcher.poll() is None, "a first one leaves all the time to save"
        began = time.monotonic()
        os.kill(launcher.pid, signal.SIGINT)
        _, told = launcher.communicate(timeout=60)
        assert time.monotonic() - began < END_S + 10
        assert launcher.returncode == WAS_STOPPED
        assert "stopping at once" in told
        assert checkpoint.newest(options.output_dir / "lora-state")
    finally:
        assert left(everyone) == []
