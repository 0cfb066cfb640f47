"""The cheapest changes that fit, by the memory formula."""

from dataclasses import replace
from pathlib import Path

import pytest

from wangen import profiles
from wangen.generator.commands import parse
from wangen.generator.memory import GIB, memory_plan
from wangen.generator.steps import Train
from wangen.runtime.training.out_of_memory import cheapest_changes, settings_of

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
