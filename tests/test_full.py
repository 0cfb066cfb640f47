"""Full fine-tuning: the fast path gives every weight of the transformer its gradient."""

import dataclasses

import pytest
import torch
from fast_dit import CPU, exact, fast, inputs_of, largest_error, step, trained, vectors_model
from helpers import every
from parity import DITS, max_abs
from torch.utils.flop_counter import FlopCounterMode

from wangen.runtime.fast import products
from wangen.runtime.models.compute import Compute, Tricks
from wangen.runtime.models.wan import velocity_model
from wangen.runtime.training.full import trainable_parameters

WAYS = ({"checkpointing": "full"}, {"checkpointing": "selective", "free_blocks": 1}, {"split_attention": True},
        {"checkpointing": "full", "offload": True})  # fmt: skip


def whole(name: str):
    """A tiny model of which everything is trained."""
    model = vectors_model(name)
    trainable_parameters(model)
    return model


@pytest.mark.parametrize(
    ("name", "ways"),
    every(
        3,
        [*((name, {}) for name in DITS), *((name, ways) for name in ("dit_i2v21", "dit_ti2v5b") for ways in WAYS)],
        pytest.mark.slow,
    ),
    ids=str,
)
def test_every_weight_gets_the_exact_gradient(name: str, ways):
    model, inputs = whole(name), inputs_of(name, batch=2)
    output, gradients = step(model, fast(model, **ways), inputs)
    wanted_output, wanted = exact(model, inputs)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert None not in gradients.values()
    assert max_abs(output, wanted_output) < 2e-5
    assert largest_error(gradients, wanted) < 2e-5


@pytest.mark.parametrize("trick", every(2, [field.name for field in dataclasses.fields(Tricks)], pytest.mark.slow))
def test_each_trick_leaves_the_gradients_of_every_weight(trick: str):
    model, inputs = whole("dit_ti2v5b"), inputs_of("dit_ti2v5b", batch=2)
    _, gradients = step(model, fast(model, tricks=Tricks(**{trick: False})), inputs)
    assert largest_error(gradients, exact(model, inputs)[1]) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dit_t2v21", "dit_i2v21", "dit_ti2v5b"])
@pytest.mark.parametrize("fast_in_bfloat16", [True, False])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of the library under autocast
def test_masters_stay_in_float32_where_blocks_compute_in_bfloat16(name: str, fast_in_bfloat16: bool, monkeypatch):
    """In all no farther from the exact gradients than the library under autocast. A slow CPU computes in float32."""
    monkeypatch.setattr(products, "is_fast_in_bfloat16", lambda: fast_in_bfloat16)
    model, inputs = whole(name), inputs_of(name, batch=2)
    _, wanted = exact(model, inputs)

    def error(compute: Compute) -> float:
        velocity = velocity_model(model, compute, device=CPU, dtype=torch.bfloat16)
        _, gradients = step(model, velocity, inputs)
        assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
        apart = sum(float((gradients[each] - wanted[each]).square().sum()) for each in wanted)
        return (apart / sum(float(each.square().sum()) for each in wanted.values())) ** 0.5

    found = error(Compute(checkpointing="none"))
    if fast_in_bfloat16:
        assert 1e-3 < found < 1.1 * error(Compute(checkpointing="none", plain=True))
    else:
        assert found < 1e-5


def test_padding_is_one_key_in_full_fine_tuning_too():
    model, inputs = whole("dit_t2v21"), inputs_of("dit_t2v21")

    def work(velocity) -> int:
        with FlopCounterMode(display=False) as counter:
            step(model, velocity, inputs)
        return counter.get_total_flops()

    plain = velocity_model(model, Compute(plain=True, checkpointing="none"), device=CPU, dtype=torch.float32)
    assert work(fast(model)) < 0.5 * work(plain)
    assert len(trained(model)) == len(list(model.parameters()))
