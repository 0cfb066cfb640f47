"""The adapter that is being trained: put on with peft, begun from the seed or from a file, switched off and on."""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from wangen import profiles
from wangen.generator.adapter_settings import AdapterSettings
from wangen.generator.errors import many, some
from wangen.generator.lora_keys import module_name
from wangen.generator.steps import Train
from wangen.runtime.adapter_layers import (
    add,
    fill,
    merge_adapter,
    parameter_name,
    parts_of,
    require_linear,
)
from wangen.runtime.adapters import AdapterWeight, read_adapter, with_smaller
from wangen.runtime.libraries import (
    BaseTunerLayer,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PeftConfig,
    WanTransformer3DModel,
)
from wangen.runtime.lora import adapter_layers
from wangen.runtime.randomness import generator_for
from wangen.runtime.training.adapter_config import adapter_settings, merged, select_modules, start_flag

log = logging.getLogger("wangen")

NAME = "default"
FIRST_FACTORS = {"lora": ("up",), "loha": ("hada_w1_a",), "lokr": ("lokr_w1", "lokr_w1_a")}
"""What takes up the difference of two scales: one factor of each kind, whole or its first half."""
ZEROS = {"lora": ("up",), "loha": ("hada_w2_b",), "lokr": ("lokr_w1", "lokr_w1_a")}
"""The factor that peft begins at zero, so that training starts at the base model."""


def add_adapter(
    transformer: WanTransformer3DModel, options: Train, model: profiles.Model, expert: str = ""
) -> dict[str, torch.nn.Parameter]:
    """Put a trainable adapter in float32 on a frozen transformer, which computes the same as before.

    Every factor is drawn as peft does (Kaiming uniform, a = sqrt 5) from a seeded generator of its own, but for the one
    that is zero. With `--network_weights` the transformer computes what it does with that adapter.

    Args:
        transformer: the frozen model, quantised or not, without adapters.
        options: kind, rank, targets, seed and, if given, the weights to start from.
        model: whose layers usually get an adapter.
        expert: `high_noise`, `low_noise`, or empty where there is only one.

    Returns:
        The trainable parameters by name, sorted.

    Raises:
        WangenError: no layer is left by the targets, the adapter to start from does not fit, or a layer holds its
            weight in a form that this kind cannot work with.
        UsageError: flags that contradict each other.
    """
    chosen = adapter_settings(options, expert)
    linear = (name for name, layer in transformer.named_modules() if isinstance(layer, torch.nn.Linear))
    modules = select_modules(sorted(name for name in linear if module_name(name)), options, model, expert)
    require_linear(transformer, modules, chosen.kind, chosen.dora)
    add(transformer, _config(chosen, modules), NAME)
    layers = adapter_layers(transformer)
    # What does not fit was refused by its header.
    start = read_adapter(chosen.start, start_flag(expert)) if chosen.start else {}
    if chosen.start:
        fitting = len(start.keys() & layers.keys())
        log.info("  %s of %s start from %s", many(fitting, "layer"), len(layers), chosen.start)
    seed: tuple[str | int, ...] = (options.seed, "adapter", *([expert] if expert == "high_noise" else []))
    for module, layer in layers.items():
        _initialise(layer, module, chosen, seed)
        if module in start:
            _start_from(layer, module, start[module], chosen)
    return {name: parameter for name, parameter in sorted(transformer.named_parameters()) if parameter.requires_grad}


def merge_base_weights(transformer: WanTransformer3DModel, options: Train) -> None:
    """Add the adapters of `--base_weights` to the frozen base for good, before the trained one is put on.

    Raises:
        WangenError: as `adapter_layers.merge_adapter`.
    """
    for path, multiplier in merged(options):
        left_out = merge_adapter(transformer, read_adapter(path, "--base_weights"), multiplier)
        if left_out:
            log.warning("  %s: %s not in this model and left out: %s", path.name, many(len(left_out), "layer"),
                        some(left_out))  # fmt: skip


@contextlib.contextmanager
def disabled(transformer: WanTransformer3DModel) -> Iterator[None]:
    """Let the transformer compute as the base, without its adapter; afterwards all is as before."""
    layers = adapter_layers(transformer).values()
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    try:
        for layer in layers:
            layer.enable_adapters(enabled=False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)
        for parameter in trained:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def replaced(parameters: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let the parameters have other values (their averages, say); afterwards they have their own bytes again.

    The values are copied into the same storage, which flat buffers and compiled graphs keep seeing.

    Args:
        parameters: those of the model, by name.
        other: values for some of them, of any device and dtype.
    """
    own = {name: parameters[name].detach().clone() for name in other}
    try:
        with torch.no_grad():
            for name, value in other.items():
                parameters[name].copy_(value)
        yield
    finally:
        with torch.no_grad():
            for name, value in own.items():
                parameters[name].copy_(value)


def _config(chosen: AdapterSettings, modules: list[str]) -> PeftConfig:
    ranks, alphas = ({module: each[module] for module in modules if module in each}
                     for each in (chosen.ranks, chosen.alphas))  # fmt: skip
    common = {"r": chosen.rank, "rank_pattern": ranks, "alpha_pattern": alphas, "target_modules": modules}
    if chosen.kind == "lora":
        return LoraConfig(**common, lora_alpha=chosen.alpha, lora_dropout=chosen.dropout, use_rslora=chosen.rslora,
                          use_dora=chosen.dora)  # fmt: skip
    common |= {"alpha": chosen.alpha, "rank_dropout": chosen.rank_dropout, "module_dropout": chosen.module_dropout}
    if chosen.kind == "loha":
        return LoHaConfig(**common)
    return LoKrConfig(**common, decompose_factor=chosen.factor, decompose_both=chosen.decompose_both)


def _initialise(layer: BaseTunerLayer, module: str, chosen: AdapterSettings, seed: tuple[str | int, ...]) -> None:
    """Draw the factors of one layer, in float32 and on its device."""
    for part, parameter in parts_of(dict(layer.named_parameters(prefix=module)))[module].items():
        value = torch.zeros(parameter.shape)
        if part not in ZEROS[chosen.kind] and part != "magnitude":
            generator = generator_for(*seed, parameter_name(module, part, NAME))
            torch.nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        parameter.data = value.to(parameter.device)
    _set_magnitude(layer, chosen)


def _set_magnitude(layer: BaseTunerLayer, chosen: AdapterSettings) -> None:
    """Let a DoRA's magnitudes be the norms of the rows as they are, so that they change nothing yet."""
    if chosen.dora:
        layer.lora_magnitude_vector[NAME].update_layer(
            base_layer=layer.get_base_layer(),
            lora_A=layer.lora_A[NAME].weight.data,
            lora_B=layer.lora_B[NAME].weight.data,
            scaling=layer.scaling[NAME],
        )


def _start_from(layer: BaseTunerLayer, module: str, weight: AdapterWeight, chosen: AdapterSettings) -> None:
    """Copy one layer's adapter, scaled so that it begins with the same change of the weights."""
    own = parts_of(dict(layer.named_parameters(prefix=module)))[module]
    if chosen.kind == "lora":  # near what is drawn: hundreds in `down` would make of each step of `up` a leap
        weight = with_smaller(weight, {"down": 1 / math.sqrt(weight.factors["down"].shape[1])})
    assert all(own[part].shape == factor.shape for part, factor in weight.factors.items()), "as `require_adapter` sees"
    ratio = weight.scale / layer.scaling[NAME]
    scaled = {
        part: factor.double() * ratio if part in FIRST_FACTORS[chosen.kind] else factor
        for part, factor in weight.factors.items()
    }
    if chosen.kind == "lora":
        # A DoRA's magnitudes may be over norms that depend on the scale, which is now the layer's.
        fill(layer, replace(weight, factors=scaled, scale=layer.scaling[NAME]), NAME)
        if weight.magnitude is None:
            _set_magnitude(layer, chosen)
        return
    for part, factor in scaled.items():
        own[part].data = factor.to(own[part].device, torch.float32)
