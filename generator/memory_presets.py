"""`--vram`: from the size of a card, or from what is free on it, to the flags that decide the memory of training."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wangen.generator.errors import UsageError
from wangen.generator.memory import (
    GIB,
    PLAIN_MEMORY,
    SPLIT,
    batches_of_a_pass,
    gib_text,
    memory_plan,
    memory_settings,
    preset_flags,
    preset_of,
    tokens_of,
    usable_bytes,
)
from wangen.generator.memory_changes import with_less
from wangen.generator.small_steps import graphs_bytes
from wangen.generator.steps import Train
from wangen.profiles import Model, Preset

log = logging.getLogger("wangen")

ROOMY = {"checkpointing": "selective", "checkpointing_free_blocks": 1}
"""The flags of a card that has room for the whole model."""


def resolve_vram(options: Train, model: Model, free: int | None, shards: int = 1) -> Train:
    """The options with every memory flag filled in; those that were given stay.

    What a preset says and the other flags rule out is left away: with `--train_mode full` nothing is quantised or
    swapped, with `--plain` nothing is swapped and every block is recomputed alike, and where processes share out the
    weights (`--parallel fsdp`) nothing is swapped either. Where what is left is more than the card of the preset has,
    that is said.

    Args:
        options: of the training step.
        model: its profile, which has the presets.
        free: bytes that `auto` may take; None, as of a CPU, takes no preset.
        shards: processes that share out the weights.

    Raises:
        UsageError: the model has no such preset; or less is free than the smallest needs, where samples or encoders
            come beside (else `require_fitting` looks at the dataset).
    """
    if options.vram and not model.presets:
        raise UsageError(f"--vram {options.vram}: {model.name} has no preset in this version",
                         cure="give --quantize int8 or nf4 where the card is small")  # fmt: skip
    if options.vram == "auto":
        return _for_free_memory(options, model, free, shards)
    if not options.vram:
        return _filled(options, model, {})
    filled = with_preset(options, model, options.vram)
    _warn_of_more(filled, model, int(options.vram), shards)
    return filled


def with_preset(options: Train, model: Model, vram: str) -> Train:
    """The options with the memory flags of a named card's preset; those that were given stay.

    A preset is made for plain LoRAs of its rank. Where the options need more for its clips, as many blocks more are
    swapped as that takes, or all.

    Args:
        options: of the training step.
        model: its profile.
        vram: a number, of gigabytes.

    Raises:
        UsageError: the model has no such preset.
    """
    preset, usable = preset_of(model, vram), usable_bytes(int(vram) * GIB)
    filled = _filled(options, model, preset_flags(model, vram))
    cannot = filled.train_mode == "full" or filled.plain or filled.checkpointing == "none"
    if cannot or options.parallel in SPLIT or options.blocks_to_swap is not None:
        return filled
    most = max(0, model.transformer.num_layers - (filled.checkpointing_free_blocks or 0))
    for swapped in range(filled.blocks_to_swap or 0, most):
        found = replace(filled, blocks_to_swap=swapped)
        if _needed_of(found, model, preset) <= usable:
            return found
    return replace(filled, blocks_to_swap=most)


def for_smaller_steps(options: Train, given: Train, model: Model, tokens: int, available: int | None = None) -> Train:
    """The options of a preset, for a run whose largest batch has fewer tokens than those that it is made for.

    Of what the preset swaps, parks and recomputes as much is taken back as the card has room for, and room for small
    steps to be replayed: that costs no accuracy. The base keeps the preset's form. Nothing is taken back where
    encoders or samples of any size take their turn on the card.

    Args:
        options: with every memory flag, as `resolve_vram` fills them in.
        given: the same before.
        model: its profile.
        tokens: of the largest batch.
        available: bytes that `auto` may take; None, as of a CPU, leaves its choice.
    """
    resolution, num_frames = model.resolution, model.num_frames
    if given.vram and given.vram != "auto":
        preset = preset_of(model, given.vram)
        resolution, num_frames = preset.resolution, preset.num_frames
        available = usable_bytes(int(given.vram) * GIB)
    if not given.vram or available is None or tokens >= tokens_of(model, resolution, num_frames):
        return options
    if _others_take_turns(given):
        return options

    def fits(train: Train) -> bool:
        in_a_pass = tokens * batches_of_a_pass(train)
        needed = memory_plan(model, memory_settings(train), tokens=in_a_pass).device
        return needed + graphs_bytes(train, in_a_pass, model.transformer.dim) <= available

    given_flags = {name for name in PLAIN_MEMORY if getattr(given, name) is not None}
    return with_less(options, model, fits, {*PLAIN_MEMORY} - given_flags)


def _filled(options: Train, model: Model, flags: Mapping[str, Any]) -> Train:
    """The options with a preset's flags, less what the given ones rule out."""
    values = {**PLAIN_MEMORY, **flags}
    if options.train_mode == "full":
        values |= {"quantize": "none", "blocks_to_swap": 0}
    if options.plain:
        values |= {"blocks_to_swap": 0, "checkpointing": "full", "checkpointing_free_blocks": 0}
    if options.parallel in SPLIT:
        values |= {"blocks_to_swap": 0}
    if options.checkpointing == "none":
        values |= {"blocks_to_swap": 0, "checkpointing_free_blocks": 0, "gradient_checkpointing_cpu_offload": False}
    # Swapped blocks are recomputed: what one of the two is given leaves the rest to the other.
    pair = ("blocks_to_swap", "checkpointing_free_blocks")
    for given, other in (pair, pair[::-1]):
        if (blocks := getattr(options, given)) is not None:
            values[other] = min(values[other], max(0, model.transformer.num_layers - blocks))
    stay = {name: value for name in values if (value := getattr(options, name)) is not None}
    return replace(options, **(values | stay))


def require_fitting(
    options: Train, given: Train, model: Model, tokens: int, available: int | None, shards: int = 1
) -> None:
    """Refuse a dataset that is too large for what is free, where `auto` found no preset whose clips are not.

    Args:
        options: with every memory flag.
        given: the same before.
        model: its profile.
        tokens: of the largest batch, or of all that go through the blocks together.
        available: bytes that `auto` may take; None, as of a CPU, refuses nothing.
        shards: processes that share out the weights.

    Raises:
        UsageError: the largest batch needs more than is free.
    """
    if given.vram != "auto" or available is None or _that_fits(given, model, available, shards):
        return
    needed = memory_plan(model, memory_settings(options, shards), tokens=tokens).device
    if needed > available:
        raise _too_little(available, f"the dataset's largest batch of {tokens} tokens needs {gib_text(needed)}")


def _for_free_memory(options: Train, model: Model, free: int | None, shards: int) -> Train:
    """The options that use what is free best."""
    if free is None:
        log.info("  --vram auto: there is no card whose memory is known, so the flags are the usual ones")
        return _filled(options, model, {})
    found = _that_fits(options, model, free, shards)
    if found:
        log.info("  --vram auto: %s are free, %s", gib_text(free), found[1])
        return found[0]
    smallest = min(model.presets)
    options = with_preset(options, model, str(smallest))
    needed = gib_text(_needed_of(options, model, model.presets[smallest], shards))
    if _others_take_turns(options):
        raise _too_little(free, f"the smallest preset of {model.name} needs {needed}")
    log.info("  --vram auto: %s are free, and clips of the smallest preset need %s; it is taken for smaller ones",
             gib_text(free), needed)  # fmt: skip
    return options


def _that_fits(options: Train, model: Model, free: int, shards: int) -> tuple[Train, str] | None:
    """The options for a card with so much free, and what they are in words; None where no preset's clips fit."""
    roomy = _filled(options, model, ROOMY)
    if _needed(roomy, model, 32, model.resolution, model.num_frames, shards) <= free:
        return roomy, "enough for the whole model"
    for gib, preset in sorted(model.presets.items(), reverse=True):
        filled = with_preset(options, model, str(gib))
        if _needed_of(filled, model, preset, shards) <= free:
            return filled, f"taking the preset for {gib}"
    return None


def _too_little(free: int, what_needs_more: str) -> UsageError:
    return UsageError(
        f"--vram auto: {free / GIB:.1f} GiB are free on the card, and {what_needs_more} with the other flags as given",
        cure="close what else uses the card, take smaller pictures, shorter clips or a smaller batch, or choose the "
        "memory flags yourself without --vram",
    )


def _others_take_turns(given: Train) -> bool:
    """Whether encoders or samples of any size are on the card between steps."""
    others = given.sample_prompts or given.sample_continuations or given.validation_config
    return given.cache_mode == "realtime" or bool(others)


def _warn_of_more(options: Train, model: Model, gib: int, shards: int) -> None:
    """Say it where the flags that were given beside a preset need more than its card has."""
    preset = model.presets[gib]
    needed, usable = _needed_of(options, model, preset, shards), usable_bytes(gib * GIB)
    if needed > usable:
        width, height = preset.resolution
        log.warning("  --vram %d: beside the other flags, clips of %dx%dx%d need %s of the %s that such a card has for "
                    "training; smaller ones may fit (wangen plan counts them)", gib, width, height, preset.num_frames,
                    gib_text(needed), gib_text(usable))  # fmt: skip


def _needed_of(options: Train, model: Model, preset: Preset, shards: int = 1) -> int:
    return _needed(options, model, preset.network_dim, preset.resolution, preset.num_frames, shards)


def _needed(options: Train, model: Model, rank: int, resolution: tuple[int, int], num_frames: int, shards: int) -> int:
    """Bytes of the card for training on such clips, at that rank or the greater one of the flags."""
    settings, tokens = memory_settings(options, shards), tokens_of(model, resolution, num_frames)
    return memory_plan(model, replace(settings, rank=max(rank, settings.rank)), tokens=tokens).device
