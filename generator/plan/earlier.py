"""What an earlier run of the same script took: a try, or a run that was stopped, measures what a formula estimates."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wangen.generator.run_folder import TRAIN_REPORT
from wangen.generator.session import plain
from wangen.generator.steps import Train
from wangen.generator.table import SMOKE

_MATTERS = (
    "task", "resolution", "train_mode", "network_module", "network_dim", "network_dropout", "network_args", "dora",
    "lora_targets", "mixed_precision",
    "gradient_accumulation_steps", "quantize", "blocks_to_swap", "checkpointing", "checkpointing_free_blocks",
    "gradient_checkpointing_cpu_offload", "attention", "compile", "plain", "pack", "device", "gpus", "parallel",
)  # fmt: skip
"""Flags that decide speed and memory."""


@dataclass(frozen=True)
class Measured:
    """What a run measured.

    Attributes:
        folder: of the run.
        seconds_per_step: mean.
        tokens_per_s: mean.
        peak_memory: bytes that PyTorch held; on a CPU the process; None where it is not known.
        steps: that were measured.
    """

    folder: Path
    seconds_per_step: float
    tokens_per_s: float
    peak_memory: int | None
    steps: int


def measured(train: Train, tokens: tuple[int, int]) -> Measured | None:
    """What the last run into the output folder, or else the last try, measured with the flags that matter the same.

    Args:
        train: the flags.
        tokens: the fewest and the most of a step: a run whose mean lies outside had another dataset.
    """
    for folder in (train.output_dir, train.output_dir / SMOKE):
        found = _read(folder, train)
        if found and 0.99 * tokens[0] <= found.tokens_per_s * found.seconds_per_step <= 1.01 * tokens[1]:
            return found
    return None


def _read(folder: Path, train: Train) -> Measured | None:
    try:
        report: Any = json.loads((folder / TRAIN_REPORT).read_text(encoding="utf-8"))
        settings, result = report["settings"], report["result"]
        speed: Mapping[str, Any] = result["speed"]
        if any(plain(getattr(train, name)) != settings[name] for name in _MATTERS):
            return None
        peak = speed.get("peak_memory_bytes")
        return Measured(
            folder, float(speed["s_per_step"]), float(speed["tokens_per_s"]), int(peak) if peak else None,
            int(result["steps_this_run"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no run, an older one, or one that measured nothing
