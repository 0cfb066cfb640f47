"""Fixtures around a tiny set; a test file asks for them with `pytest_plugins` and imports nothing from here."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_weights import TinySizes, random_weights, text_encoder_shapes, vae_shapes, write_tokenizer

from wangen.generator import lock, session
from wangen.runtime import cache_text, needs
from wangen.runtime.cache import writer
from wangen.runtime.safetensors_file import write


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Small groups, so that a run has many; and nothing waits for a clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "START_S", 0.0)  # a claim that was being made counts as held for so long
        patch.setattr("wangen.runtime.sources.YOUNG_NS", 0)  # else neither memo nor index would be written
        patch.setattr(session, "_versions", dict)  # of the libraries, for the report: reading them takes long
        patch.setattr(writer, "_GROUP_FILES", 2)
        patch.setattr(cache_text, "CPU_GROUP", 3)
        patch.setattr(needs, "POLL_S", 0.01)
        yield


@pytest.fixture(scope="module")
def weights(room: Path) -> dict[str, Path]:
    """In safetensors, which are identified more quickly than a .pth."""
    sizes, folder = TinySizes(vae_dim=2), room / "models"
    models = {role: folder / f"{role}.safetensors" for role in ("vae", "t5")}
    vocabulary = write_tokenizer(folder / "google" / "umt5-xxl", ["picture of many"])
    write(models["vae"], random_weights(vae_shapes(sizes.vae_dim), 0, torch.float32), {})
    write(models["t5"], random_weights(text_encoder_shapes(sizes, vocabulary), 0, torch.float32), {})
    return models
