"""Cache entries made by hand, for the tests of the cache, its writer and its claims."""

from dataclasses import replace
from pathlib import Path

import torch

from wangen.runtime.cache import Encoder, Folder, Recipe
from wangen.runtime.cache.writer import Writer

ENCODER = Encoder("ab" * 32, "float32")
CONTENT = {"source": "cd" * 32, "width": 64, "height": 48, "resize": "lanczos, cover, centre", "frames": 1}
LATENT = Recipe("latent", CONTENT, "Ärger mit [cat].jpg")
TEXT = Recipe("text_encoder_output", {"caption": "a cat"}, "cat.jpg")


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"latent": torch.arange(1, 25, dtype=torch.float32).reshape(2, 1, 3, 4) * value}


def put(folder: Path, *recipes: Recipe, encoder: Encoder = ENCODER) -> list[Path]:
    with Writer(folder) as writer:
        for recipe in recipes:
            writer.put(recipe, encoder, tensors())
    return [folder / recipe.file_name(encoder) for recipe in recipes]


def states(folder: Path, recipe: Recipe, encoder: Encoder = ENCODER, *, deep: bool = False) -> str:
    return Folder(folder, deep=deep).judge(recipe, encoder).state


def recipes(count: int) -> list[Recipe]:
    return [replace(LATENT, content=CONTENT | {"width": number}, name=f"{number}.jpg") for number in range(count)]
