"""How long a plan says that steps take that wait for their kernels to be started."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from wangen import profiles
from wangen.generator.cards import card_named
from wangen.generator.memory import MemorySettings
from wangen.generator.plan.estimate import batch_seconds, plan_run, shape_flops
from wangen.generator.plan.shapes import Shape, Survey
from wangen.generator.steps import Train

BIG = profiles.model("t2v-14B")


def options(**changes: Any) -> Train:
    return Train(output_dir=Path("out"), output_name="cats", **changes)


def test_small_steps_take_what_their_kernels_take_to_start():
    """By a graph on NVIDIA's cards, by the processor else, and where a graph cannot be."""
    small, settings = Shape((64, 64), 1), MemorySettings()
    pictures = Survey(samples=Counter({small: 4}), uses=Counter({small: 4}))

    def seconds(card: str, **changes: Any) -> Any:
        (one,) = plan_run(options(checkpointing="full", **changes), BIG, pictures, card_named(card)).shapes
        return one.seconds

    by_graph, by_processor = (pytest.approx((40 * 290 * each, 2 * 40 * 290 * each)) for each in (2.5e-6, 13e-6))
    assert seconds("H100") == by_graph
    assert seconds("MI300X") == by_processor
    for changes in ({"cuda_graphs": False}, {"compile": True}, {"network_dropout": 0.1}, {"cache_mode": "realtime"}):
        assert seconds("H100", **changes) == by_processor
    large = shape_flops(Shape((832, 480), 81), options(), BIG, 64)
    assert batch_seconds(large, card_named("H100"), settings, BIG) == batch_seconds(
        large, card_named("H100"), settings, BIG, replayed=True
    )
