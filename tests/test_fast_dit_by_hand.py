"""Blocks of Wan as one function of autograd, and products by oneDNN: the numbers are those of the other ways."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from fast_dit import (
    LINEARS,
    adapted,
    exact,
    exact_of_two,
    fast,
    inputs_of,
    largest_error,
    plain,
    same,
    step,
    vectors_model,
)
from helpers import every
from parity import DITS, max_abs, rel_rms
from torch.utils._python_dispatch import TorchDispatchMode

from wangen.runtime.fast import dit, products
from wangen.runtime.fast.dit_by_hand import BlockByHand
from wangen.runtime.fast.dit_token_wise import TokenWise
from wangen.runtime.memory.swap import BlockSwap
from wangen.runtime.models.compute import Tricks
from wangen.runtime.models.inputs import Inputs


def count_calls(patch: pytest.MonkeyPatch, owner: type, *names: str) -> dict[str, int]:
    """How often each of a class's methods is called from now on."""
    calls = dict.fromkeys(names, 0)

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            calls[name] += 1
            return method(*given, **more)

        return call

    for name in names:
        patch.setattr(owner, name, counted(name, getattr(owner, name)))
    return calls


@functools.cache
def adapted_to(name: str, dtype: torch.dtype, targets: str = LINEARS) -> WanTransformer3DModel:
    """One model for many tests: steps may be taken on it, and nothing be changed."""
    return adapted(vectors_model(name, dtype), targets=targets)


@functools.cache
def step_of(
    name: str, dtype: torch.dtype, batch: int, tricks: Tricks, targets: str = LINEARS
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    model = adapted_to(name, dtype, targets)
    return step(model, fast(model, tricks=tricks), inputs_of(name, batch=batch))


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize(("batch", "targets"), [(2, None), (1, r".*(attn1\.to_v|attn2\.to_k|ffn\.net\.0\.proj)")])
@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in DITS), ("dit_i2v21", torch.bfloat16)])
def test_a_block_by_hand_is_the_same_as_its_pieces(
    name: str, dtype: torch.dtype, targets: str | None, batch: int, checkpointing: str, monkeypatch: pytest.MonkeyPatch
):
    """With adapters on all layers, and on some; with one run of tokens that share a timestep, and with several."""
    model, inputs = adapted_to(name, dtype, targets or LINEARS), inputs_of(name, batch=batch)
    wanted_output, wanted = step_of(name, dtype, batch, Tricks(by_hand=False), targets or LINEARS)
    calls = count_calls(monkeypatch, BlockByHand, "forward", "recomputed_back")
    output, gradients = step(model, fast(model, checkpointing=checkpointing), inputs)
    assert calls == {"forward": len(model.blocks), "recomputed_back": (checkpointing != "none") * len(model.blocks)}
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    assert rel_rms(output, wanted_output) < bound
    assert largest_error(gradients, wanted) < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*every(2, [(name, torch.float32) for name in DITS], pytest.mark.slow), ("dit_i2v21", torch.bfloat16)],
)
def test_tokens_in_pieces_are_the_same_as_all_at_once(
    name: str, dtype: torch.dtype, batch: int, count: int, monkeypatch: pytest.MonkeyPatch
):
    """Pieces of whole items and of parts of one, of one run of tokens that share a timestep and of several."""
    inputs = inputs_of(name, batch=batch)

    def found(**ways: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        if not ways.pop("swapped", False):
            return step(whole, fast(whole, **ways), inputs)
        model = adapted(vectors_model(name, dtype))
        return step(model, fast(model, BlockSwap(model, len(model.blocks), torch.device("cpu")), **ways), inputs)

    whole, (wanted_output, wanted) = adapted_to(name, dtype), step_of(name, dtype, batch, Tricks(pieces=False))
    monkeypatch.setattr(dit, "num_token_pieces", lambda *_: count)
    calls = count_calls(monkeypatch, TokenWise, "back")
    output, gradients = found()
    assert calls["back"] >= 2 * min(count, batch)
    assert rel_rms(output, wanted_output) < (1e-6 if dtype == torch.float32 else 1e-2)
    assert largest_error(gradients, wanted) < (1e-5 if dtype == torch.float32 else 0.05)
    for ways in ({"checkpointing": "full", "swapped": True}, {"checkpointing": "selective", "offload": True}):
        assert same(found(**ways), (output, gradients)), "the same bytes however blocks are recomputed"
    with torch.no_grad():
        assert torch.equal(inputs(fast(whole)), output)


def test_pieces_that_no_gradient_reaches_keep_nothing(monkeypatch: pytest.MonkeyPatch):
    """With an adapter in the last block's feed forward alone."""
    monkeypatch.setattr(dit, "num_token_pieces", lambda *_: 3)
    inputs, last = inputs_of("dit_t2v21"), r".*blocks\.1\.ffn\.net\.2"
    model = adapted(vectors_model("dit_t2v21"), targets=last)
    wanted_output, wanted = step(model, fast(model, tricks=Tricks(by_hand=False)), inputs)
    for checkpointing in ("none", "full"):
        monkeypatch.setattr(TokenWise, "_look_back", lambda *_: pytest.fail("nothing is trained there"))
        output, gradients = step(model, fast(model, checkpointing=checkpointing), inputs)
        assert rel_rms(output, wanted_output) < 1e-6
        assert largest_error(gradients, wanted) < 1e-5


@pytest.mark.parametrize("layer", ["attn1.to_out.0", "attn2.to_out.0", "attn2.to_v"])
def test_an_adapter_on_one_layer_of_the_first_block_gets_its_gradient(layer: str):
    """Nothing before it has one: what it needs is kept for it alone."""
    inputs, model = inputs_of("dit_t2v21"), adapted(vectors_model("dit_t2v21"), targets=rf".*blocks\.0\.{layer}")
    _, wanted = step(model, fast(model, tricks=Tricks(by_hand=False)), inputs)
    for checkpointing in ("none", "full"):
        _, gradients = step(model, fast(model, checkpointing=checkpointing), inputs)
        assert largest_error(gradients, wanted) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_adds_its_gradients_as_autograd_would(dtype: torch.dtype):
    """Over two passes, and none to an adapter that is not trained."""

    def added(**ways: Any) -> dict[str, torch.Tensor]:
        model = adapted(vectors_model("dit_t2v21", dtype))
        adapters = {name: one for name, one in model.named_parameters() if "lora" in name}
        frozen = [name for name in adapters if "blocks.1.attn2.to_q" in name]
        for name in frozen:
            adapters[name].requires_grad_(False)
        velocity = fast(model, **ways)
        for case in (0, 1):
            inputs_of("dit_t2v21", case)(velocity).float().square().mean().backward()
        assert frozen
        assert all(adapters[name].grad is None for name in frozen)
        assert all(one.grad.is_contiguous() for one in adapters.values() if one.grad is not None)
        return {name: one.grad for name, one in adapters.items() if one.grad is not None}

    found, wanted = added(), added(tricks=Tricks(by_hand=False))
    assert largest_error(found, wanted) < (1e-5 if dtype == torch.float32 else 0.05)
    recomputed = added(checkpointing="full")
    assert all(torch.equal(recomputed[name], found[name]) for name in found)


class Casts(TorchDispatchMode):
    """Notes the shapes of tensors that are copied to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation is torch.ops.aten._to_copy.default and result.dtype == torch.float32:
            self.shapes.add(result.shape)
        return result


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_no_gradient_of_an_adapter_is_copied(checkpointing: str, monkeypatch: pytest.MonkeyPatch):
    """Products in bfloat16 add theirs to those in float32: on a GPU small pictures wait for every copy."""
    monkeypatch.setattr(products, "is_fast_in_bfloat16", lambda: True)
    model, inputs = adapted(vectors_model("dit_t2v21", torch.bfloat16)), inputs_of("dit_t2v21")
    adapters = [one for name, one in model.named_parameters() if "lora" in name]
    found = []
    for velocity in (fast(model, checkpointing=checkpointing), plain(model)):
        with Casts() as casts, torch.autocast("cpu", torch.bfloat16, enabled=len(found) == 1):
            step(model, velocity, inputs)
        found.append({tuple(one.shape) for one in adapters} & {tuple(shape) for shape in casts.shapes})
    assert found[0] == set() != found[1]


@pytest.fixture
def wide_products() -> Iterator[list[torch.Size]]:
    """CUDA's product that adds itself to a total of a wider dtype, which the CPU lacks, stood in for by three
    operations; the shapes of all totals."""
    shapes = []

    def add(
        own: torch.Tensor, left: torch.Tensor, right: torch.Tensor, _dtype: torch.dtype, *, beta: Any = 1,
        alpha: Any = 1, out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        assert own is out
        shapes.append(own.shape)
        return own.mul_(beta).add_(left.float() @ right.float(), alpha=alpha)

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", add, "CPU")
    yield shapes
    library._destroy()


def test_products_add_themselves_to_gradients_in_float32(
    wide_products: list[torch.Size], monkeypatch: pytest.MonkeyPatch
):
    """Where the GPU's product can; of layers alone, both of the adapter's gradients, else those of the second half."""
    monkeypatch.setattr(products, "is_fast_in_bfloat16", lambda: True)
    model, inputs = adapted(vectors_model("dit_t2v21", torch.bfloat16)), inputs_of("dit_t2v21")
    _, before = step(model, fast(model), inputs)
    assert not wide_products
    monkeypatch.setattr(products, "adds_wider", lambda *_: True)
    _, after = step(model, fast(model), inputs)
    grouped = {"attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_k", "attn2.to_v"}
    alone = [name for name in after if "lora_B" in name or not any(layer in name for layer in grouped)]
    assert len(wide_products) == len(alone) < len(after)
    assert all(one.dtype == torch.float32 for one in after.values())
    _, wanted = exact(model, inputs)
    assert largest_error(after, wanted) <= largest_error(before, wanted) < 0.05


def test_only_a_right_product_adds_itself(wide_products: list[torch.Size], monkeypatch: pytest.MonkeyPatch):
    """As PyTorch 2.8 does not: it refuses, or gives what was never written."""
    bfloat16, cpu = torch.bfloat16, torch.device("cpu")
    assert not products.adds_wider(cpu, bfloat16)
    assert not products.adds_wider(torch.device("cuda"), torch.float32)
    assert not wide_products, "neither was tried"
    assert products.is_sum_of_product(cpu, bfloat16)
    assert len(wide_products) == 2
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *given, out, **more: addmm(*given, out=out, **more).mul_(1.5))
    assert not products.is_sum_of_product(cpu, bfloat16)


def test_without_the_product_that_adds_itself_it_is_not_asked():
    """As on every CPU."""
    assert not products.is_sum_of_product(torch.device("cpu"), torch.bfloat16)


def test_what_a_block_by_hand_cannot_do_its_pieces_do(monkeypatch: pytest.MonkeyPatch):
    """Adapters of other kinds, weights that are trained, and items of different sizes in one pass."""
    monkeypatch.setattr(BlockByHand, "forward", lambda *_, **__: pytest.fail("is not for this"))
    inputs = inputs_of("dit_t2v21")
    for kind in ("dora", "lokr", "loha", "dropout"):
        model = adapted(vectors_model("dit_t2v21"), kind)
        step(model, fast(model), inputs)
    model = adapted(vectors_model("dit_t2v21"))
    model.blocks[0].attn1.norm_q.weight.requires_grad_()
    model.blocks[1].scale_shift_table.requires_grad_()
    step(model, fast(model), inputs)
    velocity = fast(adapted(vectors_model("dit_t2v21")))
    shapes = (1, 16, 1, 8, 4), (1, 16, 1, 6, 6)
    passes = [Inputs(torch.ones(shape), torch.tensor([500.0]), list(inputs.texts[:1])) for shape in shapes]
    assert [tuple(output.shape) for output in velocity.packed(passes)] == list(shapes)


def test_without_an_image_its_layers_get_no_gradient():
    model, inputs = adapted(vectors_model("dit_i2v21")), replace(inputs_of("dit_i2v21"), image_tokens=None)
    wanted_output, wanted = step(model, fast(model, tricks=Tricks(by_hand=False)), inputs)
    output, gradients = step(model, fast(model), inputs)
    assert rel_rms(output, wanted_output) < 1e-6
    trained = [{name: one for name, one in each.items() if one is not None} for each in (gradients, wanted)]
    assert trained[0].keys() == trained[1].keys() < gradients.keys()
    assert largest_error(*trained) < 1e-5


@pytest.mark.parametrize("name", DITS)
def test_products_of_onednn_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    model, inputs = adapted(vectors_model(name)), inputs_of(name, batch=2)
    wanted_output, wanted = exact_of_two(name)
    monkeypatch.setattr(products, "has_faster_onednn", lambda: True)
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    for checkpointing in ("none", "full"):
        output, gradients = step(model, fast(model, checkpointing=checkpointing), inputs)
        assert max_abs(output, wanted_output) < 1e-5
        assert largest_error(gradients, wanted) < 1e-5


@pytest.mark.parametrize("by_hand", [True, False])
def test_products_of_onednn_are_the_same_bits_in_swapped_blocks(by_hand: bool, monkeypatch: pytest.MonkeyPatch):
    """Where the weights of layers that share an input do not lie together; some products are large enough, some not."""
    monkeypatch.setattr(products, "has_faster_onednn", lambda: True)
    model, inputs = adapted(vectors_model("dit_t2v21")), inputs_of("dit_t2v21", batch=2)
    width = model.config.num_attention_heads * model.config.attention_head_dim
    num_tokens = 2 * inputs.latents[0, 0].numel() // 4
    for least in (0, 2 * num_tokens * width * width):
        monkeypatch.setattr(products, "LEAST_WORK", least)
        ways = {"tricks": Tricks(by_hand=by_hand), "checkpointing": "full"}
        wanted = step(model, fast(model, **ways), inputs)
        swapped = adapted(vectors_model("dit_t2v21"))
        swap = BlockSwap(swapped, len(swapped.blocks), torch.device("cpu"))
        assert same(step(swapped, fast(swapped, swap, **ways), inputs), wanted)
