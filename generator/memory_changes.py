"""Flags that make a training run fit a card, the cheapest first."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from wangen.generator.memory import PLAIN_MEMORY, memory_plan, settings_of
from wangen.generator.steps import Train
from wangen.profiles import Model


def cheapest_changes(model: Model, options: Train, tokens: int, available: int | None) -> list[str]:
    """Flags that make the run fit, in the order of what they cost in time: each is added to those before it.

    Args:
        model: the model profile.
        options: as the run has them.
        tokens: of the largest batch.
        available: bytes of the device; None, where they are not known, gives the first change alone.

    Returns:
        The changes up to the first that fits by `memory_plan`; none when nothing does.
    """
    settings = settings_of(options)
    needed = memory_plan(model, settings, tokens=tokens).device
    taken: list[str] = []
    for flag, change in _ladder(model, options):
        changed = replace(settings, **change)
        if (less := memory_plan(model, changed, tokens=tokens).device) >= needed:
            continue
        settings, needed = changed, less
        taken = [*(other for other in taken if other.split()[0] != flag.split()[0]), flag]
        if available is None or needed <= available:
            return taken
    return []


def _ladder(model: Model, options: Train) -> Iterator[tuple[str, dict[str, Any]]]:
    """What can be changed, cheapest first; nothing that `refuse_memory` would refuse."""
    settings = settings_of(options)
    if settings.checkpointing == "none" and not options.plain:
        yield "--checkpointing selective", {"checkpointing": "selective"}
    if settings.free_blocks > 1:  # the last block's own backward pass is there anyway
        yield "--checkpointing_free_blocks 1", {"free_blocks": 1}
    if settings.free_blocks:  # but of long clips it is less where the block is computed again
        yield "--checkpointing_free_blocks 0", {"free_blocks": 0}
    if settings.checkpointing != "full":
        yield "--checkpointing full", {"checkpointing": "full"}
    if settings.quantize == "none" and not settings.whole:  # as small as fp8, and closer to the model
        yield "--quantize int8", {"quantize": "int8"}
    if not settings.offload:
        yield "--gradient_checkpointing_cpu_offload", {"offload": True}
    layers = model.transformer.num_layers
    for blocks in () if options.plain or settings.whole else (layers // 4, layers // 2, layers - settings.free_blocks):
        if blocks > settings.blocks_to_swap:
            yield f"--blocks_to_swap {blocks}", {"blocks_to_swap": blocks}
    if settings.quantize != "nf4" and not settings.whole:
        yield "--quantize nf4", {"quantize": "nf4"}


FASTEST: Mapping[str, Any] = {**PLAIN_MEMORY, "checkpointing": "none"}
"""The memory flags of a card with room for everything."""


def fitting_flags(
    options: Train, model: Model, needed: Callable[[Train], int], available: int, fixed: Collection[str] = ()
) -> dict[str, Any] | None:
    """The memory flags that fit a card and cost the least time, and of these the ones that change the numbers last.

    In this order, each on top of those before it: keep everything, keep attention outputs, recompute every block but
    the last, recompute that too, hold the base in int8, park what is kept in host memory, swap as few blocks as will
    do, hold the base in nf4. Then what came before is taken back where the room that a later one made allows it.

    Args:
        options: of the training step.
        model: the model profile.
        needed: bytes that a run with such flags takes.
        available: of the card.
        fixed: flags that stay as they are.

    Returns:
        All memory flags; None when nothing fits.
    """
    changeable = {name: value for name, value in FASTEST.items() if name not in fixed and _may(options, name)}
    options = replace(options, vram=None, **{**PLAIN_MEMORY, **_told(options, fixed), **changeable})
    layers = model.transformer.num_layers
    not_swapped = 0 if "checkpointing_free_blocks" in changeable else options.checkpointing_free_blocks or 0
    rungs: list[dict[str, Any]] = [
        {},
        {"checkpointing": "selective", "checkpointing_free_blocks": 1},
        {"checkpointing": "full", "checkpointing_free_blocks": 1},
        {"checkpointing_free_blocks": 0},
        {"quantize": "int8"},
        {"gradient_checkpointing_cpu_offload": True},
        *({"blocks_to_swap": number} for number in range(1, layers - not_swapped + 1)),
        {"quantize": "nf4"},
    ]
    taken = needed(options)
    for rung in rungs:
        changed = replace(options, **{name: value for name, value in rung.items() if name in changeable})
        if not _go_together(changed, layers):
            continue
        # A last block that is free costs nothing where tokens go all at once: then it stays.
        less = needed(changed)
        if less < taken or not _go_together(options, layers):
            options, taken = changed, less
        if taken <= available:
            break
    else:
        return None
    backs: tuple[dict[str, Any], ...] = (
        {"gradient_checkpointing_cpu_offload": False}, {"checkpointing": "none", "checkpointing_free_blocks": 0},
        {"checkpointing": "selective"}, {"checkpointing_free_blocks": 1},
    )  # fmt: skip
    for back in backs:
        changed = replace(options, **{name: value for name, value in back.items() if name in changeable})
        if options.checkpointing != "none" and _go_together(changed, layers) and needed(changed) <= available:
            options = changed
    return {name: getattr(options, name) for name in FASTEST}


def _may(options: Train, name: str) -> bool:
    """Whether a memory flag can be chosen beside the others."""
    if options.train_mode == "full" and name in ("quantize", "blocks_to_swap"):
        return False
    return not options.plain or name in ("quantize", "gradient_checkpointing_cpu_offload")


def _go_together(options: Train, layers: int) -> bool:
    """Whether memory flags, all of them set, can stand beside each other."""
    swapped, free = options.blocks_to_swap or 0, options.checkpointing_free_blocks or 0
    if options.checkpointing == "none":
        return not (swapped or options.gradient_checkpointing_cpu_offload)
    return swapped + free <= layers


def _told(options: Train, fixed: Collection[str]) -> dict[str, Any]:
    """The memory flags that stay."""
    return {name: getattr(options, name) for name in FASTEST if name in fixed and getattr(options, name) is not None}
