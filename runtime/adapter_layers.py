"""Adapters of every kind as peft's layers on a transformer: named, filled from files, applied, merged into the base."""

import re
import warnings
from collections.abc import Mapping

import torch

from wangen.generator.adapter_parts import HADAMARD, KRONECKER, WORDS
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.lora_config import config_fields
from wangen.generator.lora_keys import AdapterKind
from wangen.runtime.adapters import Adapter, AdapterWeight, with_smaller
from wangen.runtime.libraries import (
    BaseTunerLayer,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PeftConfig,
    WanTransformer3DModel,
    make_kron,
    make_weight,
)
from wangen.runtime.lora import adapter_layers, base_layer, match_modules
from wangen.runtime.memory.quantize import QuantLinear

_PEFT_NAMES = {"down": "lora_A", "up": "lora_B", "magnitude": "lora_magnitude_vector"}
_PARAMETER = re.compile(
    r"(?P<module>.+)\.(?:(?P<lora>lora_A|lora_B|lora_magnitude_vector)\.(?P<name>[^.]+)\.weight"
    r"|(?P<factor>(?:hada|lokr)_w[12](?:_[ab])?)\.(?P<other>[^.]+))"
)


def parameter_name(module: str, part: str, name: str) -> str:
    """What peft calls a part of a module's adapter.

    >>> parameter_name("blocks.0.attn1.to_q", "down", "default")
    'blocks.0.attn1.to_q.lora_A.default.weight'
    >>> parameter_name("blocks.0.attn1.to_q", "lokr_w1", "default")
    'blocks.0.attn1.to_q.lokr_w1.default'
    """
    if part in _PEFT_NAMES:
        return f"{module}.{_PEFT_NAMES[part]}.{name}.weight"
    return f"{module}.{part}.{name}"


def parts_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """An adapter's parameters by module and part, in the order of names; other parameters are left out.

    >>> list(parts_of({"a.lora_A.default.weight": torch.ones(1), "a.bias": torch.ones(1)})["a"])
    ['down']
    """
    short = {long: part for part, long in _PEFT_NAMES.items()}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name in sorted(parameters):
        if match := _PARAMETER.fullmatch(name):
            part = short[match["lora"]] if match["lora"] else match["factor"]
            found.setdefault(match["module"], {})[part] = parameters[name]
    return found


def base_weight(module: torch.nn.Module) -> torch.Tensor:
    """The weight under a layer's adapters, (out_features, in_features) in float32, dequantised where it has to be.

    Where it is in float32 already it is the weight itself, and not to be written into.
    """
    layer = base_layer(module)
    if isinstance(layer, QuantLinear):
        return layer.dequantized(torch.float32)
    assert isinstance(layer.weight, torch.Tensor)
    return layer.weight.detach().float()


def change_of(weight: AdapterWeight) -> torch.Tensor:
    """What an adapter that is no DoRA adds to a linear layer's weight, (out_features, in_features) in float32."""
    factors = {name: factor.float() for name, factor in weight.factors.items()}
    if weight.kind == "lora":
        return weight.scale * (factors["up"] @ factors["down"])
    if weight.kind == "loha":
        product: torch.Tensor = make_weight(*(factors[name] for name in HADAMARD), torch.tensor(weight.scale))
        return product
    first, second = (
        factors[name] if name in factors else factors[f"{name}_a"] @ factors[f"{name}_b"]
        for name in ("lokr_w1", "lokr_w2")
    )
    kronecker: torch.Tensor = make_kron(first, second, weight.scale)
    return kronecker


def require_linear(transformer: torch.nn.Module, modules: list[str], kind: AdapterKind, dora: bool) -> None:
    """See that peft can put an adapter of a kind on these layers: it asks LoHa's, LoKr's and DoRA's for their weight.

    Raises:
        WangenError: a layer is no linear one, or holds its weight in a form of its own.
    """
    if kind == "lora" and not dora:
        return
    for module in modules:
        layer = base_layer(transformer.get_submodule(module))
        shape = (layer.out_features, layer.in_features) if isinstance(layer, torch.nn.Linear) else ()
        if not isinstance(layer.weight, torch.Tensor) or tuple(layer.weight.shape) != shape:
            what = "held as the bytes of its file" if shape else "no linear layer"
            raise WangenError(f"{module} is {what}, and a {'DoRA' if dora else WORDS[kind]} needs its weight",
                              cure="give weights that are not quantised, or a plain LoRA")  # fmt: skip


def add(transformer: WanTransformer3DModel, config: PeftConfig, name: str) -> None:
    """Put peft's layers on a transformer, active beside those already there, and leave global randomness as it was."""
    devices = [transformer.device] if transformer.device.type == "cuda" else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices):
        # A second adapter on one model is meant here.
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        transformer.add_adapter(config, adapter_name=name)


def apply_adapter(transformer: WanTransformer3DModel, adapter: Adapter, *, name: str) -> list[str]:
    """Add an adapter of any kind to a transformer, frozen and active beside those already there, as it was trained.

    Args:
        transformer: the model; its own weights stay as they are.
        adapter: the neutral form.
        name: the adapter's name, unique within the model, without dots.

    Returns:
        The modules of the adapter that this model does not have, for the caller to tell.

    Raises:
        WangenError: nothing matches, the sizes are those of another model, or the name is taken.
    """
    if name in getattr(transformer, "peft_config", {}):
        raise WangenError(f"two LoRAs called {name}", cure="give each LoRA once")
    left_out = _install(transformer, adapter, 1.0, name, None)
    # diffusers activates the newest adapter alone; here all of them add up.
    for layer in adapter_layers(transformer).values():
        layer.set_adapter(list(transformer.peft_config))
    transformer.requires_grad_(False)
    return left_out


def merge_adapter(transformer: WanTransformer3DModel, adapter: Adapter, multiplier: float = 1.0) -> list[str]:
    """Add an adapter to the weights of a transformer for good; the sum is made in float32 and rounded once.

    Args:
        transformer: without adapters; its layers may be `QuantLinear`.
        adapter: the neutral form.
        multiplier: strength; 1 is as trained.

    Returns:
        The modules of the adapter that this model does not have, for the caller to tell.

    Raises:
        WangenError: as `apply_adapter`, or a layer is held in the bytes of its file.
        UsageError: a DoRA at another strength than 1, which has no meaning there.
    """
    assert not adapter_layers(transformer), "merging is for a transformer without adapters"
    left_out = _install(transformer, adapter, multiplier, "merged", torch.float32)
    for module, layer in adapter_layers(transformer).items():
        base = layer.get_base_layer()
        if not isinstance(base, QuantLinear):
            if tuple(base.weight.shape) != adapter[module].shape or not base.weight.is_floating_point():
                raise WangenError(f"{module} is held as the bytes of its file, to which nothing can be added",
                                  cure="merge with `wangen export --dit … --lora_weight …` first")  # fmt: skip
            layer.merge(adapter_names=["merged"])
        elif adapter[module].magnitude is None:
            base.add_(layer.get_delta_weight("merged"))
        else:
            raise WangenError(f"a DoRA cannot be added to {module}, which is quantised",
                              cure="merge it with weights that are not, or give a plain LoRA")  # fmt: skip
    transformer.unload_lora()
    return left_out


def _install(
    transformer: WanTransformer3DModel, adapter: Adapter, multiplier: float, name: str, dtype: torch.dtype | None
) -> list[str]:
    """Put an adapter's layers on a transformer and fill them; returns the modules that the model lacks.

    `dtype` is that of the factors; None takes the base's, as peft does.
    """
    fitting, left_out = match_modules(transformer, adapter)
    wanted = {module: adapter[module] for module in fitting}
    first = next(iter(wanted.values()))
    dora = first.magnitude is not None
    if dora and multiplier != 1:
        raise UsageError(f"a DoRA at strength {multiplier:g}", cure="give it the strength 1: it scales whole weights")
    if first.kind == "lora":  # else the first product of a file in float8 is beyond float16
        wanted = {name: with_smaller(one, {"down": 1, "up": 1}) for name, one in wanted.items()}
    require_linear(transformer, fitting, first.kind, dora)
    add(transformer, _config(wanted), name)
    for module, weight in wanted.items():
        layer = transformer.get_submodule(module)
        fill(layer, weight, name, dtype)
        layer.set_scale(name, multiplier)
    return left_out


def fill(layer: BaseTunerLayer, weight: AdapterWeight, name: str, dtype: torch.dtype | None = None) -> None:
    """Put the tensors of a module's adapter into peft's layer of the same kind.

    Args:
        layer: with an adapter of that name. The matrices of a LoKr may be others than it has.
        weight: what to put there; its scale is set for LoKr only, whose rank does not say it.
        name: of the adapter.
        dtype: of the factors; None keeps the layer's.
    """
    for part in KRONECKER if weight.kind == "lokr" else ():
        held: torch.nn.ParameterDict = getattr(layer, part)
        like = held.pop(name) if name in held else None
        if part in weight.factors:
            there = layer.get_base_layer().bias if like is None else like
            tensor = weight.factors[part].to(there.device, dtype or there.dtype)
            held[name] = torch.nn.Parameter(tensor)
    if weight.kind == "lokr":
        layer.alpha[name], layer.r[name] = weight.scale, 1
        layer.set_scale(name, 1.0)
        return
    for part, factor in weight.factors.items():
        parameter = layer.get_parameter(parameter_name("", part, name)[1:])
        parameter.data = factor.to(parameter.device, dtype or parameter.dtype, copy=True)
    if weight.magnitude is not None:
        vector = layer.lora_magnitude_vector[name]
        magnitude = weight.magnitude.float().to(vector.weight.device)
        if weight.over_base:
            magnitude = magnitude * _norms_ratio(layer, weight, name)
        vector.weight.data = magnitude.to(dtype or vector.weight.dtype)


def _norms_ratio(layer: BaseTunerLayer, weight: AdapterWeight, name: str) -> torch.Tensor:
    """For each row the norm of the changed weight over that of the base, (out_features,) in float32."""
    base = base_weight(layer)
    down, up = (weight.factors[part].to(base.device, torch.float32) for part in ("down", "up"))
    norms = layer.lora_magnitude_vector[name].get_weight_norm
    ratio: torch.Tensor = norms(base, up @ down, weight.scale) / norms(base, up @ down, 0.0)
    return ratio


def _config(adapter: Mapping[str, AdapterWeight]) -> PeftConfig:
    """The configuration of peft's layers for an adapter that is not empty."""
    first = next(iter(adapter.values()))
    if first.kind == "lokr":  # as small as can be: `fill` puts the file's own matrices there
        return LoKrConfig(r=1, alpha=1, decompose_factor=1, target_modules=sorted(adapter))
    ranks = {name: weight.rank for name, weight in adapter.items()}
    fields = config_fields(ranks, {name: weight.scale * weight.rank for name, weight in adapter.items()})
    if first.kind == "loha":
        fields["alpha"] = fields.pop("lora_alpha")
        return LoHaConfig(**fields)
    dora = first.magnitude is not None
    return LoraConfig(**fields, use_dora=dora, init_lora_weights=dora)  # `fill` writes over what would be drawn
