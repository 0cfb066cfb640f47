"""Memorisation: how close a generated clip lies to the nearest training clip, in the latents of the VAE.

A distance means nothing by itself. It is compared with how far the training clips lie from each other: a clip that is
closer to one of them than they are among themselves is likely a copy of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

COPY = 0.5
"""Closer than this share of the training clips' own median distance is called a copy."""


@dataclass(frozen=True)
class Neighbour:
    """The training clip that is nearest to a generated one.

    Attributes:
        name: of the training clip.
        distance: root of the mean squared difference of their latents.
        share: of the median distance between a training clip and its nearest other; None of a single training clip.
    """

    name: str
    distance: float
    share: float | None

    @property
    def is_copy(self) -> bool:
        """Whether it is closer than training clips are to each other by far."""
        return self.share is not None and self.share < COPY


class TrainingLatents:
    """The latents of the training clips, of one shape.

    Args:
        names: of the clips.
        latents: (C, F, h, w) each; those of another shape than the first are resampled to it.
        digest: of the clips.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, names: Sequence[str], latents: Sequence[Tensor], digest: str = "") -> None:
        if not latents:
            raise ValueError("no training clips to compare with")
        self.digest = digest
        self._names = tuple(names)
        self._shape = latents[0].shape
        self._rows = torch.stack([self._row(latent) for latent in latents])  # (clips, numbers)
        self._usual = self._median_distance()

    def nearest(self, latent: Tensor) -> Neighbour:
        """The nearest training clip to latents (C, F, h, w)."""
        distances = self._distances(self._row(latent))
        index = int(distances.argmin())
        distance = distances[index].item()
        return Neighbour(self._names[index], distance, distance / self._usual if self._usual else None)

    def _row(self, latent: Tensor) -> Tensor:
        wide = latent.float()
        if latent.shape != self._shape:
            wide = functional.interpolate(wide[None], self._shape[1:], mode="trilinear")[0]
        return wide.flatten()

    def _distances(self, row: Tensor) -> Tensor:
        """(numbers,) -> (clips,)"""
        return torch.stack([(other - row).square().mean().sqrt() for other in self._rows])

    def _median_distance(self) -> float:
        """From each training clip to its nearest other one; 0 of a single clip."""
        nearest = []
        for index, row in enumerate(self._rows):
            distances = self._distances(row)
            distances[index] = torch.inf
            nearest.append(distances.min())
        return torch.stack(nearest).median().item() if len(nearest) > 1 else 0.0
