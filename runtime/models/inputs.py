"""What a velocity model is called with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wangen.generator.errors import WangenError

WAN_TEXT_ROWS = 512
"""What every Wan was trained with: zeros behind each text."""

Controls = Sequence[Sequence[torch.Tensor]]
"""For each item the latents of its control images, (C, F, h, w) each; their sizes are their own."""


@dataclass(frozen=True)
class Inputs:
    """One forward pass. Letters: B items, C channels, F h w latent frames, height and width, N tokens, L rows of text.

    Attributes:
        latents: (B, C, F, h, w), noisy.
        timesteps: (B,) in [0, 1000], or (B, N) where tokens differ; in host memory.
        texts: B embeddings (L, dim), trimmed.
        condition: of image-to-video, (B, 20, F, h, w).
        image_tokens: of Wan 2.1 image-to-video, (B, 257, 1280).
        controls: of models that edit, the control images of each item.
    """

    latents: torch.Tensor
    timesteps: torch.Tensor
    texts: list[torch.Tensor]
    condition: torch.Tensor | None = None
    image_tokens: torch.Tensor | None = None
    controls: Controls | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What a velocity model is given by name: the conditions that there are."""
        named = {"condition": self.condition, "image_tokens": self.image_tokens, "controls": self.controls}
        return {name: value for name, value in named.items() if value is not None}


def require_width(texts: Sequence[torch.Tensor], expected: int, encoder: str) -> None:
    """Refuse embeddings of another text encoder than the transformer was made for.

    Args:
        texts: embeddings (L, dim).
        expected: their width.
        encoder: that gives such ones, for the message.

    Raises:
        WangenError: they are not `expected` wide.
    """
    found = texts[0].shape[1]
    if found != expected:
        raise WangenError(f"text embeddings {found} wide, where this transformer takes {expected}",
                          cure=f"use the {encoder} encoder for caching and sampling")  # fmt: skip


def with_condition(latents: torch.Tensor, condition: torch.Tensor | None) -> torch.Tensor:
    """Latents (B, C, F, h, w) with the condition of image-to-video as further channels, where there is one."""
    return latents if condition is None else torch.cat([latents, condition.to(latents)], dim=1)
