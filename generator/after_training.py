"""What the training tells the steps that follow it in a script: where its LoRA is, and what was held out.

What could only fail after the whole training is refused when the script is made.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from wangen import profiles
from wangen.generator.adapter_settings import settings_of_flags
from wangen.generator.commands import build
from wangen.generator.errors import WangenError, many
from wangen.generator.paths import is_absolute_anywhere
from wangen.generator.steps import Generate, Train
from wangen.generator.table import Step, options
from wangen.generator.target import Target
from wangen.generator.workspace import FILE
from wangen.profiles import Model

MERGE_FIRST = (
    "merge them once (wangen export --dit … --lora_weight … --save_path …), and name that file as dit in their place"
)

_BASE = ("quantize", "blocks_to_swap", "timestep_boundary")
"""How the base is held and divided: as in training."""

_TRAINING_READS = ("network_weights", "network_weights_high_noise", "base_weights", "validation_config", "resume")
"""Flags of training that name files, beside the weights and the prompts, which the first step judges."""

_READ_AFTER = (
    "prompt_file", "image_path", "control_image_path", "clip_model", "training_config", "forgetting_config",
)  # fmt: skip
"""The same of what follows the training."""


def training_of(told: Mapping[str, Any], paths: Mapping[str, str]) -> Train:
    """The training that these flags say."""
    names = {option.name for option in options(Train)}
    train = build(Train, {name: value for name, value in {**paths, **told}.items() if name in names})
    assert isinstance(train, Train)
    return train


def read_later(training: Mapping[str, Any], after: Iterable[Mapping[str, Any]]) -> list[str]:
    """Files and folders that only training and what follows it read: a missing one is told before hours of caching.

    Args:
        training: its flags.
        after: what the workspace says of each step that follows.
    """
    named = [training.get(name) for name in _TRAINING_READS]
    named += [own.get(name) for own in after for name in _READ_AFTER]
    return [str(path) for value in named if value for path in (value if isinstance(value, list | tuple) else [value])]


def after_training(
    kind: type[Step], own: Mapping[str, Any], told: Mapping[str, Any], model: Model, paths: Mapping[str, str],
    target: Target,
) -> dict[str, Any]:  # fmt: skip
    """Flags of `generate` or `evaluate` in a training script.

    Args:
        kind: the step.
        own: what the workspace says of it.
        told: what the profiles and the workspace say of training, with the memory flags of `--vram`.
        model: what is trained.
        paths: values of the flags that are paths.
        target: where the script runs.

    Raises:
        WangenError: the step could not run after this training.
    """
    if told.get("train_mode") == "full":
        raise _refused(kind, "all weights are trained, and it takes LoRAs",
                       "leave the table out: after the training, wangen generate --dit takes its file")  # fmt: skip
    if told.get("show_timesteps"):
        raise _refused(kind, "the timesteps are shown and nothing is trained", "leave show_timesteps out")
    if model.experts and told.get("experts", "both") != "both":
        raise _refused(kind, "one expert is trained, and both are needed", "leave the table out, or train both")
    folder = str(told.get("output_dir", paths["output_dir"]))
    found = {"lora_weight": [folder], **{name: told[name] for name in _BASE if name in told}}
    if kind is Generate:
        found |= _loras(folder, own, told, model, paths)
        return {**found, **_prompts(own, told, model, paths), "save_path": target.path(folder, "generated")}
    if told.get("base_weights"):
        raise _refused(kind, "base_weights are merged for the training alone, and it would judge by another base",
                       MERGE_FIRST)  # fmt: skip
    found["output_dir"] = folder
    if "condition_frames" in told:
        found["condition_frames"] = told["condition_frames"]
    if config := told.get("validation_config"):
        return {**found, "dataset_config": config, "resolution": "all", "training_config": paths["dataset_config"]}
    if not told.get("validation_items"):
        raise _refused(kind, "the training holds nothing out that could be judged by",
                       "give [steps.train] validation_items = 8, or a validation_config")  # fmt: skip
    same = {"seed": told.get("seed", Train.seed), "validation_items": told["validation_items"]}
    for name, value in same.items():
        if own.get(name, value) != value:
            raise _refused(kind, f"with another {name} it would judge by what was trained on", f"leave {name} out")
    return {**found, **same}


def _loras(
    folder: str, own: Mapping[str, Any], told: Mapping[str, Any], model: Model, paths: Mapping[str, str]
) -> dict[str, Any]:
    """The run's LoRA, and those that the training merged into its base, as strong as there; what is said wins."""
    base = list(told.get("base_weights", ()))
    if base and settings_of_flags(training_of(told, paths)).dora:
        raise _refused(Generate, "a DoRA scales the base that base_weights are merged into, and is shown on another",
                       MERGE_FIRST)  # fmt: skip
    strengths = [1.0, *(told.get("base_weights_multiplier") or [1.0] * len(base))]
    found: dict[str, Any] = {}
    for expert in ("", "_high_noise") if model.experts else ("",):
        weight, multiplier = f"lora_weight{expert}", f"lora_multiplier{expert}"
        if weight in own:
            continue
        found[weight] = [folder, *base]
        if base and len(own.get(multiplier, strengths)) != len(strengths):
            raise _refused(Generate, f"{multiplier} is for the run's LoRA and its {many(len(base), 'LoRA')} of "
                           "base_weights", f"give {len(strengths)} numbers, in that order")  # fmt: skip
        found |= {multiplier: strengths} if base else {}
    return found


def as_trained(model: Model, sizes: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Size and length of videos as they are trained, where the workspace says that; an edit is as large as its picture.

    Args:
        model: with the workspace's number of frames.
        sizes: that it is trained at, as (width, height) in pixels; the largest is taken.
    """
    usual, largest = profiles.model(model.name), max(sizes, key=prod)
    found: dict[str, Any] = {}
    if largest != usual.resolution and model.condition != "controls":
        width, height = (max(side - side % model.bucket_step, model.bucket_step) for side in largest)
        found["video_size"] = height, width
    if model.num_frames != usual.num_frames:
        found["video_length"] = model.num_frames
    return found


def _prompts(own: Mapping[str, Any], told: Mapping[str, Any], model: Model, paths: Mapping[str, str]) -> dict[str, Any]:
    """What `generate` shows: its own prompt or file, else the training's sample prompts."""
    if "prompt" in own:
        if model.condition == "image" and "image_path" not in own:
            raise _refused(Generate, f"{model.name} begins with a picture", "give image_path, a full path there")
        return {}
    if file := str(own.get("prompt_file", "")):
        if not is_absolute_anywhere(file):
            raise _refused(Generate, "prompt_file is not copied to the machine that trains",
                           "give sample_prompts below [steps.train], or a full path of that machine")  # fmt: skip
        return {}
    samples = paths.get("sample_prompts") or told.get("sample_prompts")
    if not samples:
        raise _refused(Generate, "there is no prompt", "give prompt, or sample_prompts below [steps.train]")
    return {"prompt_file": samples}


def _refused(kind: type[Step], found: str, cure: str) -> WangenError:
    return WangenError(f"[steps.{kind.command}]: {found}", where=FILE, cure=cure)
