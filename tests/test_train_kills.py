"""A run that is killed at a random call of the file system goes on to the same bytes."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killing import KILLED, forked
from safetensors.torch import load_file, save_file
from tiny import TinyRun

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
