"""The cheapest changes that fit, by the memory formula."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from wangen import profiles
from wangen.generator.commands import parse
from wangen.generator.memory import GIB, memory_plan, settings_of, tokens_of
from wangen.generator.memory_changes import cheapest_changes
from wangen.generator.memory_presets import resolve_vram
from wangen.generator.steps import Train
from wangen.generator.train_refusals import refuse_memory

BIG = profiles.model("t2v-14B")


def options(**changes) -> Train:
    made = Train(dataset_config=Path("a.toml"), output_dir=Path("o"), output_name="n", dit=Path("d"), network_dim=32,
                 quantize="none", blocks_to_swap=0, checkpointing="none")  # fmt: skip
    return replace(made, **changes)


def test_on_a_large_card_keeping_attention_is_enough():
    assert cheapest_changes(BIG, options(), 7800, 80 * GIB) == ["--checkpointing selective"]


@pytest.mark.parametrize(("tokens", "card"), [(1024, 24), (7800, 24), (32760, 24), (1024, 16), (7800, 16)])
def test_what_is_proposed_fits_and_nothing_less_does(tokens, card):
    given = options()
    changes = cheapest_changes(BIG, given, tokens, card * GIB)
    assert changes
    words = [word for change in changes for word in change.split()]
    line = ["--dataset_config", "a.toml", "--output_dir", "o", "--output_name", "n", "--network_dim", "32", *words]
    fitting = parse(Train, line)
    assert memory_plan(BIG, settings_of(fitting), tokens=tokens).device <= card * GIB
    assert memory_plan(BIG, settings_of(given), tokens=tokens).device > card * GIB


def test_where_nothing_fits_no_flag_is_proposed():
    assert cheapest_changes(BIG, options(), 75_600, 8 * GIB) == []


def test_an_unknown_device_gets_the_first_change_alone():
    assert cheapest_changes(BIG, options(), 1024, None) == ["--checkpointing selective"]
    assert cheapest_changes(BIG, options(checkpointing="full"), 1024, None) == ["--quantize int8"]


MODES = ({}, {"plain": True}, {"train_mode": "full"}, {"checkpointing": "none"}, {"checkpointing_free_blocks": 9},
         {"checkpointing": "none", "plain": True}, {"checkpointing": "none", "train_mode": "full"})  # fmt: skip


@pytest.mark.parametrize("name", profiles.model_names())
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_no_change_that_is_proposed_takes_more_memory_or_is_refused(name, mode):
    model = profiles.model(name)
    tokens = tokens_of(model, model.resolution, model.num_frames)

    def needed(run: Train) -> int:
        return memory_plan(model, settings_of(run), tokens=tokens).device

    for vram in (None, *map(str, model.presets)):
        given = replace(options(quantize=None, blocks_to_swap=None, checkpointing=None), vram=vram, **mode)
        start = resolve_vram(given, model, None)
        available = needed(start) - 1
        while changes := cheapest_changes(model, start, tokens, available):
            runs = [start]
            for change in changes:
                runs.append(replace(runs[-1], **flag_of(change)))
                refuse_memory(runs[-1])
            sizes = [needed(run) for run in runs]
            assert sizes == sorted(sizes, reverse=True), changes
            available = sizes[-1] - 1


@cache
def flag_of(change: str) -> dict[str, Any]:
    words = change.split()
    made = parse(Train, ["--dataset_config", "a.toml", "--output_dir", "o", "--output_name", "n", *words])
    return {words[0][2:]: getattr(made, words[0][2:])}


def test_what_every_weight_takes_counts():
    small, card = profiles.model("t2v-1.3B"), 24 * GIB
    whole = options(train_mode="full", checkpointing="full")
    assert cheapest_changes(small, whole, 1024, card) == [], "1.4 billion weights of 18 bytes and more"
    keeps = replace(whole, checkpointing="none")
    assert cheapest_changes(small, keeps, 1024, 40 * GIB) == ["--checkpointing selective"]
