"""What flags of training can be, and what stands in place of other tools' flags."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from wangen.generator.errors import UsageError
from wangen.generator.step_parts import COMPILES, MODEL_VERSION

TimestepSampling = Literal[
    "uniform", "sigmoid", "shift", "logit_normal", "logsnr", "flux_shift", "qwen_shift", "qinglong_flux",
    "qinglong_qwen", "sigma",
]  # fmt: skip
LrScheduler = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
    "cosine_with_min_lr", "warmup_stable_decay", "rex", "adafactor",
]  # fmt: skip
Quantize = Literal["none", "fp8", "int8", "nf4"]

OPTIMIZERS: Mapping[str, str] = {
    "": "AdamW",
    "adamw": "AdamW",
    "adamw8bit": "AdamW8bit",
    "adafactor": "Adafactor",
    "prodigy": "prodigyopt.Prodigy",
    "lion": "lion_pytorch.Lion",
    "came": "came_pytorch.CAME",
    "adamwschedulefree": "schedulefree.AdamWScheduleFree",
    "radamschedulefree": "schedulefree.RAdamScheduleFree",
}
"""Names in circulation, in lower case -> of `--optimizer_type`."""

_DYNAMO = "use --compile; without it nothing is compiled"
_UPLOADS = "wangen uploads nothing: run `hf upload` on the finished file"
_NO_DDP = "leave it out: gradients are summed without DistributedDataParallel"

ELSEWHERE: Mapping[str, str] = {
    **MODEL_VERSION,
    "wandb_api_key": "keys belong neither on a command line nor into a file: set WANDB_API_KEY or run `wandb login`",
    **dict.fromkeys(
        (
            "huggingface_token",
            "huggingface_repo_id",
            "huggingface_repo_type",
            "huggingface_path_in_repo",
            "huggingface_repo_visibility",
            "save_state_to_huggingface",
            "async_upload",
        ),
        _UPLOADS,
    ),
    "resume_from_huggingface": "wangen downloads nothing: fetch the state with `hf download`, then --resume FOLDER",
    "lr_scheduler_type": "use --lr_scheduler",
    "lr_scheduler_args": "use --lr_scheduler_num_cycles, --lr_scheduler_power and --lr_scheduler_min_lr_ratio",
    "guidance_scale": "it is HunyuanVideo's: leave it out for Wan",
    "one_frame": "one-frame training is not in this version of wangen; leave it out",
    **COMPILES,
    **dict.fromkeys(("dynamo_backend", "dynamo_mode", "dynamo_fullgraph", "dynamo_dynamic"), _DYNAMO),
    "cuda_cudnn_benchmark": "leave it out: training on a cache has no convolution that is worth a choice",
    "log_prefix": "leave it out: --logging_dir names the folder, --wandb_run_name the run",
    "log_tracker_config": "use --log_tracker_name and --wandb_run_name",
    "log_config": "leave it out: a LoRA's header holds the settings it was trained with",
    "metadata_reso": "leave it out: modelspec.resolution is not written",
    "metadata_arch": "leave it out: modelspec.architecture is not written; --task says the model",
    **dict.fromkeys(("ddp_gradient_as_bucket_view", "ddp_static_graph"), _NO_DDP),
    "ddp_timeout": "leave it out: processes wait long enough for each other by themselves",
}
"""Flags of other trainers -> what to do here."""

FOR_ADAPTERS = (
    "network_module", "network_dropout", "rslora", "dora", "lokr_factor", "lora_targets", "include_patterns",
    "exclude_patterns", "network_args", "dim_from_weights", "loraplus_lr_ratio", "scale_weight_norms", "lora_layout",
)  # fmt: skip
"""What `--train_mode full`, which trains no adapter, takes only as it is without being given."""

OFF_AT_ZERO = (
    "save_last_n_epochs", "save_last_n_steps", "save_last_n_epochs_state", "save_last_n_steps_state",
    "scale_weight_norms", "lr_scheduler_timescale",
)  # fmt: skip
"""Numbers of other trainers' settings files, which hold every flag, of flags that are off."""


def optimizer_arguments(words: Sequence[str]) -> dict[str, Any]:
    """`weight_decay=0.01 betas=0.9,0.99` -> keyword arguments; values are Python literals or plain words.

    `false` is no less False than in a TOML or in `--network_args`; as a word it would count as true.

    Raises:
        UsageError: one is no key=value, or sets the learning rate.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--optimizer_args takes key=value, got {word!r}", cure="write weight_decay=0.01, say")
        if name == "lr":
            raise UsageError("--optimizer_args takes no lr: it has a flag of its own", cure="give --learning_rate")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
        if values.setdefault(name, value) != value:
            raise UsageError(f"--optimizer_args gives {name} twice: {values[name]}, {value}", cure="give one of them")
    return values


_STEPS = "give steps (100), a share (0.05) or a percentage (5%)"


def steps_of(flag: str, text: str, num_steps: int) -> int:
    """Steps of a part of the run: `100` is steps, `0.05` or `5%` a share of it.

    Raises:
        UsageError: it is no number, or longer than the run where it is a share.

    >>> steps_of("lr_warmup_steps", "100", 400), steps_of("lr_warmup_steps", "0.05", 400)
    (100, 20)
    >>> steps_of("lr_warmup_steps", "5%", 400), steps_of("lr_warmup_steps", "1", 400)
    (20, 1)
    """
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise UsageError(f"--{flag} takes steps, a share or a percentage, got {text!r}", cure=_STEPS) from None
    share = value / 100 if text.endswith("%") else value
    if not 0 <= value < float("inf") or (text.endswith("%") and share > 1):
        raise UsageError(f"--{flag} {text} is outside the run", cure=_STEPS)
    if is_share(text):
        return round(share * num_steps)
    if value != int(value):
        raise UsageError(f"--{flag} {text} is neither a whole number of steps nor a share below 1", cure=_STEPS)
    return int(value)


def is_share(text: str) -> bool:
    """Whether a number of steps is given as a part of the run.

    >>> [is_share(text) for text in ("0", "100", "1", "0.05", "5%", "1e-2")]
    [False, False, False, True, True, True]
    """
    return text.endswith("%") or 0 < float(text) < 1
