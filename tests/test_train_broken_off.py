"""An interrupt while a run validates or samples: it ends soon, and the next start makes the rest, to the same bytes."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import together as forked
from safetensors.torch import load_file, save_file
from tiny import TinyRun
from together import together, trained
from train_cases import note_saves

from wangen.generator.errors import WAS_STOPPED
from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.training import checkpoint, loop
from wangen.runtime.training.facts import LOOKED
from wangen.runtime.training.watching import Watching

PROMPTS = "a red square --w 64 --h 64 --f 1 --s 3 --l 2\na blue wall --w 64 --h 64 --f 5 --s 2 --l 1\n"
TOLD = ("step", "epoch", "expert", "loss", "grad_norm", "validation", "loss_by_timestep")
"""What of a line in `metrics.jsonl` the clock has no part in."""


@pytest.fixture(scope="module")
def watched(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Two experts that are judged and sampled before the first step, in the middle and at the end."""
    folder = tmp_path_factory.mktemp("watched")
    high, prompts = folder / "high.safetensors", folder / "prompts.txt"
    save_file({name: 0.9 * value.float() for name, value in load_file(tiny_run.weights["dit"]).items()}, high)
    prompts.write_text(PROMPTS)
    return tiny_run.options(
        folder / "whole", task="t2v-A14B", dit_high_noise=high, high_noise_share=0.5, expert_turn_steps=1,
        max_train_steps=4, validation_items=1, validation_timesteps=1, validate_every_n_steps=2, keep_best=True,
        ema_decay=0.9, sample_prompts=prompts, sample_every_n_steps=2, sample_at_first=True, save_every_n_steps=2,
        save_state=True, vae=tiny_run.weights["vae"], t5=tiny_run.weights["t5"], t5_dtype="float32",
    )  # fmt: skip


def left_by(options: Train) -> dict[str, Any]:
    """What a run left: bytes of files, and what its lines tell."""
    folder = options.output_dir
    files = [*folder.glob("*.safetensors"), *(folder / "samples").iterdir()]
    found: dict[str, Any] = {path.name: path.read_bytes() for path in files if path.suffix != ".jsonl"}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found["metrics"] = [{key: line[key] for key in TOLD if key in line} for line in lines]
    found["states"] = sorted(path.name for path in (folder / "lora-state").glob("step-*"))
    found["samples"] = sorted((folder / "samples" / "samples.jsonl").read_text().splitlines())
    return found


def checks(patch: pytest.MonkeyPatch, at: Callable[[int], None]) -> None:
    """Call something with the number of each check for an interrupt, counted from 1, before it is made."""
    count, real = 0, Watching._check

    def check(watching: Watching) -> None:
        nonlocal count
        count += 1
        at(count)
        real(watching)

    patch.setattr(Watching, "_check", check)


@pytest.fixture(scope="module")
def whole(watched: Train) -> tuple[dict[str, Any], int]:
    """What a run leaves that nobody interrupts, and how often it could have been."""
    counted: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        checks(patch, counted.append)
        train.run(watched)
    return left_by(watched), len(counted)


def interrupted(options: Train, number: int) -> None:
    """Start it, and interrupt it at that check."""
    with pytest.MonkeyPatch.context() as patch:
        checks(patch, lambda count: os.kill(os.getpid(), signal.SIGTERM) if count == number else None)
        with pytest.raises(KeyboardInterrupt):
            train.run(options)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.4, 0.75, 1.0])
def test_what_was_broken_off_is_made_by_the_next_start_to_the_same_bytes(
    watched: Train, whole: tuple[dict[str, Any], int], tmp_path: Path, share: float
):
    expected, number = whole
    options = replace(watched, output_dir=tmp_path)
    interrupted(options, 1 + round(share * (number - 1)))
    train.run(options)
    assert left_by(options) == expected


@pytest.mark.slow
def test_every_moment_and_twice(watched: Train, whole: tuple[dict[str, Any], int], tmp_path: Path):
    expected, last = whole
    for number in range(1, last + 1, 3):
        options = replace(watched, output_dir=tmp_path / str(number))
        interrupted(options, number)
        newest = checkpoint.newest(options.output_dir / "lora-state")
        if newest and LOOKED in checkpoint.read(newest).facts:
            interrupted(options, 1)  # amid what is made again
        train.run(options)
        assert left_by(options) == expected, number


@pytest.mark.slow
def test_the_end_of_a_run_is_only_its_end_when_it_was_looked_at(watched: Train, whole: Any, tmp_path: Path):
    expected, last = whole
    options = replace(watched, output_dir=tmp_path)
    interrupted(options, last)
    made = {path.name for path in (tmp_path / "samples").glob("lora-step00000004-*")}
    assert made == {"lora-step00000004-1.png"}, "the last check is amid the decoding of the second"
    assert not (tmp_path / "lora_low_noise.safetensors").exists()
    assert checkpoint.read(checkpoint.newest(tmp_path / "lora-state")).facts[LOOKED] == [
        "bins", "validation high_noise", "validation low_noise",
    ]  # fmt: skip
    assert not train.run(options).result["done_before"]
    assert left_by(options) == expected
    assert train.run(options).result["done_before"]


@pytest.mark.slow
@pytest.mark.parametrize("amid", ["validation", "samples"])
@pytest.mark.parametrize(("way", "train_mode"), [("ddp", "lora"), ("fsdp", "lora"), ("fsdp", "full")])
def test_processes_that_train_together_break_off_together(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, train_mode: str, amid: str
):
    """The first alone is told to stop; it alone samples, or all go along, since each has a part of the weights."""
    monkeypatch.setattr(forked, "TIMEOUT_S", 60.0)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square --w 32 --h 32 --f 1 --s 4\n")
    options = tiny_run.options(
        tmp_path / "whole", parallel=way, train_mode=train_mode, learning_rate=1e-4, max_train_steps=3,
        validation_items=1, validation_timesteps=2, validate_every_n_steps=2, sample_prompts=prompts,
        sample_every_n_steps=2, vae=tiny_run.weights["vae"], t5=tiny_run.weights["t5"], t5_dtype="float32",
    )  # fmt: skip
    trained(options, 2)
    cut = replace(options, output_dir=tmp_path / "cut")
    with pytest.MonkeyPatch.context() as patch:
        at = 3 if amid == "validation" else 7  # of step 2: two timesteps by the adapter, two by the base, then samples
        checks(patch, lambda n: os.kill(os.getpid(), signal.SIGTERM) if (n, os.environ["RANK"]) == (at, "0") else None)
        done = together(cut, 2)
    assert done.codes == [WAS_STOPPED] * 2, done.told
    assert checkpoint.read(checkpoint.newest(cut.output_dir / "lora-state")).facts[LOOKED] == [
        "bins", *(["validation "] if amid == "samples" else [])
    ]  # fmt: skip
    trained(cut, 2)
    assert left_by(cut) == left_by(options)


def test_saving_what_an_interrupt_left_is_no_time_of_a_step(tiny_run: TinyRun, tmp_path, monkeypatch):
    options = tiny_run.options(tmp_path, max_train_steps=2, validation_items=1, validation_timesteps=2,
                               validate_every_n_steps=1)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        checks(patch, lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 3 else None)
        with pytest.raises(KeyboardInterrupt):
            train.run(options)
    saved_in = note_saves(monkeypatch, loop)
    assert train.run(options).counts["steps"] == 2
    assert saved_in[0], "the first is before the first step of this start"
