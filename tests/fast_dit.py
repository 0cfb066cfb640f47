"""Models with adapters whose second halves are not zero, and steps on the vectors by both ways of the transformer."""

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from parity import DITS, golden
from peft import LoHaConfig, LoKrConfig, LoraConfig
from torch import Tensor

from wangen.runtime.fast.attention import choose_kernel
from wangen.runtime.fast.dit import FastWan
from wangen.runtime.models.compute import Compute
from wangen.runtime.models.wan import predict_velocity
from wangen.runtime.randomness import generator_for
from wangen.runtime.weights.transformer import load_transformer

LINEARS = r".*blocks\.\d+\.(attn[12]\.to_(q|k|v|out\.0)|attn2\.add_(k|v)_proj|ffn\.net\.(0\.proj|2))"
CPU = torch.device("cpu")

WAYS = [
    {"checkpointing": "full"},
    {"checkpointing": "full", "free_blocks": 1},
    {"checkpointing": "full", "offload": True},
    {"checkpointing": "selective"},
    {"checkpointing": "selective", "free_blocks": 1},
    {"checkpointing": "selective", "offload": True},
    {"checkpointing": "selective", "split_attention": True},
]
"""Of recomputing, by the fields of `Compute`."""

CONFIGS: dict[str, Any] = {
    "lora": lambda targets: LoraConfig(r=4, lora_alpha=2, target_modules=targets),
    "rslora": lambda targets: LoraConfig(r=4, lora_alpha=2, target_modules=targets, use_rslora=True),
    "dora": lambda targets: LoraConfig(r=4, lora_alpha=2, target_modules=targets, use_dora=True),
    "dropout": lambda targets: LoraConfig(r=4, lora_alpha=2, target_modules=targets, lora_dropout=0.5),
    "bias": lambda targets: LoraConfig(r=4, lora_alpha=2, target_modules=targets, lora_bias=True),
    "lokr": lambda targets: LoKrConfig(r=4, alpha=2, target_modules=targets),
    "loha": lambda targets: LoHaConfig(r=4, alpha=2, target_modules=targets),
}


def adapted(model: Any, kind: str = "lora", *, targets: str = LINEARS, seed: int = 0) -> Any:
    """Add an adapter to a model, every part of it random: with a zero half, half of the gradients would vanish."""
    model.add_adapter(CONFIGS[kind](targets))
    for name, parameter in trained(model).items():
        parameter.data = parameter.data.float()
        if "magnitude" not in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator_for(seed, name)) * 0.05)
    return model.train()


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that get gradients, by name."""
    return {name: p for name, p in sorted(model.named_parameters()) if p.requires_grad}


def vectors_model(name: str, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    """The tiny model of a folder of vectors, one of its own for each caller."""
    return copy.deepcopy(_loaded(name, dtype))


@functools.cache
def _loaded(name: str, dtype: torch.dtype) -> WanTransformer3DModel:
    return load_transformer(DITS[name], dtype=dtype)


@dataclass(frozen=True)
class Inputs:
    """What a velocity model is called with."""

    latents: Tensor
    timesteps: Tensor
    texts: Sequence[Tensor]
    condition: Tensor | None = None
    image_tokens: Tensor | None = None

    def __call__(self, velocity: Any) -> Tensor:
        return velocity(
            self.latents, self.timesteps, self.texts, condition=self.condition, image_tokens=self.image_tokens
        )


def inputs_of(name: str, case: int = 0, *, batch: int = 0) -> Inputs:
    """A case of the vectors; with `batch`, so many items of it, with texts and times of their own."""
    start = f"case{case}."
    part = {key.removeprefix(start): value for key, value in golden(name).items() if key.startswith(start)}
    texts = [part[key] for key in sorted(part) if key.startswith("context.")]
    times, latents = part.get("timestep_per_token", part["timestep"]), part["latents"]
    inputs = Inputs(latents, times, texts, part.get("y"), part.get("clip_fea"))
    if not batch:
        return inputs

    def some(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        rows = tensor[:1].float().repeat(batch, *[1] * (tensor.ndim - 1))
        return rows * torch.linspace(1, 0.5, batch).view(-1, *[1] * (tensor.ndim - 1))

    shortened = [texts[0][: max(1, len(texts[0]) - 3 * number)] for number in range(batch)]
    return Inputs(some(latents), some(times), shortened, some(inputs.condition), some(inputs.image_tokens))


def small(num_blocks: int, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    """A frozen transformer with random weights, in the dtypes that the loader gives it."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=32, text_dim=32, ffn_dim=64, freq_dim=32,
                                  num_layers=num_blocks, rope_max_seq_len=64).requires_grad_(False)  # fmt: skip
    wide = set(model._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if wide & set(name.split(".")) else dtype)
    return model


def noisy(batch: int, *shape: int, rows: int = 20) -> Inputs:
    """Inputs for `small`: latents of that shape, and texts of different lengths."""
    generator = torch.Generator().manual_seed(batch)
    texts = [torch.randn(rows - 3 * number, 32, generator=generator) for number in range(batch)]
    return Inputs(torch.randn(batch, 16, *shape, generator=generator), torch.full((batch,), 500.0), texts)


def fast(model: WanTransformer3DModel, swap: Any = None, dtype: torch.dtype | None = None, **changes: Any) -> FastWan:
    """The fast way, without checkpointing unless it is asked for."""
    compute = Compute(**{"checkpointing": "none", **changes})
    kernel = choose_kernel("sdpa", CPU, dtype or model.patch_embedding.weight.dtype)
    return FastWan(model, compute, kernel, swap, dtype)


def plain(model: WanTransformer3DModel) -> Any:
    """diffusers' own forward."""
    return lambda *args, **kwargs: predict_velocity(model, *args, **kwargs)


def exact(model: WanTransformer3DModel, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """`step` of diffusers' own forward in float64 throughout: what it rounds to float32 on its way stays float64."""

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.double()

    model = copy.deepcopy(model).double()
    texts = [text.double() for text in inputs.texts]
    inputs = replace(inputs, latents=inputs.latents.double(), timesteps=inputs.timesteps.double(), texts=texts,
                     condition=wide(inputs.condition), image_tokens=wide(inputs.image_tokens))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        output, gradients = step(model, plain(model), inputs)
    assert output.dtype == torch.float64
    return output, gradients


@functools.cache
def exact_of_two(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """`exact` for two items, and the model of these vectors with a LoRA."""
    return exact(adapted(vectors_model(name)), inputs_of(name, batch=2))


def step(
    model: WanTransformer3DModel, velocity: Any, inputs: Inputs, seed: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The velocity, and the gradients of a loss against noise."""
    for parameter in trained(model).values():
        parameter.grad = None
    output = inputs(velocity)
    target = torch.randn(output.shape, generator=generator_for("target", seed))
    (output.float() - target.to(output.device)).square().mean().backward()
    return output.detach(), {name: parameter.grad for name, parameter in trained(model).items()}


def largest_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The distance of two sets of tensors: that of the farthest pair, relative to the length of `wanted`'s."""
    assert found.keys() == wanted.keys()
    assert all(bool(tensor.abs().max() > 0) for tensor in wanted.values()), "a gradient of zero proves nothing"
    distances = {name: (found[name].double() - wanted[name].double()).norm() for name in wanted}
    return max(float(distance / wanted[name].double().norm()) for name, distance in distances.items())


def same(one: tuple[Any, dict[str, torch.Tensor]], other: tuple[Any, dict[str, torch.Tensor]]) -> bool:
    """Whether output and gradients agree bit by bit."""
    assert one[1].keys() == other[1].keys()
    return torch.equal(one[0], other[0]) and all(torch.equal(one[1][name], other[1][name]) for name in one[1])
