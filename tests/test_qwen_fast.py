"""Qwen-Image's fast transformer: the library's velocities and gradients, and no other bit however memory is saved.

The oracle of gradients is diffusers' own forward in float64.
"""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_cases import Calls
from fast_dit import CONFIGS, WAYS, adapted, largest_error, same, step
from parity import max_abs, rel_rms
from tiny_qwen import TEXT_DIM, make_transformer
from torch import Tensor

from wangen.runtime.fast import dit_elementwise
from wangen.runtime.fast.attention import choose_kernel
from wangen.runtime.memory.quantize import QuantLinear, quantize_blocks
from wangen.runtime.memory.swap import BlockSwap
from wangen.runtime.models import inputs as inputs_module
from wangen.runtime.models.compute import Compute, Tricks
from wangen.runtime.models.plain import PlainModel
from wangen.runtime.models.qwen_image_edit.fast import FastQwen
from wangen.runtime.models.qwen_image_edit.transformer import predict_velocity
from wangen.runtime.training.full import trainable_parameters

CPU = torch.device("cpu")
LINEARS = (
    r".*transformer_blocks\.\d+\.(attn\.(to_(q|k|v|out\.0|add_out)|add_(q|k|v)_proj)|(img|txt)_mlp\.net\.(0\.proj|2))"
)
BEFORE = r".*(img_in|txt_in|time_text_embed\.timestep_embedder\.linear_1|attn\.to_q)"
NUMBERS = r".*((img|txt)_mod\.1|norm_out\.linear|proj_out)"
CASES = {
    "text": [((4, 6), (), 5)],
    "one": [((4, 6), ((4, 6),), 5)],
    "several": [((4, 6), ((6, 4), (2, 2)), 7)],
    "alike": [((4, 6), ((4, 6),), 5), ((4, 6), ((4, 6),), 5)],
    "mixed": [((4, 6), ((6, 4), (2, 2)), 7), ((4, 6), (), 3), ((4, 6), ((4, 6),), 7)],
}
"""Of each item the latents of its target, those of its control images, and the rows of its text."""


@dataclass(frozen=True)
class Inputs:
    latents: Tensor
    timesteps: Tensor
    texts: Sequence[Tensor]
    controls: Any

    def __call__(self, velocity: Any) -> Tensor:
        return velocity(self.latents, self.timesteps, self.texts, controls=self.controls)


def inputs_of(case: str, dtype: torch.dtype = torch.float32) -> Inputs:
    items, draw = CASES[case], torch.Generator().manual_seed(len(case))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    return Inputs(
        torch.cat([normal(1, 16, 1, *target) for target, _, _ in items]),
        torch.linspace(7, 3, len(items)).to(dtype),
        [normal(rows, TEXT_DIM) for _, _, rows in items],
        [[normal(16, 1, *size) for size in controls] for _, controls, _ in items],
    )


def model_with(kind: str = "lora", *, targets: str = LINEARS, clean: bool = False, dtype: torch.dtype = torch.float32):
    return adapted(make_transformer(zero_cond_t=clean).to(dtype), kind, targets=targets)


def fast(model: Any, swap: Any = None, dtype: torch.dtype | None = None, **changes: Any) -> FastQwen:
    """The fast way, without checkpointing unless it is asked for."""
    compute = Compute(**{"checkpointing": "none", **changes})
    return FastQwen(model, compute, choose_kernel("sdpa", CPU, dtype or model.img_in.weight.dtype), swap, dtype)


def plain(model: Any) -> Any:
    return lambda *args, **named: predict_velocity(model, *args, **named)


def exact(model: Any, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """`step` of diffusers' own forward in float64 throughout."""
    model = copy.deepcopy(model).double()
    wide = replace(
        inputs,
        latents=inputs.latents.double(),
        timesteps=inputs.timesteps.double(),
        texts=[text.double() for text in inputs.texts],
        controls=[[control.double() for control in own] for own in inputs.controls],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        output, gradients = step(model, plain(model), wide)
    assert output.dtype == torch.float64
    return output, gradients


def told(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without those of the last block's text stream: nothing looks at what it makes, so that they are none or zero."""
    last = (
        "transformer_blocks.1.attn.to_add_out",
        "transformer_blocks.1.txt_mlp",
        "transformer_blocks.1.attn.add_q",
        "transformer_blocks.1.attn.norm_added_q",
    )
    unseen = {name for name in gradients if name.startswith(last)}
    assert all(gradients[name] is None or not gradients[name].any() for name in unseen)
    return {name: gradient for name, gradient in gradients.items() if name not in unseen}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("clean", [False, True])
def test_velocities_and_gradients_are_exact(case: str, clean: bool):
    model, inputs = model_with(clean=clean), inputs_of(case)
    output, gradients = step(model, fast(model), inputs)
    wanted_output, wanted = exact(model, inputs)
    assert max_abs(output, wanted_output) < 1e-5
    assert largest_error(told(gradients), told(wanted)) < 1e-5


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_of_adapter_gives_the_plain_gradients(kind: str):
    model, inputs = model_with(kind), inputs_of("mixed" if kind != "dropout" else "one")
    steps = []
    for velocity in (fast(model), plain(model)):
        torch.manual_seed(0)  # with dropout: the same numbers drop out
        steps.append(step(model, velocity, inputs))
    (output, gradients), (wanted_output, wanted) = steps
    assert max_abs(output, wanted_output) < 2e-5
    assert largest_error(told(gradients), told(wanted)) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("trick", [field.name for field in dataclasses.fields(Tricks)])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_each_trick_can_be_left_alone(trick: str, checkpointing: str):
    model, inputs = model_with(clean=True), inputs_of("mixed")
    tricks = replace(Tricks(), **{trick: False})
    output, gradients = step(model, fast(model, tricks=tricks, checkpointing=checkpointing), inputs)
    wanted_output, wanted = exact(model, inputs)
    assert max_abs(output, wanted_output) < 1e-5
    assert largest_error(told(gradients), told(wanted)) < 1e-5


@pytest.mark.parametrize("targets", [BEFORE, NUMBERS])
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_adapters_outside_the_blocks_and_on_the_modulation(targets: str, checkpointing: str):
    model, inputs = model_with(targets=targets, clean=True), inputs_of("mixed")
    _, gradients = step(model, fast(model, checkpointing=checkpointing), inputs)
    _, wanted = exact(model, inputs)
    assert largest_error(told(gradients), told(wanted)) < 1e-5


def test_what_is_trained_as_a_whole_gets_its_gradients():
    model, inputs = make_transformer(zero_cond_t=True).requires_grad_(True), inputs_of("mixed")
    _, gradients = step(model, fast(model, checkpointing="full"), inputs)
    _, wanted = exact(model, inputs)
    # A bias that all keys of an item share changes no softmax: its gradient is zero but for rounding.
    kept = [name for name in told(wanted) if "add_k_proj.bias" not in name and "to_k.bias" not in name]
    assert largest_error({n: gradients[n] for n in kept}, {n: wanted[n] for n in kept}) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
@pytest.mark.parametrize(("case", "dtype"), [("alike", torch.float32), ("mixed", torch.bfloat16)])
@pytest.mark.parametrize("targets", [LINEARS, BEFORE, NUMBERS])
def test_every_way_of_recomputing_gives_the_same_bits(way: dict[str, Any], case: str, dtype: torch.dtype, targets: str):
    model, inputs = model_with(dtype=dtype, targets=targets, clean=True), inputs_of(case, dtype)
    wanted = step(model, fast(model, split_attention="split_attention" in way), inputs)
    velocity = fast(model, **way)
    assert same(step(model, velocity, inputs), wanted)
    assert same(step(model, velocity, inputs), wanted), "the next step begins where this one did"


def test_selective_checkpointing_runs_attention_once():
    model, inputs = model_with(), inputs_of("mixed")
    calls = {}
    for way in ("full", "selective"):
        velocity = fast(model, checkpointing=way)
        with Calls() as seen:
            step(model, velocity, inputs)
        calls[way] = len(seen.items)
    assert calls == {"full": 2 * 2 * 3, "selective": 2 * 3}


@pytest.mark.parametrize("num_swapped", [1, 2])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[5]], ids=["full", "selective-offload"])
def test_swapped_blocks_give_the_same_bits_and_leave_nothing_behind(num_swapped: int, way: dict[str, Any]):
    model, inputs = model_with(clean=True), inputs_of("mixed")
    wanted = step(model, fast(model, **way), inputs)
    swap = BlockSwap(model, num_swapped, CPU)
    assert same(step(model, fast(model, swap, **way), inputs), wanted)
    layers = [model.transformer_blocks[index].img_mlp.net[2].base_layer for index in swap.swapped]
    assert [layer.weight.untyped_storage().nbytes() for layer in layers] == [0] * num_swapped


def test_a_quantised_base_gives_the_gradients_of_the_librarys_forward_on_it():
    model = make_transformer(zero_cond_t=True)
    assert quantize_blocks(model, "int8") == 2 * 14
    adapted(model, targets=LINEARS)
    inputs = inputs_of("mixed")
    assert any(isinstance(module, QuantLinear) for module in model.modules())
    output, gradients = step(model, fast(model, checkpointing="selective"), inputs)
    wanted_output, wanted = step(model, plain(model), inputs)
    assert max_abs(output, wanted_output) < 1e-5
    assert largest_error(told(gradients), told(wanted)) < 1e-5


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_batches_of_different_buckets_are_one_pass(checkpointing: str):
    """Of different sizes, texts and numbers of control images; a packed pass looks at each item alone."""
    model = model_with(clean=True)
    passes = [
        inputs_module.Inputs(one.latents, one.timesteps, list(one.texts), controls=one.controls)
        for one in (inputs_of("mixed"), replace(inputs_of("one"), latents=torch.randn(1, 16, 1, 6, 8)))
    ]
    velocity = fast(model, checkpointing=checkpointing)
    with torch.no_grad():
        alone = [velocity(one.latents, one.timesteps, one.texts, **one.given) for one in passes]
    with Calls() as seen:
        together = velocity.packed(passes)
    assert len(seen.items) == 2 * 4
    assert all(max_abs(one, other.detach()) < 1e-5 for one, other in zip(alone, together, strict=True))


def test_masters_in_float32_are_trained_in_bfloat16():
    model, inputs = make_transformer(), inputs_of("one", torch.bfloat16)
    masters = list(trainable_parameters(model).values())
    output, gradients = step(model, fast(model, dtype=torch.bfloat16), inputs)
    wanted_output, wanted = exact(model, inputs)
    assert all(master.dtype == torch.float32 for master in masters)
    assert max_abs(output, wanted_output) < 0.05
    assert all(gradient.dtype == torch.float32 for gradient in told(gradients).values())
    kept = [name for name in told(wanted) if "add_k_proj.bias" not in name and "to_k.bias" not in name]
    assert largest_error({n: gradients[n] for n in kept}, {n: wanted[n] for n in kept}) < 0.1


@pytest.mark.parametrize("clean", [False, True])
def test_plain_modules_in_bfloat16_are_given_the_timesteps_as_they_are(clean: bool):
    model, inputs = model_with(clean=clean), replace(inputs_of("several"), timesteps=torch.tensor([724.0]))
    velocity = PlainModel(model, predict_velocity, Compute(checkpointing="none"), torch.bfloat16, "sdpa")
    output, gradients = step(model, velocity, inputs)
    wanted_output, wanted = exact(model, inputs)
    assert rel_rms(output, wanted_output) < 0.01
    assert largest_error(told(gradients), told(wanted)) < 0.05
    assert not model.time_text_embed._forward_pre_hooks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own ways
def test_compiled_kernels_give_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dit_elementwise, "BACKEND", "aot_eager")
    dit_elementwise.compiled.cache_clear()
    model, inputs = model_with(clean=True), inputs_of("mixed")
    wanted_output, wanted = step(model, fast(model), inputs)
    try:
        output, gradients = step(model, fast(model, checkpointing="selective", compile=True), inputs)
    finally:
        dit_elementwise.compiled.cache_clear()
    assert max_abs(output, wanted_output) < 1e-5
    assert largest_error(told(gradients), told(wanted)) < 1e-5
