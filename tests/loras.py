"""The LoRA vectors of the official code, and LoRAs made up over every module of a model."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from parity import DITS, VECTORS, golden, velocity

from wangen.generator.cli import main
from wangen.generator.lora_keys import Layout
from wangen.runtime import safetensors_file
from wangen.runtime.adapter_layers import apply_adapter
from wangen.runtime.adapters import AdapterWeight
from wangen.runtime.lora import Lora, LoraWeight, adapter_layers, as_stored, name_tensors, read_lora
from wangen.runtime.weights.transformer import load_transformer

KOHYA = {
    "ss_network_dim": "4",
    "ss_network_alpha": "2.0",
    "ss_datasets": '[{"caption": "ü"}]',
    "modelspec.title": "cats",
    "sshs_model_hash": "00",
    "sshs_legacy_hash": "11",
}

LAYOUTS = ("comfyui", "kohya", "diffusers", "peft")
LORAS = {
    folder.name.removeprefix("lora_"): folder / "lora_musubi.safetensors" for folder in sorted(VECTORS.glob("lora_*"))
}


def to_layout(lora: Mapping[str, LoraWeight], layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA's file in a layout."""
    return name_tensors(as_stored(lora, layout, None), layout)


def model_of(name: str, dit: Path | None = None) -> torch.nn.Module:
    """The transformer that a LoRA of the vectors belongs to, in float32; or another file of that kind."""
    return load_transformer(dit or DITS[f"dit_{name}"], dtype=torch.float32)


def output(model: torch.nn.Module, name: str, case: int) -> torch.Tensor:
    """What the model makes of a case."""
    return velocity(model, f"dit_{name}", case)


def wanted(name: str, case: int, multiplier: float) -> torch.Tensor:
    """The official output with the LoRA at this strength."""
    if multiplier == 0:
        return golden(f"dit_{name}")[f"case{case}.output"]
    return golden(f"lora_{name}")[f"case{case}.output_mult{multiplier}"]


def apply_lora(
    model: torch.nn.Module, lora: Mapping[str, LoraWeight], strength: float = 1.0, *, name: str
) -> list[str]:
    """Put a LoRA on a model at a strength, as `apply_adapter` does, and return the modules that are left out."""
    parts = {module: {"down": weight.down, "up": weight.up} for module, weight in lora.items()}
    adapter = {module: AdapterWeight("lora", parts[module], lora[module].scale) for module in lora}
    left_out = apply_adapter(model, adapter, name=name)
    set_strength(model, name, strength)
    return left_out


def set_strength(model: torch.nn.Module, name: str, strength: float) -> None:
    """Set the strength of one applied adapter, as the sampler does."""
    for layer in adapter_layers(model).values():
        layer.set_scale(name, strength)


@cache
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The weights of a model that a LoRA can change, by module."""
    model = load_transformer(DITS[f"dit_{name}"], device="meta")
    kinds = torch.nn.Linear | torch.nn.Conv3d
    return {
        module_name: module.weight.shape for module_name, module in model.named_modules() if isinstance(module, kinds)
    }


def every_module(
    name: str, *, scales: Sequence[float], ranks: Sequence[int] = (2, 4, 8), dtype: torch.dtype = torch.float32
) -> Lora:
    """A random LoRA of every linear layer of a model and of its patch embedding; ranks and scales take turns."""
    generator = torch.Generator().manual_seed(7)
    lora: Lora = {}
    for module_name, (out, *rest) in shapes(name).items():
        rank, scale = ranks[len(lora) % len(ranks)], scales[len(lora) // 2 % len(scales)]
        down = torch.randn(rank, *rest, generator=generator) * 0.02
        up = torch.randn(out, rank, *[1] * (len(rest) - 1), generator=generator) * 0.02
        lora[module_name] = LoraWeight(down.to(dtype), up.to(dtype), scale * rank)
    return lora


def change_of(weight: LoraWeight) -> torch.Tensor:
    """What a module's weight is changed by, in float64."""
    return weight.scale * (weight.up.double().flatten(1) @ weight.down.double().flatten(1))


def same_change(found: Mapping[str, LoraWeight], meant: Mapping[str, LoraWeight], tolerance: float) -> None:
    """Assert that two LoRAs have the same modules and change them alike; the tolerance is relative to the largest."""
    assert found.keys() == meant.keys()
    for name, weight in meant.items():
        exact = change_of(weight)
        difference = (change_of(found[name]) - exact).abs().max()
        assert float(difference) <= tolerance * float(exact.abs().max()), name


def write(path: Path, lora: Lora, layout: Layout, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a LoRA's file and return its path."""
    safetensors_file.write(path, to_layout(lora, layout), metadata or {})
    return path


def convert(source: Path, target: Path, *words: str) -> Lora:
    """Run `wangen export`, which must not fail, and read what it wrote."""
    assert main(["export", "--lora_weight", str(source), "--save_path", str(target), *words]) == 0
    return read_lora(target)
