"""Adapters in the fast transformer: of every kind, on any layers, merged or off, they train as with peft alone.

The oracle of gradients is diffusers' own forward in float64, or with peft's own modules: see `test_fast_dit.py`.
"""

import warnings
from functools import partial

import pytest
import torch
from fast_dit import (
    CONFIGS,
    CPU,
    adapted,
    exact,
    fast,
    inputs_of,
    largest_error,
    noisy,
    plain,
    small,
    step,
    trained,
    vectors_model,
)
from helpers import every
from parity import max_abs, rel_rms
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch.multiprocessing.reductions import StorageWeakRef

from wangen.runtime.fast import products
from wangen.runtime.memory.swap import BlockSwap


@pytest.mark.parametrize("name", every(3, ["dit_i2v21", "dit_t2v21", "dit_ti2v5b"], pytest.mark.slow))
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_of_adapter_gives_the_plain_gradients(name: str, kind: str):
    model, inputs = adapted(vectors_model(name), kind), inputs_of(name)
    if kind == "dropout":  # which numbers drop out depends on the order of the modules, which is the same
        torch.manual_seed(0)
        output, gradients = step(model, fast(model), inputs)
        torch.manual_seed(0)
        wanted_output, wanted = step(model, plain(model), inputs)
    else:
        output, gradients = step(model, fast(model), inputs)
        wanted_output, wanted = exact(model, inputs)
    assert max_abs(output, wanted_output) < 2e-5
    assert largest_error(gradients, wanted) < 5e-5


@pytest.mark.parametrize(
    "targets",
    [
        r".*attn1\.to_v",
        r".*attn2\.to_(k|v)",
        r".*blocks\.1\.ffn\.net\.2",
        r".*blocks\.1\..*to_q",
        r".*blocks\.0\..*to_q",
    ],
)
@pytest.mark.parametrize("checkpointing", every(2, ["selective", "none"], pytest.mark.slow))
def test_adapters_on_some_layers_only(targets: str, checkpointing: str):
    model, inputs = adapted(vectors_model("dit_t2v21"), targets=targets), inputs_of("dit_t2v21")
    _, gradients = step(model, fast(model, checkpointing=checkpointing), inputs)
    assert largest_error(gradients, exact(model, inputs)[1]) < 1e-5


def test_ranks_and_scales_of_neighbours_may_differ():

    model, inputs = vectors_model("dit_t2v21"), inputs_of("dit_t2v21")
    config = LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "ffn.net.2"], init_lora_weights=False,
                        rank_pattern={"to_q": 2}, alpha_pattern={"to_k": 1})  # fmt: skip
    model.add_adapter(config)
    _, gradients = step(model, fast(model), inputs)
    assert largest_error(gradients, exact(model, inputs)[1]) < 1e-5


def test_what_is_trained_beside_adapters_gets_its_gradients_too():
    """Full fine-tuning: every weight, also those before the blocks."""
    model, inputs = vectors_model("dit_i2v21").requires_grad_(True), inputs_of("dit_i2v21", batch=2)
    model.requires_grad_(True)
    _, gradients = step(model, fast(model, checkpointing="full"), inputs)
    _, wanted = exact(model, inputs)
    # Without a bias on its neighbours a key's bias changes no softmax: its gradient is zero but for rounding.
    kept = [name for name in wanted if not name.endswith("to_k.bias") and "add_k_proj.bias" not in name]
    assert largest_error({n: gradients[n] for n in kept}, {n: wanted[n] for n in kept}) < 5e-5


def test_adapters_that_are_switched_off_or_merged_count_so_at_once():
    model, inputs = adapted(vectors_model("dit_t2v21")), inputs_of("dit_t2v21")
    velocity = fast(model)
    with torch.no_grad():
        on, base = inputs(velocity), inputs(fast(vectors_model("dit_t2v21")))
        model.disable_adapters()
        off = inputs(velocity)
        model.enable_adapters()
        for module in model.modules():
            if hasattr(module, "merge"):
                module.merge()
        merged = inputs(velocity)
    assert max_abs(on, base) > 1e-2
    assert torch.equal(off, base)
    assert max_abs(merged, on) < 2e-5


def test_two_active_adapters_add_up():
    model, inputs = adapted(vectors_model("dit_t2v21")), inputs_of("dit_t2v21")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of a second adapter
        model.add_adapter(CONFIGS["lora"](r".*to_q"), adapter_name="second")
    for name, parameter in model.named_parameters():
        if "second" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.set_adapter(["default", "second"])
    output, gradients = step(model, fast(model), inputs)
    wanted_output, wanted = exact(model, inputs)
    assert max_abs(output, wanted_output) < 1e-5
    assert largest_error(gradients, wanted) < 1e-5


def test_adapters_in_one_flat_buffer_are_cast_as_if_each_had_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "is_fast_in_bfloat16", lambda: True)
    model, inputs = adapted(vectors_model("dit_t2v21", torch.bfloat16)), inputs_of("dit_t2v21")
    _, wanted = step(model, fast(model), inputs)
    flat = torch.cat([parameter.detach().flatten() for parameter in trained(model).values()])
    for parameter, part in zip(trained(model).values(), flat.split([p.numel() for p in trained(model).values()]),
                               strict=True):  # fmt: skip
        parameter.data = part.view(parameter.shape)
    _, gradients = step(model, fast(model), inputs)
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("outer", ["time_proj", r"text_embedder\.linear_2", r"(time_proj|text_embedder\.linear_2)"])
def test_swapped_blocks_pass_gradients_on_to_adapters_of_text_and_time(outer: str):
    model = adapted(small(4), targets=rf"(condition_embedder\.{outer}|blocks\.3\.ffn\.net\.2)")
    inputs = noisy(2, 1, 8, 8)
    wanted = exact(model, inputs)[1]
    _, gradients = step(model, fast(model, BlockSwap(model, 3, CPU), checkpointing="full"), inputs)
    assert len(wanted) >= 4
    assert largest_error(gradients, wanted) < 1e-5


def test_frozen_halves_of_adapters_come_with_their_swapped_blocks():
    """As in LoRA-FA, or a second adapter that is not trained: what is frozen waits in host memory with the base."""
    model, inputs = adapted(small(2)), noisy(2, 1, 8, 8)
    for name, parameter in trained(model).items():
        parameter.requires_grad_("lora_A" not in name)
    wanted = exact(model, inputs)[1]
    _, gradients = step(model, fast(model, BlockSwap(model, 2, CPU), checkpointing="full"), inputs)
    assert len(wanted) == 20
    assert largest_error(gradients, wanted) < 1e-5


def test_dropout_in_the_projection_of_the_text_drops_of_each_row_by_itself():
    model, inputs = adapted(small(1), "dropout", targets=r".*text_embedder\.linear_2"), noisy(1, 1, 8, 8)
    torch.manual_seed(0)
    output, gradients = step(model, fast(model), inputs)
    torch.manual_seed(0)
    wanted_output, wanted = step(model, plain(model), inputs)
    assert max_abs(output, wanted_output) < 1e-5
    assert largest_error(gradients, wanted) < 1e-5


def test_dropout_that_begins_between_steps_is_seen():
    model, inputs = adapted(vectors_model("dit_t2v21"), "dropout"), inputs_of("dit_t2v21")
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.p]

    def output(velocity) -> torch.Tensor:
        torch.manual_seed(0)
        return inputs(velocity)

    for layer in layers:
        layer.p = 0.0
    velocity = fast(model)
    with torch.no_grad():
        whole = output(velocity)
        for layer in layers:
            layer.p = 0.5
        dropped, anew = output(velocity), output(fast(model))
    assert torch.equal(dropped, anew)
    assert max_abs(dropped, whole) > 1e-3


def test_an_adapter_of_the_times_takes_a_base_in_bfloat16():
    model, inputs = adapted(small(1, torch.bfloat16), targets=r".*time_proj"), noisy(1, 1, 8, 8)
    output, gradients = step(model, fast(model), inputs)
    wanted_output, wanted = exact(model, inputs)
    assert rel_rms(output, wanted_output) < 0.02
    assert largest_error(gradients, wanted) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_changes_of_a_layer_between_steps_is_seen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Switched off and on, scaled otherwise, trained on, and frozen weights that lie elsewhere: as at a first look."""
    monkeypatch.setattr(products, "is_fast_in_bfloat16", lambda: True)
    model, inputs = adapted(vectors_model("dit_t2v21", dtype)), inputs_of("dit_t2v21")
    velocity = fast(model)
    step(model, velocity, inputs)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]

    def switch(*, enabled: bool) -> None:
        for layer in layers:
            layer.enable_adapters(enabled=enabled)

    def scale() -> None:
        for layer in layers:
            layer.set_scale("default", 3.0)

    def train() -> None:
        for parameter in trained(model).values():
            parameter.data.add_(0.01)

    def move() -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    before = StorageWeakRef(model.blocks[0].attn1.to_q.base_layer.weight.untyped_storage())
    for change in (partial(switch, enabled=False), partial(switch, enabled=True), scale, train, move):
        change()
        with torch.no_grad():
            assert torch.equal(inputs(velocity), inputs(fast(model)))
    assert before.expired(), "weights that are parked elsewhere do not stay on the device"
