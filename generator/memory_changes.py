"""Flags that make a training run fit a card, the cheapest first."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from wangen.generator.memory import PLAIN_MEMORY, SPLIT
from wangen.generator.steps import Train
from wangen.profiles import Model

Needed = Callable[[Train], int]
"""Bytes of the card that a run with such flags takes."""

CLEARLY_LESS = 15 / 16
"""Of what a run takes by the formula that found the memory full."""

_RECOMPUTED = {"checkpointing", "checkpointing_free_blocks"}
"""Who gives one of them has both as he wants them."""

FASTEST: Mapping[str, Any] = {**PLAIN_MEMORY, "checkpointing": "none"}
"""The memory flags of a card with room for everything."""


def fitting_flags(
    options: Train, model: Model, needed: Needed, available: int, fixed: Collection[str] = (),
    spared: Needed | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """The memory flags that fit a card and cost the least time, and of these the ones that change the numbers last.

    Args:
        options: of the training step; where several processes share out the weights, `parallel` says so.
        model: the model profile.
        needed: bytes that a run with such flags takes.
        available: of the card.
        fixed: flags that stay as they are.
        spared: bytes that should stay free beside a run with such flags, if that changes no number.

    Returns:
        All memory flags, and `pack` where packed batches have to go apart; None when nothing fits.
    """
    changeable = _changeable(options).difference(fixed)
    fastest = {name: value for name, value in FASTEST.items() if name in changeable}
    start = replace(_filled(options), **fastest)
    found = _changed(start, model, needed, available, changeable)
    if found is None:
        return None

    def in_all(train: Train) -> int:
        return needed(train) + (spared(train) if spared else 0)

    if spared:
        roomy = _changed(start, model, in_all, available, changeable)
        found = roomy if roomy and spared(roomy) and roomy.quantize == found.quantize else found
    if changeable.issuperset(_RECOMPUTED):
        found = _freed(found, model.transformer.num_layers, lambda train: in_all(train) <= available)
    return {name: getattr(found, name) for name in (*FASTEST, "pack") if name != "pack" or found.pack != options.pack}


def cheapest_changes(
    options: Train, model: Model, needed: Needed, available: int | None, fixed: Collection[str] = ()
) -> list[str]:
    """Flags for a run that found the memory full: beside the ones that it has, those that cost the least time.

    Args:
        options: as the run has them; where several processes share out the weights, `parallel` says so.
        model: the model profile.
        needed: bytes that a run with such flags takes; the next one has to take clearly less than this one in any case.
        available: bytes of the device; None where they are not known.
        fixed: flags that stay as they are.

    Returns:
        As they are typed, in the order of what they cost; none when nothing fits.
    """
    options = _filled(options)
    less = round(needed(options) * CLEARLY_LESS)
    available = less if available is None else min(less, available)
    found = _changed(options, model, needed, available, _changeable(options).difference(fixed))
    if found is None:
        return []
    as_before = replace(found, **{name: getattr(options, name) for name in _RECOMPUTED})
    if _go_together(as_before, model.transformer.num_layers) and needed(as_before) <= available:
        found = as_before  # the memory was full: no room is taken to compute less again
    order = dict.fromkeys(name for rung in _rungs(model.transformer.num_layers) for name in rung)
    return [as_flag(name, value) for name in order if (value := getattr(found, name)) != getattr(options, name)]


def shared_out(options: Train, shards: int) -> Train:
    """The options of a run whose weights so many processes share out, as `parallel` tells these functions."""
    return replace(options, parallel=SPLIT[0]) if shards > 1 else options


def as_flag(name: str, value: Any) -> str:
    """A flag as it is typed.

    >>> as_flag("blocks_to_swap", 20), as_flag("pack", False)
    ('--blocks_to_swap 20', '--no_pack')
    """
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name} {value}"


def _changed(start: Train, model: Model, needed: Needed, available: int, changeable: Collection[str]) -> Train | None:
    """The flags after the first rungs that fit, without those that make no room; None where all are too few.

    What an earlier rung changed is then taken back where the room that a later one made allows it.
    """
    layers = model.transformer.num_layers
    options, taken = start, needed(start)
    for rung in _rungs(layers):
        changed = _with(options, rung, changeable)
        if not _go_together(changed, layers):
            if not _go_together(options, layers):
                options = changed  # the next rungs are on top of it
            continue
        # A last block that is free costs nothing where tokens go all at once: then it stays.
        less = taken if changed is options else needed(changed)
        if less < taken or not _go_together(options, layers):
            options, taken = changed, less
        if taken <= available:
            break
    else:
        return None
    moved = {name for name in changeable if getattr(options, name) != getattr(start, name)}
    if "checkpointing" in moved:
        moved |= {"checkpointing_free_blocks"}.intersection(changeable)
    backs = *_BACKS, {"quantize": start.quantize}
    return _taken_back(options, start.blocks_to_swap or 0, backs, moved, layers, lambda one: needed(one) <= available)


def with_less(options: Train, model: Model, fits: Callable[[Train], bool], changeable: Collection[str]) -> Train:
    """The options with less swapped, parked and recomputed where that fits, and nothing more of anything.

    Args:
        options: with every memory flag.
        model: the model profile.
        fits: whether there is room for a run with such flags.
        changeable: flags that may change.
    """
    layers = model.transformer.num_layers
    options = _taken_back(options, 0, _LESS, changeable, layers, fits)
    return _freed(options, layers, fits) if {*changeable} >= _RECOMPUTED else options


_LESS: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing_cpu_offload": False}, {"checkpointing": "none", "checkpointing_free_blocks": 0},
    {"checkpointing": "selective"},
)  # fmt: skip
"""What costs time, in the order in which it is left out."""


def _taken_back(
    options: Train, least_swapped: int, backs: Iterable[Mapping[str, Any]], changeable: Collection[str], layers: int,
    fits: Callable[[Train], bool],
) -> Train:  # fmt: skip
    """The options with fewer blocks swapped, and then with one change after the other, each where it fits."""
    fewer = reversed(range(least_swapped, options.blocks_to_swap or 0))
    for back in (*({"blocks_to_swap": number} for number in fewer), *backs):
        changed = _with(options, back, changeable)
        if options.checkpointing != "none" and _go_together(changed, layers) and fits(changed):
            options = changed
    return options


def _freed(options: Train, layers: int, fits: Callable[[Train], bool]) -> Train:
    """The same, with as many of the last blocks free of recomputation as there is room for."""
    if options.checkpointing == "none" or options.plain:
        return options
    free = options.checkpointing_free_blocks or 0
    more = [
        replace(options, checkpointing_free_blocks=number)
        for number in range(free, layers - (options.blocks_to_swap or 0) + 1)
    ]
    return more[max(0, bisect_left(more, True, key=lambda changed: not fits(changed)) - 1)]


def _with(options: Train, values: Mapping[str, Any], changeable: Collection[str]) -> Train:
    """The options with those of some values that can be changed; the very same where none is another."""
    others = {name: value for name, value in values.items() if name in changeable and getattr(options, name) != value}
    return replace(options, **others) if others else options


def _rungs(layers: int) -> list[dict[str, Any]]:
    """What can be changed, each on top of those before it, the cheapest first.

    Nothing, batches go apart, attention outputs alone are kept, every block but the last is recomputed, that one too,
    the base is held in int8, what is kept waits in host memory, as few blocks as will do are swapped, the base is
    held in nf4.
    """
    return [
        {},
        {"pack": False},
        {"checkpointing": "selective", "checkpointing_free_blocks": 1},
        {"checkpointing": "full", "checkpointing_free_blocks": 1},
        {"checkpointing_free_blocks": 0},
        {"quantize": "int8"},
        {"gradient_checkpointing_cpu_offload": True},
        *({"blocks_to_swap": number} for number in range(1, layers + 1)),
        {"quantize": "nf4"},
    ]


_BACKS: tuple[dict[str, Any], ...] = (
    {"pack": True}, {"gradient_checkpointing_cpu_offload": False},
    {"checkpointing": "none", "checkpointing_free_blocks": 0}, {"checkpointing": "selective"},
    {"checkpointing_free_blocks": 1},
)  # fmt: skip
"""What is taken back where it can be."""


def _changeable(options: Train) -> set[str]:
    """The flags that can be chosen beside the others."""
    if options.plain:
        return {"quantize", "checkpointing", "gradient_checkpointing_cpu_offload"} - _of_whole(options)
    return {*FASTEST, "pack"} - _of_whole(options) - ({"blocks_to_swap"} if options.parallel in SPLIT else set())


def _of_whole(options: Train) -> set[str]:
    """Of a base that is trained itself no weight is quantised or swapped."""
    return {"quantize", "blocks_to_swap"} if options.train_mode == "full" else set()


def _go_together(options: Train, layers: int) -> bool:
    """Whether memory flags, all of them set, can stand beside each other."""
    swapped, free = options.blocks_to_swap or 0, options.checkpointing_free_blocks or 0
    if options.checkpointing == "none":
        return not (swapped or options.gradient_checkpointing_cpu_offload or options.parallel in SPLIT)
    if options.plain and options.checkpointing == "selective":
        return False
    return swapped + free <= layers


def _filled(options: Train) -> Train:
    """The options with every memory flag; those that were given stay."""
    given = {name: value for name in PLAIN_MEMORY if (value := getattr(options, name)) is not None}
    return replace(options, vram=None, **{**PLAIN_MEMORY, **given})
