"""Steps by CUDA graphs give what steps without them give; on a stand-in, which has no GPU to hide what it reads."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import stand_in_graphs
import torch
from fast_dit import CONFIGS, Inputs, adapted, fast, inputs_of, noisy, same, small, trained, vectors_model
from helpers import every
from parity import DITS
from tiny_qwen import make_transformer

from wangen.generator.steps import Train
from wangen.runtime.fast import graphs
from wangen.runtime.fast.attention import choose_kernel
from wangen.runtime.fast.graphs import RUNS_BEFORE, Graphs
from wangen.runtime.models.compute import Compute
from wangen.runtime.models.inputs import Inputs as ModelInputs
from wangen.runtime.models.qwen_image_edit.fast import FastQwen
from wangen.runtime.randomness import generator_for
from wangen.runtime.training.loading import compute_of
from wangen.runtime.training.validation import evaluating

CPU = torch.device("cpu")
Call = Callable[[Any], torch.Tensor]
"""A velocity model -> its output."""


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_graphs.stand_in(monkeypatch)


def step(model: Any, velocity: Any, call: Call, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """As `fast_dit.step`, with gradients that stay where they are, as training has them."""
    for parameter in trained(model).values():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
    output = call(velocity)
    target = torch.randn(output.shape, generator=generator_for("target", seed))
    (output.float() - target).square().mean().backward()
    return output.detach().clone(), {name: p.grad.clone() for name, p in trained(model).items()}


def different(inputs: Inputs, number: int) -> Inputs:
    """The same shapes with other numbers everywhere, and texts of other lengths."""
    texts = [text[: max(1, len(text) - number)] * (1 - 0.1 * number) for text in inputs.texts]
    shown = {name: None if value is None else value * (1 + 0.2 * number)
             for name in ("condition", "image_tokens") for value in [getattr(inputs, name)]}  # fmt: skip
    latents, times = inputs.latents * (1 - 0.2 * number), inputs.timesteps * (1 - 0.1 * number)
    return dataclasses.replace(inputs, latents=latents, timesteps=times, texts=texts, **shown)


Steps = list[tuple[torch.Tensor, dict[str, torch.Tensor]]]


def without(model: Any, velocity: Any, calls: Sequence[Call]) -> Steps:
    """The steps without graphs."""
    velocity._graphs = Graphs(model)
    velocity._graphs._has_given_up = True
    return [step(model, velocity, call, number) for number, call in enumerate(calls)]


def with_and_without(model: Any, velocity: Any, calls: Sequence[Call], wanted: Steps | None = None) -> Graphs:
    """Check that steps by graphs equal those without, bit by bit; the graphs."""
    wanted = wanted or without(model, velocity, calls)
    velocity._graphs = Graphs(model)
    found = [step(model, velocity, call, number) for number, call in enumerate(calls)]
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))
    assert all(bool(tensor.abs().max() > 0) for tensor in found[-1][1].values())
    return velocity._graphs


def num_replays(recorded: Graphs) -> int:
    return sum(one.forward.num_replays for one in recorded._recorded.values())


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("name", every(2, list(DITS), pytest.mark.slow))
def test_what_is_replayed_is_the_step(name: str, checkpointing: str):
    """Of all tasks; with texts of different lengths, and timesteps of each token's own where they are given so."""
    model = adapted(vectors_model(name)).eval()
    calls = [different(inputs_of(name, batch=2), number) for number in range(5)]
    found = with_and_without(model, fast(model, checkpointing=checkpointing), calls)
    assert len(found._recorded) == 1
    assert num_replays(found) == 5 - RUNS_BEFORE


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in ("lora", "dropout")])
def test_adapters_of_every_kind_are_replayed(kind: str):
    model = adapted(vectors_model("dit_ti2v5b"), kind).eval()
    calls = [different(inputs_of("dit_ti2v5b", batch=2), number) for number in range(4)]
    assert num_replays(with_and_without(model, fast(model), calls)) == 2


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_edits_are_replayed(checkpointing: str):
    model = make_transformer()
    model.requires_grad_(False)
    layers = r"attn\.(to_q|to_k|add_v_proj|to_out\.0)|img_mlp\.net\.2"
    model = adapted(model, targets=rf".*transformer_blocks\.\d+\.({layers})").eval()
    compute = Compute(checkpointing=checkpointing)
    velocity = FastQwen(model, compute, choose_kernel("sdpa", CPU, torch.float32))
    draw = torch.Generator().manual_seed(0)

    def call(number: int) -> Call:
        latents, control = (torch.randn(1, 16, 1, 8, 8, generator=draw) for _ in range(2))
        text = torch.randn(7, model.config.joint_attention_dim, generator=draw)
        times = torch.tensor([100.0 * number])
        return lambda velocity: velocity(latents, times, [text], controls=[[control[0]]])

    calls = [call(number) for number in range(1, 5)]
    calls = [lambda velocity, one=one: one(velocity) for one in calls]
    assert num_replays(with_and_without(model, velocity, calls)) == 2


def test_each_shape_has_its_own_and_captions_of_many_lengths_share_one():
    model = adapted(small(2)).eval()
    shapes = [(1, 2, 8, 8), (1, 3, 8, 8), (2, 2, 8, 8)]
    calls = [noisy(batch, *shape, rows=rows) for rows in (20, 30, 40, 55) for batch, *shape in shapes]
    found = with_and_without(model, fast(model), calls)
    assert len(found._recorded) == len(shapes)
    assert num_replays(found) == 2 * len(shapes)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_as_many_tokens_of_other_shapes_or_times_are_other_steps(checkpointing: str):
    """The same number of tokens with other positions, other items, and other runs that share a timestep."""
    model = adapted(small(2)).eval()
    times = [torch.full((1, 32), 500.0), torch.full((1, 32), 500.0)]
    times[0][:, :16] = times[1][:, :8] = 0.0
    calls = [noisy(1, 2, 8, 8), noisy(1, 2, 4, 16), noisy(2, 1, 8, 8)]
    calls += [dataclasses.replace(noisy(1, 2, 8, 8), timesteps=one) for one in times]
    found = with_and_without(model, fast(model, checkpointing=checkpointing), calls * 4)
    assert len(found._recorded) == 4  # positions are numbers that go in; all the rest makes another graph
    assert num_replays(found) == 20 - 2 * 4
    assert len({id(one.forward.memory) for one in found._recorded.values()}) == 1
    assert all(one.forward.memory is one.backward.memory for one in found._recorded.values())


def test_pictures_of_as_many_tokens_are_other_edits():
    model = make_transformer()
    model.requires_grad_(False)
    model = adapted(model, targets=r".*transformer_blocks\.\d+\.attn\.(to_q|add_v_proj)").eval()
    velocity = FastQwen(model, Compute(checkpointing="full"), choose_kernel("sdpa", CPU, torch.float32))
    draw = torch.Generator().manual_seed(0)

    def edit(target: tuple[int, int], control: tuple[int, int], rows: int) -> Call:
        latents, shown = (torch.randn(1, 16, 1, *size, generator=draw) for size in (target, control))
        text = torch.randn(rows, model.config.joint_attention_dim, generator=draw)
        return lambda velocity: velocity(latents, torch.tensor([300.0]), [text], controls=[[shown[0]]])

    sizes = [((8, 8), (4, 4), 7), ((4, 16), (4, 4), 7), ((4, 4), (8, 8), 7), ((8, 8), (4, 4), 9), ((8, 8), (4, 8), 5)]
    calls = [edit(*size) for _ in range(4) for size in sizes]
    assert len(with_and_without(model, velocity, [_called(one) for one in calls])._recorded) == 3


def _called(call: Call) -> Call:
    return lambda velocity: call(velocity)


def test_a_rare_shape_and_one_too_many_are_not_recorded(monkeypatch: pytest.MonkeyPatch):
    model = adapted(small(1)).eval()
    monkeypatch.setattr(graphs, "MOST_SHAPES", 1)
    calls = [noisy(1, 2, 8, 8)] * 4 + [noisy(1, 3, 8, 8)] * 2 + [noisy(1, 1, 8, 8)] * 4
    found = with_and_without(model, fast(model), calls)
    assert [one.output.shape[0] for one in found._recorded.values()] == [2 * 4 * 4]


def test_two_forward_passes_before_their_backward_passes():
    """As of batches whose first frames are given, which are packed and go one after the other."""
    model, inputs = adapted(small(2)).eval(), [different(noisy(1, 2, 8, 8), number) for number in range(2)]
    velocity = fast(model)

    def both(velocity: Any) -> torch.Tensor:
        passes = [ModelInputs(one.latents, torch.full((1, 32), 300.0), one.texts) for one in inputs]
        return torch.cat(velocity.packed(passes))

    found = with_and_without(model, velocity, [both] * 4)
    assert 0 < num_replays(found) <= 4


def test_a_pass_that_never_goes_back_holds_nothing_up():
    model, inputs = adapted(small(1)).eval(), noisy(1, 2, 8, 8)
    velocity = fast(model)
    velocity._graphs = Graphs(model)
    for _ in range(5):
        inputs(velocity)
    assert num_replays(velocity._graphs) == 3


def test_weights_that_have_moved_are_recorded_anew_a_few_times(caplog: Any):
    model, inputs = adapted(small(1)).eval(), noisy(1, 2, 8, 8)
    velocity = fast(model)
    found = with_and_without(model, velocity, [inputs] * 4)
    (before,) = found._recorded.values()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * (1 if parameter.requires_grad else 0.5)
    moved = step(model, velocity, inputs)
    (after,) = found._recorded.values()
    assert after is not before
    for _ in range(graphs.MOST_MOVES):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        assert same(moved, step(model, velocity, inputs))
    assert "the weights are never where they were" in caplog.text
    assert not found.are_there
    assert same(moved, step(model, velocity, inputs))


@pytest.mark.parametrize("changes", [{"offload": True}, {"compile": True}])
def test_what_comes_and_goes_is_not_recorded(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    model = adapted(small(1)).eval()
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
    monkeypatch.setattr("wangen.runtime.fast.dit_shared.elementwise_of", lambda *_: None)
    kernel = choose_kernel("sdpa", CPU, torch.float32)
    assert fast_with(model, kernel, graphs=True)._graphs is not None
    assert fast_with(model, kernel, graphs=True, **changes)._graphs is None
    assert fast_with(model, kernel)._graphs is None
    assert fast_with(model, kernel, swap=object(), graphs=True)._graphs is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert fast_with(model, kernel, graphs=True)._graphs is None


def fast_with(model: Any, kernel: Any, swap: Any = None, **changes: Any) -> Any:
    from wangen.runtime.fast.dit_shared import FastModel

    return FastModel(model, Compute(**changes), kernel, swap)


def test_large_steps_dropouts_trained_beginnings_and_looking_go_without(monkeypatch: pytest.MonkeyPatch, caplog: Any):
    model, inputs = adapted(small(1)).eval(), noisy(1, 2, 8, 8)

    def recorded(model: Any, grad: bool = True) -> int:
        velocity = fast(model)
        velocity._graphs = Graphs(model)
        for _ in range(4):
            with torch.set_grad_enabled(grad):
                output = inputs(velocity)
            if grad:
                output.float().square().mean().backward()
        return len(velocity._graphs._recorded)

    assert recorded(model) == 1
    with caplog.at_level(logging.WARNING, "wangen"):
        assert recorded(model, grad=False) == 0
    assert not caplog.messages
    assert recorded(adapted(small(1), "dropout").train()) == 0
    assert recorded(adapted(small(1), targets=r".*(to_q|time_proj)").eval()) == 0
    monkeypatch.setattr("wangen.generator.small_steps.SMALL_STEP", 32 * 64 - 1)
    assert recorded(model) == 0


def test_where_nothing_can_be_recorded_the_steps_go_on(monkeypatch: pytest.MonkeyPatch, caplog: Any):
    class Refuses:
        def __init__(self) -> None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model, inputs = adapted(small(1)).eval(), noisy(1, 2, 8, 8)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Refuses)
    with caplog.at_level(logging.WARNING, "wangen"):
        found = with_and_without(model, fast(model), [inputs] * 5)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "no CUDA graphs: RuntimeError('operation not permitted when stream is capturing" in said
    assert not found.are_there


def noisy_calls() -> list[Inputs]:
    return [different(noisy(2, 2, 8, 8), number) for number in range(4)]


@functools.cache
def steps_without(kind: str, checkpointing: str) -> Steps:
    """Of the model of the next test, which is the same each time."""
    model = adapted(small(2, torch.bfloat16), kind).eval()
    return without(model, fast(model, checkpointing=checkpointing), noisy_calls())


@pytest.mark.parametrize("fails", ["forward", "backward", "room"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("kind", every(3, ["dora", "lora", "bias", "loha"], pytest.mark.slow))
def test_a_recording_that_comes_to_nothing_leaves_nothing_behind(
    kind: str, checkpointing: str, fails: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    """In bfloat16, where what an adapter casts is held for others: recorded casts have no numbers."""
    recordings = []

    @contextlib.contextmanager
    def breaks(graph: Any, **words: Any) -> Iterator[None]:
        recordings.append(graph)
        with stand_in_graphs.recording(graph, **words):
            yield
            if len(recordings) == ("forward", "backward").index(fails) + 1:
                raise RuntimeError("CUDA out of memory")

    model, calls = adapted(small(2, torch.bfloat16), kind).eval(), noisy_calls()
    wanted = steps_without(kind, checkpointing)
    if fails == "room":
        monkeypatch.setattr(graphs, "spare_bytes", lambda _: graphs.BESIDE - 1)
    else:
        monkeypatch.setattr(torch.cuda, "graph", breaks)
    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    found = with_and_without(model, fast(model, checkpointing=checkpointing), calls, wanted)
    assert not found.are_there
    assert len(streams) == (fails != "room")
    assert not torch.cuda.default_generators[0].is_recorded
    assert ("there is too little memory;" if fails != "room" else "too little memory would be left;") in caplog.text


@pytest.mark.parametrize("spare", [graphs.BESIDE - 1, graphs.BESIDE])
def test_graphs_that_leave_no_memory_are_let_go(spare: int, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    model, inputs = adapted(small(1)).eval(), noisy(1, 2, 8, 8)
    monkeypatch.setattr(graphs, "spare_bytes", lambda _: spare)
    with caplog.at_level(logging.WARNING, "wangen"):
        found = with_and_without(model, fast(model), [inputs] * 4)
    assert found.are_there == (spare == graphs.BESIDE)
    assert ("too little memory would be left" in caplog.text) == (spare < graphs.BESIDE)


@pytest.mark.parametrize("roomy", [True, False])
def test_whoever_looks_at_the_model_has_their_memory_if_that_is_short(roomy: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "is_roomy", lambda _: roomy)
    model, inputs = adapted(small(1)).eval(), noisy(1, 2, 8, 8)
    velocity = fast(model)
    found = with_and_without(model, velocity, [inputs] * 3)
    assert found.are_there
    with evaluating(model):
        assert found.are_there == roomy
    step(model, velocity, inputs)
    assert found.are_there  # at once: the shape was seen often enough


def test_adapters_behind_the_blocks_alone_have_no_graphs(caplog: Any):
    model, inputs = adapted(small(1), targets=r"proj_out").eval(), noisy(1, 2, 8, 8)
    assert not with_and_without(model, fast(model), [inputs] * 4).are_there
    assert not caplog.messages


def test_that_steps_are_replayed_is_said_once(caplog: Any):
    model, inputs = adapted(small(1)).eval(), noisy(1, 2, 8, 8)
    velocity = fast(model)
    with caplog.at_level(logging.INFO, "wangen"):
        found = with_and_without(model, velocity, [inputs] * 3)
        found.release()
        step(model, velocity, inputs)
    assert found.are_there
    assert [text[:34] for text in caplog.messages] == ["  small steps are replayed as CUDA"]


def test_there_is_nothing_to_give_up_where_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "_all", [Graphs(torch.nn.Linear(1, 1))])
    assert not graphs.give_up()


def test_they_are_asked_for_by_the_flag():
    options = Train(checkpointing="full", output_dir=Path(), output_name="x")
    assert compute_of(options).graphs
    assert not compute_of(dataclasses.replace(options, cuda_graphs=False)).graphs
    assert not compute_of(dataclasses.replace(options, cache_mode="realtime")).graphs
