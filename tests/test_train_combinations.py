"""Flags of all kinds together: a run that is killed and goes on ends with the bytes of one that is not."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import digest
from killing import KILLED, forked
from tiny import TinyRun

from wangen.generator.errors import UsageError
from wangen.generator.steps import Train
from wangen.runtime import train

NUM_RUNS = 24
FEWEST_KINDS = 60
"""Values of flags that the accepted runs must have had between them, so that not all but the defaults is refused."""

REFUSED = 2

VALUES: dict[str, tuple[Any, ...]] = {
    "network_module": ("lora", "lora", "lokr", "loha"),
    "dora": (False, False, True),
    "rslora": (False, True),
    "network_dropout": (0.0, 0.3),
    "caption_dropout": (0.0, 0.5),
    "noise_offset": (0.0, 0.1),
    "train_mode": ("lora", "lora", "lora", "full"),
    "lora_targets": ("all", "attention"),
    "scale_weight_norms": (None, 1.0),
    "loraplus_lr_ratio": (None, 4.0),
    "optimizer_type": ("AdamW", "adafactor", "torch.optim.SGD", "torch.optim.NAdam", "torch.optim.RMSprop"),
    "lr_scheduler": ("constant", "cosine", "linear", "cosine_with_restarts", "polynomial"),
    "lr_warmup_steps": ("0", "2", "20%"),
    "max_grad_norm": (0.0, 1.0),
    "ema_decay": (None, 0.9),
    "gradient_accumulation_steps": (1, 2, 3),
    "mixed_precision": ("no", "bf16"),
    "quantize": ("none", "none", "int8", "fp8", "nf4"),
    "checkpointing": ("none", "full", "selective"),
    "checkpointing_free_blocks": (None, 1),
    "gradient_checkpointing_cpu_offload": (False, True),
    "blocks_to_swap": (0, 1),
    "split_attn": (False, True),
    "pack": (False, True),
    "plain": (False, False, False, True),
    "timestep_sampling": ("uniform", "sigmoid", "shift", "logit_normal", "logsnr", "flux_shift", "qwen_shift"),
    "weighting_scheme": ("none", "sigma_sqrt", "logit_normal", "mode", "cosmap"),
    "num_timestep_buckets": (None, 3),
    "min_timestep": (0, 200),
    "max_timestep": (1000, 800),
    "preserve_distribution_shape": (False, True),
    "max_data_loader_n_workers": (0, 1, 4),
    "validation_items": (0, 1),
    "keep_best": (False, True),
    "save_every_n_steps": (None, 2),
    "save_last_n_steps": (None, 2),
    "keep_last": (None, 1),
    "save_state_every_n_steps": (1, 2, 3),
    "save_precision": ("float32", "bfloat16"),
    "lora_layout": (("comfyui",), ("comfyui", "diffusers")),
    "async_save": (False, True),
    "seed": (1, 42),
}
"""Several of one value make it come more often."""


def drawn(chance: random.Random) -> dict[str, Any]:
    """Some flags with some of their values, most of which go together."""
    names = chance.sample(sorted(VALUES), chance.choice([6, 12, 18]))
    flags = {name: chance.choice(VALUES[name]) for name in names}
    if flags.get("keep_best"):
        flags["validation_items"] = 1
    if flags.get("validation_items"):
        flags |= {"validation_timesteps": 2, "validate_every_n_steps": 2}
    return {"save_state_every_n_steps": 2, **flags}


def work(options: Train) -> Callable[[], int]:
    def run() -> int:
        torch.set_num_threads(1)
        try:
            train.run(options)
        except UsageError:
            return REFUSED
        return 0

    return run


def left(folder: Path) -> tuple[dict[str, str], dict[int, float]]:
    """The weights in a folder, and the loss of every step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    return {path.name: digest(path) for path in folder.glob("*.safetensors")}, losses


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="trials are forked")
def test_whatever_flags_are_given_a_killed_run_ends_with_the_same_bytes(tiny_run: TinyRun, room: Path):
    chance = random.Random(20)
    runs, seen = 0, set()
    while runs < NUM_RUNS:
        flags = drawn(chance)
        whole = tiny_run.options(room / f"whole-{runs}", **flags)
        code, calls = forked(work(whole), 0)
        if code == REFUSED:
            continue
        assert code == 0, flags
        killed = replace(whole, output_dir=room / f"killed-{runs}")
        at = chance.randrange(len(calls) // 4, len(calls)) + 1
        assert forked(work(killed), at)[0] == KILLED
        assert forked(work(killed), 0)[0] == 0, f"killed at call {at} of {len(calls)}, {calls[at - 1]}: {flags}"
        files, losses = left(whole.output_dir)
        assert files
        assert len(losses) == 6
        assert left(killed.output_dir) == (files, losses), f"killed at call {at}, {calls[at - 1]}: {flags}"
        runs += 1
        seen |= set(flags.items())
    assert len(seen) >= FEWEST_KINDS
