"""What an earlier run of the same script took: a try, or a run that was stopped, measures what a formula estimates."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wangen.generator.run_folder import TRAIN_REPORT
from wangen.generator.session import plain
from wangen.generator.steps import Train
from wangen.generator.table import SMOKE, options

_ANYTHING = (
    "dataset_config", "manifest", "smoke", "dit", "dit_high_noise", "vae", "clip", "t5", "tokenizer", "output_dir",
    "output_name", "network_weights", "network_weights_high_noise", "base_weights", "base_weights_multiplier",
    "network_alpha", "learning_rate", "max_train_epochs", "max_train_steps", "prior_loss_weight", "noise_offset",
    "seed", "vram", "show_timesteps", "timestep_boundary", "timestep_sampling", "discrete_flow_shift",
    "sigmoid_scale", "logit_mean", "logit_std", "mode_scale", "min_timestep", "max_timestep",
    "preserve_distribution_shape", "num_timestep_buckets", "weighting_scheme", "peak_tflops", "max_restarts",
    "keep_best", "keep_last", "fresh", "report_dir", "lock", "logging_dir", "lora_layout", "no_metadata",
    "training_comment", "config_file",
)  # fmt: skip
_ANYTHING_FROM = ("lr_", "validat", "sample_", "continuation_", "save_", "metadata_", "wandb_", "log_", "resume")
"""Flags that decide neither speed nor memory, and how more of them begin; weights are the script's own files."""

_MATTERS = tuple(
    option.name
    for option in options(Train)
    if option.name not in _ANYTHING and not option.name.startswith(_ANYTHING_FROM)
)


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
