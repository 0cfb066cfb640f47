"""What the training tells the steps that follow it in a script: where its LoRA is, and what was held out.

What could only fail after the whole training is refused when the script is made.
"""

from collections.abc import Mapping
from typing import Any

from wangen.generator.errors import WangenError
from wangen.generator.paths import is_absolute_anywhere
from wangen.generator.steps import Generate, Train
from wangen.generator.table import Step
from wangen.generator.target import Target
from wangen.generator.workspace import FILE
from wangen.profiles import Model

_BASE = ("quantize", "blocks_to_swap", "timestep_boundary")
"""How the base is held and divided: as in training."""


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
    if model.experts and told.get("experts", "both") != "both":
        raise _refused(kind, "one expert is trained, and both are needed", "leave the table out, or train both")
    folder = str(told.get("output_dir", paths["output_dir"]))
    found = {"lora_weight": [folder], **{name: told[name] for name in _BASE if name in told}}
    if kind is Generate:
        high = {"lora_weight_high_noise": [folder]} if model.experts else {}
        return {**found, **high, **_prompts(own, told, model, paths), "save_path": target.path(folder, "generated")}
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
