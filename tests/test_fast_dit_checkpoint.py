"""Checkpointing of the fast transformer in all its forms, block swap and a quantised base: never another bit."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from fast_dit import LINEARS, WAYS, adapted, fast, inputs_of, largest_error, plain, same, step, trained, vectors_model
from helpers import every
from live import Live
from parity import max_abs
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from wangen.runtime.fast import dit_checkpoint, products
from wangen.runtime.fast.dit_by_hand import BlockByHand, Kept
from wangen.runtime.fast.host_copies import HostCopies, HostCopy
from wangen.runtime.memory.quantize import QuantLinear, quantize_blocks
from wangen.runtime.memory.swap import BlockSwap
from wangen.runtime.models.compute import Tricks
from wangen.runtime.training.full import trainable_parameters


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*every(3, [("dit_i2v21", torch.float32), ("dit_t2v21", torch.float32), ("dit_ti2v5b", torch.float32)],
            pytest.mark.slow), ("dit_t2v21", torch.bfloat16)],
)  # fmt: skip
def test_every_way_of_recomputing_gives_the_same_bits(way: dict[str, Any], name: str, dtype: torch.dtype):
    model, inputs = adapted(vectors_model(name, dtype)), inputs_of(name, batch=2)
    wanted = step(model, fast(model, split_attention="split_attention" in way), inputs)
    velocity = fast(model, **way)
    assert same(step(model, velocity, inputs), wanted)
    assert same(step(model, velocity, inputs), wanted), "the next step begins where this one did"


@pytest.mark.parametrize("is_fast", [True, False])
def test_recomputing_gives_the_same_bits_whatever_products_are_computed_in(
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(products, "is_fast_in_bfloat16", lambda: is_fast)
    model, inputs = adapted(vectors_model("dit_i2v21", torch.bfloat16)), inputs_of("dit_i2v21")
    wanted = step(model, fast(model), inputs)
    assert same(step(model, fast(model, checkpointing="full"), inputs), wanted)


@pytest.mark.parametrize("kind", ["dora", "lokr", "loha", "dropout"])
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_other_adapters_are_recomputed_as_they_were(kind: str, checkpointing: str):
    """With dropout: the same numbers drop out."""
    model, inputs = adapted(vectors_model("dit_t2v21"), kind), inputs_of("dit_t2v21")
    steps = []
    for way in ("none", checkpointing):
        torch.manual_seed(3)
        steps.append(step(model, fast(model, checkpointing=way), inputs))
    assert same(*steps)


BEFORE = r".*(condition_embedder\.time_proj|condition_embedder\.text_embedder\.linear_1|attn1\.to_q)"


@pytest.mark.parametrize(
    "way",
    [WAYS[0], WAYS[5], *(pytest.param(way, marks=pytest.mark.slow) for way in (*WAYS[1:5], WAYS[6]))],
    ids=lambda way: "-".join(map(str, way.values())),
)
@pytest.mark.parametrize(("name", "dtype"), [("dit_i2v21", torch.float32), ("dit_ti2v5b", torch.bfloat16)])
@pytest.mark.parametrize("everything", [False, True])
def test_the_same_bits_where_what_comes_before_the_blocks_is_trained(
    way: dict[str, Any], name: str, dtype: torch.dtype, everything: bool, monkeypatch: pytest.MonkeyPatch
):
    """Then gates have a gradient, and are computed in another way than frozen ones."""
    monkeypatch.setattr(products, "is_fast_in_bfloat16", lambda: True)
    model, inputs = vectors_model(name, dtype), inputs_of(name, batch=2)
    if everything:
        trainable_parameters(model)
    else:
        model = adapted(model, targets=BEFORE)
    split = "split_attention" in way
    wanted = step(model, fast(model, dtype=dtype, split_attention=split), inputs)
    assert same(step(model, fast(model, dtype=dtype, **way), inputs), wanted)


def test_gradients_of_two_passes_add_up():
    model, inputs = adapted(vectors_model("dit_t2v21")), inputs_of("dit_t2v21")
    velocity = fast(model, checkpointing="full")
    _, once = step(model, velocity, inputs)
    once = {name: gradient.clone() for name, gradient in once.items()}
    step(model, velocity, inputs)
    target = inputs(velocity)
    (target - target.detach() - 1).square().mean().backward()
    changed = {name: parameter.grad - once[name] for name, parameter in trained(model).items()}
    for parameter in trained(model).values():
        parameter.grad = None
    target = inputs(velocity)
    (target - target.detach() - 1).square().mean().backward()
    assert largest_error(changed, {name: p.grad for name, p in trained(model).items()}) < 1e-4


def kept_bytes(targets: str = LINEARS, **way: Any) -> int:
    """What lives on between the passes, in bytes, without parameters."""
    model, inputs = adapted(vectors_model("dit_t2v21"), targets=targets), inputs_of("dit_t2v21")
    velocity = fast(model, **way)
    step(model, velocity, inputs)  # after which the weights stay where they are
    with Live([*model.parameters()]) as live:
        output = inputs(velocity).sum()
    assert output.requires_grad
    return live.now


def test_less_is_kept_the_more_is_recomputed():
    none, full = kept_bytes(), kept_bytes(checkpointing="full")
    assert 5 * full < none
    assert full < kept_bytes(checkpointing="full", free_blocks=1) < none
    for targets in (LINEARS, r".*attn1\.to_(q|k|v)"):
        assert kept_bytes(targets) < 1.05 * kept_bytes(targets, tricks=Tricks(by_hand=False))
    assert full == kept_bytes(checkpointing="full", tricks=Tricks(by_hand=False))


@pytest.mark.parametrize("by_hand", [True, False])
def test_no_frozen_weight_of_a_block_is_held_for_the_backward_pass(by_hand: bool, monkeypatch: pytest.MonkeyPatch):
    model, inputs = adapted(vectors_model("dit_t2v21")), inputs_of("dit_t2v21")
    velocity = fast(model, tricks=Tricks(by_hand=by_hand))
    step(model, velocity, inputs)  # after which the weights stay where they are
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: list[torch.Tensor] = []
    beside: list[Kept] = []
    forward = BlockByHand.forward

    def noted(block: BlockByHand, hidden: torch.Tensor, kept: Kept, **more: Any) -> torch.Tensor:
        beside.append(kept)
        return forward(block, hidden, kept, **more)

    monkeypatch.setattr(BlockByHand, "forward", noted)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        output = inputs(velocity).sum()
    by_block = [(kept.own, kept.pieces, [vars(look) for look in kept.looks]) for kept in beside]
    held = [one for one in [*saved, *tree_leaves(by_block)] if isinstance(one, torch.Tensor)]
    assert output.requires_grad
    assert bool(beside) == by_hand
    assert len(held) > 10 * len(model.blocks)
    found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
    blocks = sum(p.numel() * 4 for p in model.blocks.parameters() if p.ndim == 2)
    assert sum(size for place, size in found.items() if place in own) < 0.1 * blocks


def test_offloaded_inputs_are_not_held_on_the_device(monkeypatch: pytest.MonkeyPatch):
    """Each block's input goes to the host once and comes back once, the one before it at the same time."""
    sent, brought, lives = [], [], []
    copies = HostCopies(torch.device("cpu"))
    send, bring = copies.send, copies.bring

    def alive(storages: list[StorageWeakRef]) -> int:
        return sum(not storage.expired() for storage in storages)

    def noted_send(tensors: Sequence[torch.Tensor]) -> HostCopy:
        sent.append(StorageWeakRef(tensors[0].untyped_storage()))
        return send(tensors)

    def noted_bring(held: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        tensors, end = bring(held)
        brought.append(StorageWeakRef(tensors[0].untyped_storage()))
        lives.append(alive(sent) + alive(brought))
        return tensors, end

    monkeypatch.setattr(copies, "send", noted_send)
    monkeypatch.setattr(copies, "bring", noted_bring)
    monkeypatch.setattr(dit_checkpoint, "host_copies", lambda _: copies)
    model = vectors_model("dit_t2v21")
    for _ in range(3):
        model.blocks.extend(vectors_model("dit_t2v21").blocks)
    model, inputs = adapted(model), inputs_of("dit_t2v21")
    step(model, fast(model, checkpointing="full", offload=True), inputs)
    assert len(sent) == len(brought) == len(model.blocks) > 6
    assert max(lives) <= 2, "no input stays in the forward pass; in the backward pass one is used and one on its way"
    assert alive(sent) + alive(brought) == 0


class RecordedSwap:
    """Stands in for a block swap: the weights of its blocks are empty but between `enter` and `leave`."""

    def __init__(self, model: torch.nn.Module, swapped: Collection[int]) -> None:
        self.swapped = swapped
        self.calls: list[tuple[str, int, bool]] = []
        self._frozen = {i: [p for p in model.blocks[i].parameters() if not p.requires_grad] for i in swapped}
        self._values = {index: [p.data.clone() for p in frozen] for index, frozen in self._frozen.items()}
        for index in swapped:
            self._empty(index)

    def enter(self, index: int, *, backward: bool) -> None:
        self.calls.append(("enter", index, backward))
        for parameter, value in zip(self._frozen[index], self._values[index], strict=True):
            parameter.data = value.clone()  # elsewhere than the last time

    def leave(self, index: int, *, backward: bool) -> None:
        self.calls.append(("leave", index, backward))
        self._empty(index)

    def _empty(self, index: int) -> None:
        for parameter in self._frozen[index]:
            parameter.data.fill_(float("nan"))  # for whoever still looks there
            parameter.data = torch.empty(0, dtype=parameter.dtype)


@pytest.mark.parametrize("swapped", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("way", [{}, {"checkpointing": "selective"}, {"checkpointing": "full", "offload": True}],
                         ids=lambda way: "-".join(map(str, way.values())))  # fmt: skip
def test_swapped_blocks_are_asked_for_in_time_and_let_go(swapped: tuple[int, ...], way: dict[str, Any]):
    model, inputs = adapted(vectors_model("dit_i2v21")), inputs_of("dit_i2v21")
    wanted = step(model, fast(model, **way), inputs)
    swap = RecordedSwap(model, swapped)
    velocity = fast(model, swap, **way)
    for _ in range(2):
        swap.calls.clear()
        largest = largest_error(step(model, velocity, inputs)[1], wanted[1])
        forward = [call for index in swapped for call in (("enter", index, False), ("leave", index, False))]
        backward = [call for index in reversed(swapped) for call in (("enter", index, True), ("leave", index, True))]
        assert swap.calls == forward + backward
        assert largest < 1e-5  # not bit by bit: three products in place of one
    swap.calls.clear()
    with torch.no_grad():
        assert max_abs(inputs(velocity), wanted[0]) < 1e-5
    assert swap.calls == forward


@pytest.mark.parametrize("targets", [r".*attn1\.to_v", r".*ffn\.net\.2"])
def test_a_swapped_block_that_ends_with_frozen_layers_is_there_for_their_backward_pass(targets: str):
    """They keep nothing, so their weights are needed before anything asks for the recomputation."""
    model, inputs = adapted(vectors_model("dit_t2v21"), targets=targets), inputs_of("dit_t2v21")
    wanted = step(model, fast(model), inputs)
    velocity = fast(model, RecordedSwap(model, (0, 1)))
    assert largest_error(step(model, velocity, inputs)[1], wanted[1]) < 1e-5


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("form", [None, "int8"])
def test_the_real_block_swap_changes_no_bit(checkpointing: str, form: str | None):
    """Against three products without a swap, which is what swapped blocks do."""
    models = []
    for _ in range(2):
        model = vectors_model("dit_t2v21")
        if form:
            quantize_blocks(model, form)
        models.append(adapted(model))
    inputs, alone = inputs_of("dit_t2v21", batch=2), Tricks(grouped=False)
    wanted = step(models[0], fast(models[0], tricks=alone), inputs)
    swap = BlockSwap(models[1], 2, torch.device("cpu"), ring=1)
    velocity = fast(models[1], swap, checkpointing=checkpointing, tricks=alone)
    for _ in range(2):
        assert same(step(models[1], velocity, inputs), wanted)


@pytest.mark.parametrize("form", ["fp8", "int8", "nf4"])
def test_a_quantised_base_trains_as_its_dequantised_self_does(form: str):
    model, inputs = vectors_model("dit_i2v21"), inputs_of("dit_i2v21")
    quantize_blocks(model, form)
    wanted = {name: layer.dequantized(torch.float32) for name, layer in model.named_modules()
              if isinstance(layer, QuantLinear)}  # fmt: skip
    unpacked = adapted(vectors_model("dit_i2v21"))
    for name, weight in wanted.items():
        layer = unpacked.get_submodule(name)
        layer.base_layer.weight.data.copy_(weight)
    quantised = adapted(model)
    found = step(quantised, fast(quantised, checkpointing="full"), inputs)
    meant = step(unpacked, plain(unpacked), inputs)
    assert len(wanted) == 24
    assert max_abs(found[0], meant[0]) < 2e-5
    assert largest_error(found[1], meant[1]) < 5e-5
