"""Memorisation: how close a generated clip lies to the nearest training clip, in the latents of the VAE.

A distance means nothing by itself. It is compared with how far the clips of different training files lie from each
other: a clip that is much closer to one of them than they are among themselves is likely a copy of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

COPY = 0.5
"""Closer than this share of the training clips' own median distance is called a copy."""
MOST_NUMBERS = 1 << 18
"""Of a clip: larger latents are averaged over squares of 2x2 until they have no more."""


@dataclass(frozen=True)
class Neighbour:
    """The training clip that is nearest to a generated one.

    Attributes:
        name: of the training clip.
        distance: root of the mean squared difference of their latents.
        share: of the median distance between a training clip and the nearest of another file; None of a single file.
        key: of the training clip.
    """

    name: str
    distance: float
    share: float | None
    key: str = ""

    @property
    def is_copy(self) -> bool:
        """Whether it is closer than training clips are to each other by far."""
        return self.share is not None and self.share < COPY


@dataclass(frozen=True)
class TrainingClip:
    """One clip that was trained on.

    Attributes:
        name: of the clip.
        source: digest of its file.
        read: gives its latents (C, F, h, w).
        key: of these, whatever the clip is called.
    """

    name: str
    source: str
    read: Callable[[], Tensor]
    key: str = ""


class TrainingLatents:
    """The latents of the training clips; they are read when the first distance is asked for.

    Args:
        clips: one or more. Latents of another shape than the first's are resampled to it.
        digest: of all of them.

    Attributes:
        names: key -> name of those that have a key.
    """

    def __init__(self, clips: Sequence[TrainingClip], digest: str = "") -> None:
        self._clips = tuple(clips)
        self.digest = digest
        self.names = {clip.key: clip.name for clip in self._clips if clip.key}

    def nearest(self, latent: Tensor) -> Neighbour:
        """The nearest training clip to latents (C, F, h, w)."""
        shape, rows = self._rows
        distances = _distances(_row(latent, shape)[None], rows)[0]
        index = int(distances.argmin())
        distance, usual, clip = distances[index].item(), self._usual, self._clips[index]
        return Neighbour(clip.name, distance, distance / usual if usual else None, clip.key)

    @cached_property
    def _rows(self) -> tuple[torch.Size, Tensor]:
        """The shape of the first, and all of them as (clips, numbers)."""
        first = self._clips[0].read()
        others = (clip.read() for clip in self._clips[1:])
        return first.shape, torch.stack([_row(latent, first.shape) for latent in (first, *others)])

    @cached_property
    def _usual(self) -> float | None:
        """The median distance from a training clip to the nearest one of another file; None of a single file."""
        numbers = {source: number for number, source in enumerate(dict.fromkeys(clip.source for clip in self._clips))}
        if len(numbers) == 1:
            return None
        files = torch.tensor([numbers[clip.source] for clip in self._clips])
        distances = _distances(self._rows[1], self._rows[1])
        return distances.masked_fill(files[:, None] == files, torch.inf).amin(dim=1).median().item()


def _row(latent: Tensor, shape: torch.Size) -> Tensor:
    """Latents (C, F, h, w) brought to a shape, as one row."""
    wide = latent.float()
    if latent.shape != shape:
        wide = functional.interpolate(wide[None], shape[1:], mode="trilinear")[0]
    while wide.numel() > MOST_NUMBERS and min(wide.shape[2:]) > 1:
        wide = functional.avg_pool2d(wide, 2)
    return wide.flatten()


def _distances(first: Tensor, second: Tensor) -> Tensor:
    """(a, numbers) and (b, numbers) -> (a, b), the root of the mean squared difference."""
    found: Tensor = torch.cdist(first[None], second[None])[0] / first.shape[1] ** 0.5
    return found
