"""Tiny random transformers of every Wan that is sampled, for the tiny umT5 (64 wide) and the tiny CLIP (80 wide)."""

from dataclasses import dataclass
from pathlib import Path

import torch
from parity import CLIP, DITS, VAE22
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny import TinyRun

TEXT_DIM, CLIP_DIM = 64, 80
VECTORS_OF = {"i2v-14B": "dit_i2v21", "i2v-A14B": "dit_i2v22_a14b", "ti2v-5B": "dit_ti2v5b"}


@dataclass(frozen=True)
class TinyTask:
    """A task with the weights it needs, by flag, and a first frame where it takes one."""

    task: str
    weights: dict[str, Path]
    image: Path | None


def tiny_task(task: str, tiny_run: TinyRun, folder: Path) -> TinyTask:
    """Write what a task needs into a folder; of two experts the high-noise one is the other, halved."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tiny_run.weights)
    if task in VECTORS_OF:
        weights["dit"] = narrow(DITS[VECTORS_OF[task]], folder / f"{task}.safetensors")
    if task.endswith("A14B"):
        weights["dit_high_noise"] = other_expert(weights["dit"], folder / f"{task}_high_noise.safetensors")
    if task == "ti2v-5B":
        weights["vae"] = VAE22
    if task == "i2v-14B":
        weights["clip"] = CLIP
    image = None
    if "i2v" in task:
        image = folder / "first.png"
        draw = torch.Generator().manual_seed(5)
        pixels = torch.nn.functional.interpolate(torch.rand(1, 3, 4, 4, generator=draw), (64, 64), mode="bicubic")
        Image.fromarray((pixels[0].clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()).save(image)
    return TinyTask(task, weights, image)


def narrow(source: Path, path: Path) -> Path:
    """A transformer of the vectors for narrower embeddings of texts and images."""
    draw = torch.Generator().manual_seed(7)
    tensors = load_file(source)
    changed = {"text_embedding.0.weight": (len(tensors["text_embedding.0.weight"]), TEXT_DIM)}
    if "img_emb.proj.1.weight" in tensors:
        changed |= {f"img_emb.proj.{name}": (CLIP_DIM,) for name in ("0.weight", "0.bias", "1.bias")}
        changed |= {"img_emb.proj.1.weight": (CLIP_DIM, CLIP_DIM)}
        changed |= {"img_emb.proj.3.weight": (len(tensors["img_emb.proj.3.weight"]), CLIP_DIM)}
    for name, shape in changed.items():
        tensors[name] = (
            torch.randn(shape, generator=draw, dtype=torch.float32).to(tensors[name].dtype) / shape[-1] ** 0.5
        )
    save_file(tensors, path)
    return path


def other_expert(source: Path, path: Path) -> Path:
    """Weights that differ from those of another transformer."""
    save_file({name: (0.9 * value.float()).to(value.dtype) for name, value in load_file(source).items()}, path)
    return path
