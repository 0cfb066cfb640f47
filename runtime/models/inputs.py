"""What a velocity model is called with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
