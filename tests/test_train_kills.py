"""A run that is killed, at a random call of the file system or from outside, goes on to the same bytes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import digest
from killing import KILLED, forked
from safetensors.torch import load_file, save_file
from tiny import TinyRun, state_folder

from wangen.generator.errors import WAS_STOPPED
from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.training import checkpoint

NUM_KILLS = 20
FILES = ("lora_high_noise", "lora_high_noise-ema", "lora_high_noise-best", "lora_low_noise", "lora_low_noise-ema",
         "lora_low_noise-best")  # fmt: skip


def options_of(tiny_run: TinyRun, models: Path, folder: Path) -> Train:
    """Two experts, two datasets, accumulation, dropouts, validation with the best kept, and averages."""
    high = models / "high.safetensors"
    if not high.exists():
        weights = load_file(tiny_run.weights["dit"])
        save_file({name: (0.9 * value.float()).to(value.dtype) for name, value in weights.items()}, high)
    return tiny_run.options(
        folder, task="t2v-A14B", dit_high_noise=high, high_noise_share=0.4, expert_turn_steps=2, max_train_steps=10,
        gradient_accumulation_steps=2, network_dropout=0.1, caption_dropout=0.3, noise_offset=0.05, ema_decay=0.9,
        validation_items=1, validation_timesteps=2, validate_every_n_steps=3, keep_best=True,
        save_state_every_n_steps=2, save_every_n_steps=4, num_timestep_buckets=4, lr_scheduler="cosine",
        loraplus_lr_ratio=4.0, scale_weight_norms=1.0,
    )  # fmt: skip


def work(options: Train) -> Callable[[], int]:
    def run() -> int:
        torch.set_num_threads(1)
        train.run(options)
        return 0

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.safetensors").read_bytes() for name in FILES}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="trials are forked")
def test_killed_at_any_call_and_started_again_it_ends_with_the_same_bytes(tiny_run, room):
    whole = options_of(tiny_run, room, room / "whole")
    code, calls = forked(work(whole), 0)
    assert code == 0
    expected = contents(room / "whole")
    chosen = sorted(random.Random(6).sample(range(1, len(calls) + 1), NUM_KILLS))
    resumed = 0
    for at in chosen:
        folder = room / f"killed-{at}"
        options = replace(whole, output_dir=folder)
        assert forked(work(options), at)[0] == KILLED, f"call {at} of {len(calls)}"
        resumed += checkpoint.newest(folder / "lora-state") is not None
        assert forked(work(options), 0)[0] == 0
        assert contents(folder) == expected, f"killed at call {at}: {calls[at - 1]}"
    assert resumed >= NUM_KILLS // 2, "most of the runs began from a saved state"


def spawn(options: Train, log: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "wangen.runtime", *options.argv()], stderr=log, text=True)


def wait_for_state(options: Train, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if (state_folder(options) / f"step-{step:08d}" / "state.json").is_file():
            return
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX's")
def test_a_run_killed_at_several_moments_ends_with_the_same_bytes(tiny_run, tmp_path):
    common = {"max_train_steps": 40, "save_state_every_n_steps": 1, "gradient_accumulation_steps": 2}
    whole = tiny_run.options(tmp_path / "whole", **common)
    assert spawn(whole).wait() == 0
    killed = tiny_run.options(tmp_path / "killed", **common)
    moments = random.Random(7)
    kills = 0
    for step in (1, 9, 17, 30):
        process = spawn(killed)
        wait_for_state(killed, step, process)
        time.sleep(moments.uniform(0, 0.15))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills == 4
    assert not (tmp_path / "killed/lora.safetensors").exists()
    assert spawn(killed).wait() == 0
    assert digest(tmp_path / "killed/lora.safetensors") == digest(tmp_path / "whole/lora.safetensors")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_the_state_and_exits_with_its_own_code_and_one_message(tiny_run, tmp_path, number):
    options = tiny_run.options(tmp_path, max_train_steps=4000, save_state_every_n_steps=3)
    process = spawn(options, subprocess.PIPE)
    wait_for_state(options, 3, process)
    process.send_signal(number)
    _, log = process.communicate(timeout=60)
    assert process.returncode == WAS_STOPPED
    assert "Traceback" not in log
    assert "run the same line again" in log
    states = sorted(state_folder(options).glob("step-*"))
    assert len(states) == 1
    step = int(states[0].name.removeprefix("step-"))
    assert train.run(replace(options, max_train_steps=step + 1)).result["steps_this_run"] == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals are POSIX's")
@pytest.mark.parametrize("way", ["stops", "ignores it", "nohup"])
def test_a_run_whose_terminal_is_closed(tiny_run, tmp_path, way):
    """It saves and stops, though nobody hears what it says; with `nohup` or `trap '' HUP` it goes on."""
    import fcntl  # here, as these are not on Windows
    import termios

    goes_on = way != "stops"
    options = tiny_run.options(
        tmp_path, max_train_steps=25 if goes_on else 4000, save_state_every_n_steps=10,
        save_state_every_n_minutes=99.0, max_train_epochs=None, gradient_accumulation_steps=1,
    )  # fmt: skip
    leader, follower = os.openpty()
    words = [*(["nohup"] if way == "nohup" else []), sys.executable, "-m", "wangen.runtime", *options.argv()]

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(follower, termios.TIOCSCTTY, 0)
        if way == "ignores it":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = subprocess.Popen(
        words, stdin=follower, stdout=follower, stderr=follower, preexec_fn=take_terminal, cwd=tmp_path
    )
    os.close(follower)
    wait_for_state(options, 10, process)
    os.close(leader)
    code = process.wait(timeout=60)
    done = checkpoint.read(checkpoint.newest(tmp_path / "lora-state")).step
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert done == steps[-1], "every step that was trained is saved"
    assert (code, done) == (0, 25) if goes_on else (code == WAS_STOPPED and 10 <= done < 4000)
    assert (tmp_path / "lora.safetensors").is_file() == goes_on
