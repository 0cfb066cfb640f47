"""What the stand-in for a GPU sees: tensors that should not meet, and copies that nobody waited for."""

import sys
from typing import Any

import pytest
import torch

from wangen.generator.errors import WangenError
from wangen.runtime import train

pytestmark = pytest.mark.skipif("stand_in_gpu" not in sys.modules, reason="needs pytest -p stand_in_gpu")


def gpu(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda", dtype=torch.float32)


def test_tensors_of_two_devices_may_not_meet():
    assert (gpu(1, 2) + gpu(3, 4)).tolist() == [4, 6]
    assert (gpu(1, 2) * torch.tensor(2.0)).tolist() == [2, 4]
    meetings: list[Any] = [
        lambda: gpu(1, 2) + torch.ones(2),
        lambda: torch.cat([gpu(1), torch.ones(1)]),
        lambda: torch.nn.functional.linear(gpu(1, 2), torch.ones(2, 2)),
        lambda: gpu(1, 2).addcmul_(torch.ones(2), gpu(1, 2)),
        lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
        lambda: torch.empty(2, device="cuda:1"),
    ]
    for meet in meetings:
        with pytest.raises(RuntimeError, match="device"):
            meet()


def test_gradients_are_the_cpu_s():
    layer, inputs = torch.nn.Conv3d(3, 4, 3), torch.randn(2, 3, 4, 5, 6)
    layer(inputs).square().sum().backward()
    expected = layer.weight.grad.clone()
    layer = layer.cuda()
    layer.weight.grad = None
    layer(inputs.cuda()).square().sum().backward()
    assert layer.weight.grad.device.type == "cuda"
    assert torch.allclose(layer.weight.grad.cpu(), expected)


def test_a_copy_on_a_side_stream_is_there_when_it_was_waited_for():
    target, side = gpu(0, 0), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(torch.tensor([1.0, 2.0]).pin_memory(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    assert target.tolist() == [0, 0]
    event.wait()
    assert target.tolist() == [1, 2]


def test_a_copy_on_a_side_stream_may_not_come_before_what_the_main_one_does_with_its_memory():
    target, side = gpu(0, 0), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    target += 1
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="the main stream may still use"):
        target.copy_(torch.tensor([1.0, 2.0]).pin_memory(), non_blocking=True)


@pytest.mark.parametrize(
    "flags", [{"blocks_to_swap": 1}, {"gradient_checkpointing_cpu_offload": True}], ids=["swap", "offload"]
)
def test_training_and_copies_that_do_not_wait_for_each_other_are_seen(tiny_run, tmp_path, monkeypatch, flags):
    def train_it(name: str) -> None:
        train.run(tiny_run.options(tmp_path / name, max_train_steps=3, **flags))

    train_it("waits")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.Event, "synchronize", lambda _: None)
        with pytest.raises(WangenError, match="not finite"):
            train_it("training does not")
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda _stream, event: event.synchronize())
    with pytest.raises(RuntimeError, match="the main stream may still use"):
        train_it("copies do not")
