"""Adapters of every kind on a small transformer, as if they had been trained."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from loras import model_of
from parity import DIT

from wangen import profiles
from wangen.generator.steps import Train
from wangen.runtime.training.adapter import add_adapter

MODEL = profiles.model("t2v-1.3B")
Change = dict[str, Any]
KINDS: dict[str, Change] = {
    "lora": {"network_alpha": 2.0},
    "rslora": {"network_alpha": 2.0, "rslora": True},
    "dora": {"network_alpha": 8.0, "dora": True},
    "loha": {"network_module": "loha", "network_alpha": 2.0},
    "lokr": {"network_module": "lokr", "network_alpha": 2.0},
    "lokr of whole matrices": {"network_module": "lokr", "network_dim": 64, "network_alpha": 16.0, "lokr_factor": 8},
    "lokr of four": {"network_module": "lokr", "network_dim": 2, "network_args": ("decompose_both=true",)},
}
"""What is trained -> the flags that ask for it."""


@cache
def _loaded() -> Any:
    return model_of("t2v21")


def base_model() -> Any:
    """The small transformer in float32, a copy for each test: quicker than to load it."""
    return copy.deepcopy(_loaded())


@torch.no_grad()
def predicted(transformer: Any) -> torch.Tensor:
    """What a transformer makes of sixteen tokens and a text of five: (1, 16, 1, 8, 8)."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 16, 1, 8, 8, generator=generator)
    text = torch.randn(1, 5, transformer.config.text_dim, generator=generator)
    return transformer(latents, torch.tensor([500.0]), text, return_dict=False)[0]


def options_of(folder: Path, **changes: Any) -> Train:
    """Flags for an adapter on the small transformer of the official vectors."""
    base: Change = {"network_dim": 4, "network_alpha": 4.0}
    return Train(
        dataset_config=folder / "none.toml", dit=DIT, task=MODEL.name, output_dir=folder, output_name="lora",
        **{**base, **changes},
    )  # fmt: skip


def trained(options: Train, expert: str = "") -> tuple[Any, dict[str, torch.nn.Parameter]]:
    """The transformer with an adapter whose every number has moved; in float32."""
    transformer = base_model()
    parameters = add_adapter(transformer, options, MODEL, expert)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return transformer, parameters
