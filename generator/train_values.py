"""What flags of training can be, and what stands in place of other tools' flags."""

from collections.abc import Mapping
from typing import Literal

from wangen.generator.step_parts import MODEL_VERSION

TimestepSampling = Literal[
    "uniform", "sigmoid", "shift", "logit_normal", "logsnr", "flux_shift", "qwen_shift", "qinglong_flux",
    "qinglong_qwen", "sigma",
]  # fmt: skip
LrScheduler = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
    "cosine_with_min_lr", "warmup_stable_decay", "rex", "adafactor",
]  # fmt: skip
Quantize = Literal["none", "fp8", "int8", "nf4"]

ELSEWHERE: Mapping[str, str] = {
    **MODEL_VERSION,
    "wandb_api_key": "keys do not belong on a command line: set WANDB_API_KEY or run `wandb login`",
    "huggingface_token": "wangen uploads nothing: run `hf upload` on the finished file",
    "huggingface_repo_id": "wangen uploads nothing: run `hf upload` on the finished file",
    "lr_scheduler_type": "use --lr_scheduler",
    "lr_scheduler_args": "use --lr_scheduler_num_cycles, --lr_scheduler_power and --lr_scheduler_min_lr_ratio",
    "guidance_scale": "it is HunyuanVideo's: leave it out for Wan",
    "img_in_txt_in_offloading": "it is HunyuanVideo's: leave it out for Wan",
    "one_frame": "one-frame training is not in this version of wangen; leave it out",
    "compile_backend": "use --compile alone: blocks are compiled by inductor",
    "compile_mode": "use --compile alone: blocks are compiled by inductor in its default mode",
    "compile_dynamic": "use --compile alone: each shape gets a graph of its own",
    "dynamo_backend": "use --compile",
    "ddp_timeout": "leave it out: processes wait long enough for each other by themselves",
}
"""Flags of other trainers -> what to do here."""
