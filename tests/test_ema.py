"""The average of the weights: the library's formula, bytes that survive a restart."""

import pytest
import torch
from diffusers.training_utils import EMAModel

from wangen.runtime.randomness import generator_for
from wangen.runtime.training.ema import Ema
from wangen.runtime.training.flat import FlatParameters


def flat() -> FlatParameters:
    shapes = {"a": (3, 5), "b": (300,), "c": (2, 2)}
    named = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator_for("ema", name)))
        for name, shape in shapes.items()
    }
    return FlatParameters(named, [["a", "c"], ["b"]])


def move(parameters: FlatParameters, step: int) -> None:
    """What an optimizer does."""
    for number, buffer in enumerate(parameters.weights):
        buffer.add_(torch.randn(buffer.shape, generator=generator_for("step", number, step)))


@pytest.mark.parametrize("decay", [0.5, 0.9999])
def test_it_is_the_average_that_diffusers_keeps(decay: float) -> None:
    parameters = flat()
    ours = Ema(parameters, decay)
    reference = EMAModel(parameters.parameters.values(), decay=decay)
    for step in range(30):
        move(parameters, step)
        ours.update()
        reference.step(parameters.parameters.values())
    for (name, average), expected in zip(ours.weights().items(), reference.shadow_params, strict=True):
        torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-6)
        assert average.shape == parameters.parameters[name].shape
        assert not torch.equal(average, parameters.parameters[name])


def test_a_resumed_average_goes_on_with_the_same_bytes() -> None:
    whole, half = flat(), flat()
    one, first = Ema(whole, 0.9), Ema(half, 0.9)
    for step in range(9):
        move(whole, step)
        one.update()
        if step < 4:
            move(half, step)
            first.update()
    saved = {name: tensor.clone() for name, tensor in first.weights().items()}
    second = Ema(half, 0.9)
    second.load(saved, first.num_updates)
    for step in range(4, 9):
        move(half, step)
        second.update()
    assert second.num_updates == one.num_updates == 9
    for name, average in one.weights().items():
        assert torch.equal(second.weights()[name], average), name


def test_updating_leaves_the_weights_alone_and_loading_leaves_the_file_alone() -> None:
    parameters = flat()
    ema = Ema(parameters, 0.9)
    saved = {name: torch.zeros_like(tensor) for name, tensor in ema.weights().items()}
    ema.load(saved, 100)
    before = [buffer.clone() for buffer in parameters.weights]
    ema.update()
    assert all(map(torch.equal, before, parameters.weights))
    assert not any(tensor.any() for tensor in saved.values())
    torch.testing.assert_close(ema.weights()["a"], 0.1 * parameters.parameters["a"].detach())
