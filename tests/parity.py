"""Running our models on the vectors of the official code, and measuring the difference."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from wangen.runtime.models.wan import predict_velocity

VECTORS = Path(__file__).parent / "vectors"
DIT = VECTORS / "dit_t2v21" / "model.safetensors"
DITS = {folder.name: folder / "model.safetensors" for folder in sorted(VECTORS.glob("dit_*"))}
VAE21 = VECTORS / "vae21" / "Wan2.1_VAE.pth"
VAE22 = VECTORS / "vae22" / "Wan2.2_VAE.pth"
T5 = VECTORS / "t5" / "models_t5_umt5-xxl-enc-bf16.pth"
TOKENIZER = VECTORS / "t5" / "google" / "umt5-xxl"
CLIP = VECTORS / "clip" / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
CLIP_HEADS = 5
PROMPTS = json.loads((VECTORS / "t5" / "meta.json").read_text("utf-8"))["prompts"]


def golden(name: str) -> dict[str, torch.Tensor]:
    """The inputs and outputs of a folder of vectors."""
    return load_file(VECTORS / name / "golden.safetensors")


def cases(name: str) -> list[int]:
    """The numbers of a folder's cases."""
    return sorted({int(key.split(".")[0][4:]) for key in golden(name)})


def predicted(model: torch.nn.Module, name: str, case: int = 0) -> torch.Tensor:
    """What a transformer makes of a case, with gradients."""
    tensors = golden(name)
    part = {key.removeprefix(f"case{case}."): value for key, value in tensors.items() if key.startswith(f"case{case}.")}
    return predict_velocity(
        model,
        part["latents"],
        part.get("timestep_per_token", part["timestep"]),
        [part[key] for key in sorted(part) if key.startswith("context.")],
        condition=part.get("y"),
        image_tokens=part.get("clip_fea"),
    )


def velocity(model: torch.nn.Module, name: str, case: int) -> torch.Tensor:
    """The same without gradients, in float32."""
    with torch.no_grad():
        return predicted(model, name, case).float()


def max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference."""
    return float((a.float() - b.float()).abs().max())


def rel_rms(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of `b`."""
    return float((a.float() - b.float()).pow(2).mean().sqrt() / b.float().pow(2).mean().sqrt())


def no_less_exact(found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether float32 rounds `found` no more than `plain`, both judged by float64.

    How much it rounds depends on the processor's kernels, so that a bound on `found - plain` holds on some only.
    """
    return _rel_rms64(found, exact) < 1.25 * _rel_rms64(plain, exact)


def _rel_rms64(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).pow(2).mean().sqrt() / exact.double().pow(2).mean().sqrt())
