"""Flags that are given and that nothing reads beside the others of the same run."""

import os
from collections.abc import Callable, Collection
from typing import Any

from wangen import profiles
from wangen.generator.adapter_settings import CONVOLUTIONS, network_arguments
from wangen.generator.session import SUBMITTED_BY
from wangen.generator.steps import Train
from wangen.generator.table import options as flags_of
from wangen.generator.train_refusals import is_narrowed, sets_its_rate

_Reads = Callable[[Train], object]


def unread(options: Train) -> list[str]:
    """A sentence for each flag that decides nothing in this run, and is not at its default.

    >>> from pathlib import Path
    >>> unread(Train(output_dir=Path("out"), output_name="cats", save_last_n_steps=500))
    ['--save_last_n_steps is not used: it is read with --save_every_n_steps']
    """
    usual: dict[str, Any] = {option.name: option.default for option in flags_of(Train)}
    usual |= profiles.model(options.task).defaults.get(Train.command, {})
    return [
        f"--{name} is not used: it is read with {by}"
        for name, (reads, by) in READERS.items()
        if getattr(options, name) != usual[name] and not reads(options)
    ] + [
        f"--network_args {name}= is not used: no layer that gets an adapter is a convolution"
        for name in network_arguments(options.network_args)
        if name in CONVOLUTIONS
    ]


def _chosen(flag: str, values: Collection[str]) -> tuple[_Reads, str]:
    """It is read where a flag has one of these values."""
    *others, last = values
    words = f"{', '.join(others)} or {last}" if others else last
    return lambda options: getattr(options, flag) in values, f"--{flag} {words}"


def _beside(*flags: str) -> tuple[_Reads, str]:
    """It is read where one of these flags is given."""
    words = " or ".join(f"--{flag}" for flag in flags)
    return lambda options: any(getattr(options, flag) for flag in flags), words


def _logged_to(*names: str) -> tuple[_Reads, str]:
    """It is read where one of these experiment logs is kept."""
    return lambda options: any(name in options.log_with for name in names), f"--log_with {' or '.join(names)}"


def _draws_logits(options: Train) -> bool:
    sampling = options.timestep_sampling
    return sampling in ("logit_normal", "logsnr", "qinglong_flux") or options.weighting_scheme == "logit_normal"


_LOGITS = (
    _draws_logits,
    "--timestep_sampling logit_normal, logsnr or qinglong_flux, or --weighting_scheme logit_normal",
)
_BOTH = (
    lambda options: options.experts == "both" and profiles.model(options.task).experts is not None,
    "--experts both of a model that has two",
)
_LORAS_SAVED = _beside("save_every_n_steps", "save_every_n_epochs")


def _states_kept(flag: str) -> tuple[_Reads, str]:
    """It is read where states are kept every so many steps, or epochs."""
    return lambda options: options.save_state and getattr(options, flag), f"--save_state and --{flag}"


_GIVEN_RATE = (
    lambda options: not sets_its_rate(options),
    "every optimizer but Adafactor with relative_step=True or --lr_scheduler adafactor, which sets its rate itself",
)


ENCODE_FIRST = ("cache_latents", "cache_latents_to_disk")
"""Flags with which training encodes what the cache lacks."""


def _encodes(*others: str) -> tuple[_Reads, str]:
    """It is read where the run encodes what the cache lacks, or where one of these other flags is given."""
    flags = [*ENCODE_FIRST, *others]
    beside, _ = _beside(*flags)
    words = f"--cache_mode auto or realtime, {', '.join(f'--{flag}' for flag in flags[:-1])} or --{flags[-1]}"
    return lambda options: options.cache_mode != "cached" or beside(options), words


_NOT_PLAIN = (lambda options: not options.plain, "every run but that of --plain")
_LOSS_HELD_OUT = _beside("validation_items", "validation_config")

READERS: dict[str, tuple[_Reads, str]] = {
    **dict.fromkeys(("network_dim", "network_alpha"), _chosen("train_mode", ["lora"])),
    "learning_rate": _GIVEN_RATE,
    "lr_warmup_steps": _GIVEN_RATE,
    "lr_decay_steps": _chosen("lr_scheduler", ["warmup_stable_decay"]),
    "lr_scheduler_num_cycles": _chosen(
        "lr_scheduler", ["cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay"]
    ),
    "lr_scheduler_power": _chosen("lr_scheduler", ["polynomial"]),
    "lr_scheduler_min_lr_ratio": _chosen("lr_scheduler", ["cosine_with_min_lr", "warmup_stable_decay", "rex"]),
    "lr_scheduler_timescale": _chosen("lr_scheduler", ["inverse_sqrt"]),
    "discrete_flow_shift": _chosen("timestep_sampling", ["shift"]),
    "sigmoid_scale": _chosen(
        "timestep_sampling", ["sigmoid", "shift", "flux_shift", "qwen_shift", "qinglong_flux", "qinglong_qwen"]
    ),
    "logit_mean": _LOGITS,
    "logit_std": _LOGITS,
    "base_weights_multiplier": _beside("base_weights"),
    "mode_scale": _chosen("weighting_scheme", ["mode"]),
    "preserve_distribution_shape": (is_narrowed, "--min_timestep or --max_timestep"),
    "validation_timesteps": _LOSS_HELD_OUT,
    "validate_every_n_steps": _LOSS_HELD_OUT,
    "save_last_n_steps": _beside("save_every_n_steps"),
    "save_last_n_epochs": _beside("save_every_n_epochs"),
    "keep_last": _LORAS_SAVED,
    "save_state": _LORAS_SAVED,
    "save_last_n_steps_state": _states_kept("save_every_n_steps"),
    "save_last_n_epochs_state": _states_kept("save_every_n_epochs"),
    "training_comment": (lambda options: not options.no_metadata, "every header but that of --no_metadata"),
    "async_save": _chosen("train_mode", ["full"]),
    # The script for Slurm gives it whatever the GPUS are.
    "max_restarts": (lambda options: options.gpus != "1" or SUBMITTED_BY in os.environ, "--gpus"),
    "vae_dtype": _encodes("sample_prompts", "sample_continuations"),
    "vae_cache_cpu": _encodes("sample_prompts", "sample_continuations"),
    **dict.fromkeys(("t5_dtype", "fp8_t5", "tokenizer"), _encodes("sample_prompts")),
    **dict.fromkeys(("vae_device", "text_encoder_device", "decoder"), _encodes()),
    "clip": (lambda options: profiles.model(options.task).has_clip, "models that take CLIP's view of the first frame"),
    "compile": _NOT_PLAIN,
    "split_attn": _NOT_PLAIN,
    "pack": (
        lambda options: options.gradient_accumulation_steps > 1 and not options.plain,
        "--gradient_accumulation_steps above 1, and without --plain",
    ),
    "logging_dir": _logged_to("tensorboard", "wandb", "mlflow"),
    "log_tracker_name": _logged_to("wandb", "mlflow"),
    "wandb_run_name": _logged_to("wandb"),
    "block_swap_ring_size": _beside("blocks_to_swap"),
    "checkpointing_free_blocks": (  # with none of the one a preset leaves none of the others
        lambda options: options.checkpointing != "none" or not options.checkpointing_free_blocks,
        "--checkpointing full or selective",
    ),
    "high_noise_share": _BOTH,
    "expert_turn_steps": _BOTH,
    "offload_inactive_dit": _BOTH,
}
"""By flag: whether a run reads it, and beside what it does."""
