"""The LoRA vectors of the official code, and LoRAs made up over every module of a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from parity import DITS, VECTORS, golden, max_abs, velocity

from wangen.runtime.lora import Lora, LoraWeight
from wangen.runtime.weights import load_transformer

__all__ = ["LAYOUTS", "LORAS", "every_module", "max_abs", "model_of", "output", "same_change", "wanted"]

LAYOUTS = ("comfyui", "kohya", "diffusers", "peft")
LORAS = {
    folder.name.removeprefix("lora_"): folder / "lora_musubi.safetensors" for folder in sorted(VECTORS.glob("lora_*"))
}


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


def every_module(
    name: str, *, scales: Sequence[float], ranks: Sequence[int] = (2, 4, 8), dtype: torch.dtype = torch.float32
) -> Lora:
    """A random LoRA of every linear layer of a model and of its patch embedding; ranks and scales take turns."""
    generator = torch.Generator().manual_seed(7)
    lora: Lora = {}
    for module_name, module in model_of(name).named_modules():
        if not isinstance(module, torch.nn.Linear | torch.nn.Conv3d):
            continue
        rank, scale = ranks[len(lora) % len(ranks)], scales[len(lora) // 2 % len(scales)]
        out, *rest = module.weight.shape
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
