"""`--vram`: from the size of a card, or from what is free on it, to the flags that decide the memory."""

import logging
from dataclasses import replace
from typing import Any

import torch

from wangen.generator.errors import UsageError
from wangen.generator.memory import (
    GIB,
    PLAIN_MEMORY,
    MemorySettings,
    memory_plan,
    preset_flags,
    preset_plan,
    tokens_of,
)
from wangen.generator.steps import Train
from wangen.profiles import Model

log = logging.getLogger("wangen")

CONTEXT_BYTES = GIB // 2
"""What CUDA itself has taken when it is asked what is free; the budgets count it."""


def resolve_vram(options: Train, model: Model, device: torch.device) -> Train:
    """The options with every memory flag filled in; those that were given stay.

    What a preset says and the other flags rule out is left away: with `--train_mode full` nothing is quantised or
    swapped, with `--plain` nothing is swapped and every block is recomputed alike.

    Args:
        options: of the training step.
        model: its profile, which has the presets.
        device: `auto` asks what is free on it; where it cannot tell, as a CPU, no preset is taken.

    Raises:
        UsageError: the model has no such preset, or the device has less free than the smallest needs.
    """
    if options.vram == "auto":
        values = {**PLAIN_MEMORY} | _flags_for_free_memory(options, model, device)
    else:
        values = {**PLAIN_MEMORY} | preset_flags(model, options.vram)
    if options.train_mode == "full":
        values |= {"quantize": "none", "blocks_to_swap": 0}
    if options.plain or options.train_mode == "full":
        values |= {"blocks_to_swap": 0, "checkpointing": "full", "checkpointing_free_blocks": 0}
    if options.checkpointing == "none":
        values |= {"blocks_to_swap": 0, "checkpointing_free_blocks": 0, "gradient_checkpointing_cpu_offload": False}
    if options.blocks_to_swap is not None:  # swapped blocks are recomputed
        room = max(0, model.transformer.num_layers - options.blocks_to_swap)
        values["checkpointing_free_blocks"] = min(values["checkpointing_free_blocks"], room)
    given = {name: value for name in values if (value := getattr(options, name)) is not None}
    return replace(options, **(values | given))


def _flags_for_free_memory(options: Train, model: Model, device: torch.device) -> dict[str, Any]:
    """The flags that use what is free on a device best."""
    if device.type != "cuda":
        return {}
    free = torch.cuda.mem_get_info(device)[0] + CONTEXT_BYTES
    roomy = MemorySettings(checkpointing="selective", free_blocks=1, rank=max(32, options.network_dim))
    tokens = tokens_of(model, model.resolution, model.num_frames)
    if memory_plan(model, roomy, tokens=tokens).device <= free:
        log.info("  --vram auto: %.1f GiB are free, enough for the whole model", free / GIB)
        return {"checkpointing": "selective", "checkpointing_free_blocks": 1}
    fitting = [gib for gib, preset in model.presets.items() if preset_plan(model, preset).device <= free]
    if not fitting:
        least = min((preset_plan(model, preset).device for preset in model.presets.values()), default=0)
        raise UsageError(
            f"--vram auto: {free / GIB:.1f} GiB are free on {device}, and the smallest preset of {model.name} needs "
            f"{least / GIB:.1f}",
            cure="close what else uses the card, or choose the memory flags yourself without --vram",
        )
    log.info("  --vram auto: %.1f GiB are free, taking the preset for %d", free / GIB, max(fitting))
    return preset_flags(model, str(max(fitting)))
