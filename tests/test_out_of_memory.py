"""The cheapest changes that fit, by the memory formula."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import every

from wangen import profiles
from wangen.generator.commands import parse
from wangen.generator.memory import GIB, memory_plan, memory_settings, tokens_of
from wangen.generator.memory_changes import cheapest_changes, fitting_flags
from wangen.generator.memory_presets import resolve_vram
from wangen.generator.steps import Train
from wangen.generator.train_refusals import refuse_memory, refuse_more_blocks

BIG = profiles.model("t2v-14B")


def options(**changes) -> Train:
    made = Train(dataset_config=Path("a.toml"), output_dir=Path("o"), output_name="n", dit=Path("d"), network_dim=32,
                 quantize="none", blocks_to_swap=0, checkpointing="none")  # fmt: skip
    return replace(made, **changes)


def changes_of(
    model: profiles.Model, given: Train, tokens: int, available: int | None, *, alone: int = 0, shards: int = 1
) -> list[str]:
    """The changes by the memory formula; unpacked there are `alone` tokens."""

    def needed(run: Train) -> int:
        settings = memory_settings(run, shards)
        return memory_plan(model, settings, tokens=tokens if run.pack or not alone else alone).device

    return cheapest_changes(given, model, needed, available)


def test_on_a_large_card_keeping_attention_is_enough():
    assert changes_of(BIG, options(), 7800, 80 * GIB) == [
        "--checkpointing selective", "--checkpointing_free_blocks 1",
    ]  # fmt: skip


@pytest.mark.parametrize(("tokens", "card"), [(1024, 24), (7800, 24), (32760, 24), (1024, 16), (7800, 16)])
def test_what_is_proposed_fits_and_nothing_less_does(tokens, card):
    given = options()
    changes = changes_of(BIG, given, tokens, card * GIB)
    assert changes
    words = [word for change in changes for word in change.split()]
    line = ["--dataset_config", "a.toml", "--output_dir", "o", "--output_name", "n", "--network_dim", "32", *words]
    fitting = parse(Train, line)
    assert memory_plan(BIG, memory_settings(fitting), tokens=tokens).device <= card * GIB
    assert memory_plan(BIG, memory_settings(given), tokens=tokens).device > card * GIB
    if fitting.blocks_to_swap:
        fewer = replace(fitting, blocks_to_swap=fitting.blocks_to_swap - 1)
        assert memory_plan(BIG, memory_settings(fewer), tokens=tokens).device > card * GIB


def test_where_nothing_fits_no_flag_is_proposed():
    assert changes_of(BIG, options(), 75_600, 8 * GIB) == []


def test_batches_that_were_packed_go_apart_before_anything_else():
    given = options(pack=True, checkpointing="full", gradient_accumulation_steps=4)
    assert changes_of(BIG, given, 75_600, 40 * GIB, alone=7800) == ["--no_pack"]
    assert changes_of(BIG, given, 75_600, None, alone=7800) == ["--no_pack"]
    assert changes_of(BIG, given, 75_600, 20 * GIB, alone=7800)[:2] == ["--no_pack", "--quantize int8"]


def test_where_processes_share_out_the_weights_packed_batches_can_go_apart():
    given = options(parallel="fsdp", checkpointing="full", pack=True, gradient_accumulation_steps=8)
    changes = changes_of(BIG, given, 8 * 32_760, 24 * GIB, alone=32_760, shards=8)
    assert changes[0] == "--no_pack"

    def needed(run: Train) -> int:
        tokens = 8 * 32_760 if run.pack else 32_760
        return memory_plan(BIG, memory_settings(run, 8), tokens=tokens).device

    flags = fitting_flags(given, BIG, needed, 24 * GIB)
    assert flags
    assert flags["pack"] is False
    assert needed(replace(given, **flags)) <= 24 * GIB
    assert "pack" not in (fitting_flags(replace(given, gradient_accumulation_steps=2), BIG, lambda run: 0, 1) or {})


@pytest.mark.parametrize("free", [0, 1, 2, 5])
@pytest.mark.parametrize("card", [6, 7, 8, 9, 10, 12])
def test_what_is_proposed_swaps_no_block_that_is_not_recomputed(free, card):
    given = options(checkpointing="full", checkpointing_free_blocks=free)
    changes = changes_of(BIG, given, 1560, card * GIB)
    changed = replace(given, **{name: value for change in changes for name, value in flag_of(change).items()})
    refuse_memory(changed)
    refuse_more_blocks(changed, 40)


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp"])
@pytest.mark.parametrize("card", [12, 16, 24])
def test_where_processes_share_out_the_weights_no_block_is_swapped(parallel, card):
    given = options(parallel=parallel, checkpointing="selective")
    changes = changes_of(BIG, given, 7800, card * GIB, shards=4)
    assert changes
    assert not [change for change in changes if "swap" in change or "none" in change]
    changed = replace(given, **{name: value for change in changes for name, value in flag_of(change).items()})
    sizes = [memory_plan(BIG, memory_settings(changed, shards), tokens=7800).device for shards in (4, 1)]
    assert sizes[0] <= card * GIB < sizes[1]


def test_an_unknown_device_gets_the_first_change_alone():
    assert changes_of(BIG, options(), 1024, None) == ["--checkpointing selective", "--checkpointing_free_blocks 1"]
    assert changes_of(BIG, options(checkpointing="full"), 1024, None) == ["--quantize int8"]


MODES = ({}, {"plain": True}, {"train_mode": "full"}, {"checkpointing": "none"}, {"checkpointing_free_blocks": 9},
         {"checkpointing": "none", "plain": True}, {"checkpointing": "none", "train_mode": "full"})  # fmt: skip


@pytest.mark.parametrize("name", profiles.model_names())
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("share", every(2, [0.8, 0.95], pytest.mark.slow))
def test_what_is_proposed_takes_less_memory_and_is_not_refused(name, mode, share):
    model = profiles.model(name)
    tokens = tokens_of(model, model.resolution, model.num_frames)

    def needed(run: Train) -> int:
        return memory_plan(model, memory_settings(run), tokens=tokens).device

    for vram in (None, *map(str, model.presets)):
        given = replace(options(quantize=None, blocks_to_swap=None, checkpointing=None), vram=vram, **mode)
        start = resolve_vram(given, model, None)
        available = needed(start) - 1
        while changes := cheapest_changes(start, model, needed, available):
            changed = replace(start, **{name: value for change in changes for name, value in flag_of(change).items()})
            refuse_memory(changed)
            assert needed(changed) <= available, changes
            available = int(share * needed(changed))


@cache
def flag_of(change: str) -> dict[str, Any]:
    words = change.split()
    made = parse(Train, ["--dataset_config", "a.toml", "--output_dir", "o", "--output_name", "n", *words])
    return {words[0][2:]: getattr(made, words[0][2:])}


def test_a_base_is_not_quantised_where_a_later_change_makes_room_enough():
    given = options(task="ti2v-5B", network_dim=16, blocks_to_swap=5, checkpointing="full", pack=True,
                    gradient_accumulation_steps=4)  # fmt: skip
    assert changes_of(profiles.model("ti2v-5B"), given, 4 * 75_600, 24 * GIB, alone=75_600) == [
        "--no_pack", "--gradient_checkpointing_cpu_offload",
    ]  # fmt: skip


def test_a_full_memory_is_never_answered_with_less_recomputation():
    """Of a picture it takes next to nothing, and the formula has just been wrong."""
    given = options(task="ti2v-5B", network_dim=16, checkpointing="selective")
    assert changes_of(profiles.model("ti2v-5B"), given, 256, 48 * GIB) == ["--quantize int8"]


def test_what_every_weight_takes_counts():
    small, card = profiles.model("t2v-1.3B"), 24 * GIB
    whole = options(train_mode="full", checkpointing="full")
    assert changes_of(small, whole, 1024, card) == [], "1.4 billion weights of 18 bytes and more"
    keeps = replace(whole, checkpointing="none")
    assert changes_of(small, keeps, 1024, 40 * GIB) == ["--checkpointing selective", "--checkpointing_free_blocks 1"]
