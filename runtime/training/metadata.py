"""The header of a trained file: what was trained, on which data, with which settings; no time, host, path or id.

Fields called `ss_…` are musubi-tuner's and kohya's, which other programs show; `modelspec.…` are those of the Stability
AI model metadata standard (https://github.com/Stability-AI/ModelSpec); `wangen.…` are ours.
"""

import json

from wangen import profiles
from wangen.generator import header_keys
from wangen.generator.header_keys import (
    AVERAGED,
    EPOCH_STEPS,
    EXPERT,
    FINGERPRINT,
    FORMAT,
    JUDGED_AT,
    RUN_STEPS,
    TASK,
    TRAIN_MODE,
    TRAINED_BEFORE,
)
from wangen.generator.headers import WEIGHTS_FORMAT
from wangen.generator.steps import Train
from wangen.generator.train_refusals import sets_its_rate
from wangen.runtime.trained_on import HELD_OUT
from wangen.runtime.training.adapter_config import adapter_settings
from wangen.runtime.training.plan import Plan
from wangen.runtime.training.timesteps import trained_range

MODULES = {"loha": "networks.loha", "lokr": "networks.lokr"}
LORA_MODULES = {"wan": "networks.lora_wan", "qwen_image_edit": "networks.lora_qwen_image"}
"""`ss_network_module`, as musubi-tuner calls them; of a LoRA by the architecture."""

SETTINGS = (
    "learning_rate", "gradient_accumulation_steps", "lr_warmup_steps", "lr_scheduler", "mixed_precision", "seed",
    "max_grad_norm", "timestep_sampling", "discrete_flow_shift", "sigmoid_scale", "logit_mean", "logit_std",
    "weighting_scheme", "min_timestep", "max_timestep", "noise_offset", "caption_dropout", "network_dropout",
)  # fmt: skip
"""Flags that are stored as `ss_` and their name."""

TEXTS = ("title", "author", "description", "license", "tags")


def metadata(
    plan: Plan, expert: str, *, step: int, run_step: int, judged_at: str = "", averaged: bool = False
) -> dict[str, str]:
    """A file's header.

    Args:
        plan: of the run.
        expert: `high_noise`, `low_noise`, or empty where there is only one.
        step: optimizer steps done, of two experts its own.
        run_step: those that both experts together had done.
        judged_at: of a best one, a digest of the points at which it was judged.
        averaged: it holds the averages of `--ema_decay`.

    Returns:
        Text fields. With `--no_metadata` only what programs need to use the file and what the user says of it.
    """
    options = plan.options
    found = {"format": "pt", FORMAT: WEIGHTS_FORMAT, "ss_base_model_version": _base(options),
             TASK: options.task, **_network(options, expert)}  # fmt: skip
    if expert:
        found[EXPERT] = expert
    if options.no_metadata:
        return found | _described(options)
    found |= {f"ss_{name}": str(getattr(options, name)) for name in SETTINGS}
    if sets_its_rate(options):
        found |= {"ss_lr_scheduler": "adafactor", "ss_learning_rate": "None", "ss_lr_warmup_steps": "0"}
    found |= {
        FINGERPRINT: json.dumps(plan.fingerprint, sort_keys=True),
        EPOCH_STEPS: str(plan.steps_per_epoch),
        "ss_optimizer": _optimizer(options),
        "ss_steps": str(step),
        "ss_epoch": str(-(-step // plan.steps_per_epoch)),
        "ss_num_train_items": str(sum(one.sample.entry.num_repeats for one in plan.samples)),
        "ss_num_batches_per_epoch": str(plan.batches_per_epoch),
    }
    for one in plan.experts:
        if one.name == expert:  # of two experts its part of what the flags say
            least, most = trained_range(options, one.low, one.high)
            found |= {"ss_min_timestep": f"{least:g}", "ss_max_timestep": f"{most:g}"}
    if expert:
        found[RUN_STEPS] = str(run_step)
    if judged_at:
        found[JUDGED_AT] = judged_at
    if averaged:
        found[AVERAGED] = str(options.ema_decay)
    if held_out := plan.told.get(HELD_OUT):
        found[header_keys.HELD_OUT] = json.dumps(held_out)
    if plan.trained_before:
        found[TRAINED_BEFORE] = json.dumps(plan.trained_before, sort_keys=True)
    if options.training_comment:
        found["ss_training_comment"] = options.training_comment
    return found | _described(options)


def _base(options: Train) -> str:
    """What musubi-tuner calls the architecture."""
    model = profiles.model(options.task)
    if model.architecture == "wan":
        return "wan"
    return "qwen_image_edit" if model.condition == "controls" else "qwen_image"


def _network(options: Train, expert: str) -> dict[str, str]:
    """What is trained."""
    if options.train_mode == "full":
        return {TRAIN_MODE: "full"}
    chosen, architecture = adapter_settings(options, expert), profiles.model(options.task).architecture
    arguments = {"use_rslora": chosen.rslora, "use_dora": chosen.dora, "factor": chosen.factor,
                 "decompose_both": chosen.decompose_both, "rank_dropout": chosen.rank_dropout,
                 "module_dropout": chosen.module_dropout}  # fmt: skip
    given = {name: str(value) for name, value in arguments.items() if value not in (False, -1)}
    return {
        "ss_network_module": {**MODULES, "lora": LORA_MODULES[architecture]}[chosen.kind],
        "ss_network_dim": str(chosen.rank),
        "ss_network_alpha": str(chosen.alpha),
        **({"ss_network_args": json.dumps(given, sort_keys=True)} if given else {}),
    }


def _optimizer(options: Train) -> str:
    """The optimizer with its arguments, as musubi-tuner writes it."""
    arguments = ",".join(options.optimizer_args)
    return f"{options.optimizer_type}({arguments})" if arguments else options.optimizer_type


def _described(options: Train) -> dict[str, str]:
    """What the user says of the file."""
    texts = {f"modelspec.{name}": getattr(options, f"metadata_{name}") for name in TEXTS}
    given = {key: str(text) for key, text in texts.items() if text}
    return {"modelspec.sai_model_spec": "1.0.0", **given} if given else {}
