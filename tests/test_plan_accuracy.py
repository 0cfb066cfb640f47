"""How far the plan is from what a real step of the trainer computes and holds, within the bounds of docs/plan.md."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def accuracy():
    folder = str(Path(__file__).parent.parent / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import plan_accuracy
    finally:
        sys.path.remove(folder)
    return plan_accuracy


@pytest.mark.parametrize(
    ("task", "clip", "layers", "flags"),
    [
        ("t2v-1.3B", (256, 256, 5), 3, {}),
        ("t2v-1.3B", (256, 256, 5), 3, {"checkpointing": "selective", "quantize": "int8", "blocks_to_swap": 2}),
        ("qwen-image", (256, 256, 1), 2, {"quantize": "nf4"}),
    ],
)
def test_a_real_step_is_within_the_stated_bounds(accuracy, task, clip, layers, flags):
    found = accuracy.measure(accuracy.Case(task=task, clip=clip, flags=flags, layers=layers))
    assert 0.99 < found.planned_flops / found.flops < 1.05
    assert 0.95 < found.planned_memory / found.memory < 1.08
