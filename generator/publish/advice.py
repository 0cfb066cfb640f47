"""What training would find wrong with the card that `vram` names and with sample prompts: said when publishing."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from wangen.generator.bundle import AUTO, bundle_steps, prompts_file, told_of_training
from wangen.generator.errors import UsageError, many
from wangen.generator.launch import asks_for_several
from wangen.generator.memory import (
    GIB,
    PLAIN_MEMORY,
    gib_text,
    memory_plan,
    memory_settings,
    preset_of,
    tokens_of,
    usable_bytes,
)
from wangen.generator.memory_presets import for_smaller_steps
from wangen.generator.prompt_files import entries
from wangen.generator.resolutions import resolution_name
from wangen.generator.sample_prompts import defaults_of, make_prompt
from wangen.generator.steps import Train
from wangen.generator.target import Target
from wangen.generator.workspace import Workspace
from wangen.profiles import Model


def preset_advice(
    workspace: Workspace, targets: Iterable[Target], model: Model, slug: str, *, clips: bool, pictures: bool
) -> list[str]:
    """A line for each target whose training would need more than the card of its `vram` has, by the estimate, or less
    than its preset makes room for.

    Args:
        workspace: has the user's defaults, and how the dataset is published.
        targets: where it is published.
        model: what is trained.
        slug: the dataset.
        clips: there are clips, of the model's number of frames.
        pictures: it is known that there are pictures alone, and no flags are fitted to them.
    """
    settings, lines = workspace.dataset(slug), []
    for target in targets:
        told = told_of_training(workspace, target, model)
        vram = told.get("vram")
        if vram in (None, AUTO) or settings.fit:
            continue
        sizes = settings.sizes(model)
        steps = bundle_steps(workspace, target, model, slug)
        (train,) = (step for step in steps if isinstance(step, Train))
        frames = model.num_frames if clips else 1
        largest = max(sizes, key=lambda size: tokens_of(model, size, frames))
        tokens = tokens_of(model, largest, frames) * settings.batch_size
        needed = memory_plan(model, memory_settings(train), tokens=tokens).device
        if needed > usable_bytes(int(vram) * GIB):
            preset = preset_of(model, vram)
            batch = f", {settings.batch_size} at a time" if settings.batch_size > 1 else ""
            lines.append(
                f"{target.platform.name}: the preset for {vram} GB is made for {resolution_name(preset.resolution)}, "
                f"{many(preset.num_frames, 'frame')} and rank {preset.network_dim}; {resolution_name(largest)}, "
                f"{many(frames, 'frame')} and rank {train.network_dim}{batch} take about {gib_text(needed)} "
                "with the other flags: publish less at once, or name a larger card"
            )
        elif pictures and _trains_faster_with_less(train, told, model, tokens):
            lines.append(
                f"{target.platform.name}: the preset for {vram} GB is made for larger steps than those of these "
                f"pictures; faster: wangen publish {slug} --fit --gpu {vram}GB"
            )
    return lines


def _trains_faster_with_less(train: Train, told: Mapping[str, Any], model: Model, tokens: int) -> bool:
    """Whether one process would take some of its preset back for batches of so many tokens; `told`: by the user."""
    by_preset: dict[str, Any] = {name: None for name in PLAIN_MEMORY if name not in told}
    given = replace(train, vram=told["vram"], **by_preset)
    return not asks_for_several(train.gpus) and for_smaller_steps(train, given, model, tokens) != train


def prompts_advice(workspace: Workspace, targets: Iterable[Target], model: Model) -> list[str]:
    """A line for each sample prompt that training would refuse for its values.

    Its pictures may lie elsewhere, and are left to training.

    Args:
        workspace: names the prompts.
        targets: where they are published.
        model: what is trained.

    Raises:
        UsageError: the file cannot be read, or an option in it is unknown.
    """
    lines: dict[str, None] = {}
    plain = replace(model, condition="text", max_controls=0)
    for file in filter(None, {prompts_file(workspace, target, model): None for target in targets}):
        for where, values in entries(file, "sample_prompts"):
            told = {key: value for key, value in values.items() if key not in ("image_path", "control_image_path")}
            asked = model if told == values else plain
            try:
                make_prompt(told, asked, 0, defaults_of(asked), where=where, folder=file.parent)
            except UsageError as error:
                lines[f"training will refuse a sample prompt: {where}: {error.found}; {error.cure}"] = None
    return list(lines)
