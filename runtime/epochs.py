"""The order of an epoch: which samples make up which batch, shuffled, and the same on every machine.

Nothing is kept between batches: batch n of an epoch follows from the seed, the epoch and n. So the state of a run that
is broken off is its step, and processes and reading threads share the batches of a step without a word. What is held in
memory is a few numbers for each sample, not a list of batches.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

import torch

from wangen.runtime.loader import CachedSample, Draw
from wangen.runtime.randomness import generator_for


@dataclass(frozen=True)
class _Bucket:
    """The uses of the samples of one shape.

    Attributes:
        shape: width, height, frames and batch size.
        samples: (N,) the sample's number, for each use.
        repeats: (N,) which of its uses in the epoch it is.
    """

    shape: tuple[int, ...]
    samples: torch.Tensor
    repeats: torch.Tensor

    @property
    def batch_size(self) -> int:
        """Uses in a batch; the last one may have less."""
        return self.shape[-1]

    @property
    def num_batches(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.samples) // self.batch_size)


class EpochSampler:
    """Draws the batches of any epoch: samples of one shape together, every use of every sample once.

    Args:
        samples: of the dataset.
        seed: of the run.
        caption_dropout: share of the draws that see the empty prompt, 0 to 1.
    """

    def __init__(self, samples: Sequence[CachedSample], seed: int, caption_dropout: float = 0.0) -> None:
        self.samples, self.seed, self.caption_dropout = samples, seed, caption_dropout
        members: dict[tuple[int, ...], list[int]] = {}
        for number, cached in enumerate(samples):
            shape = (*cached.sample.size, cached.sample.count, cached.sample.entry.batch_size)
            members.setdefault(shape, []).append(number)
        self.buckets = [self._bucket(shape, members[shape]) for shape in sorted(members)]

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return sum(bucket.num_batches for bucket in self.buckets)

    def epoch(self, number: int) -> "Epoch":
        """The batches of an epoch, counted from 0."""
        return Epoch(self, number)

    def _bucket(self, shape: tuple[int, ...], members: list[int]) -> _Bucket:
        counts = torch.tensor([self.samples[number].sample.entry.num_repeats for number in members])
        firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        return _Bucket(shape, torch.tensor(members).repeat_interleave(counts), torch.arange(len(firsts)) - firsts)


class Epoch(Sequence[list[Draw]]):
    """The batches of one epoch, each drawn when it is asked for; from `EpochSampler.epoch`."""

    def __init__(self, sampler: EpochSampler, number: int) -> None:
        self._sampler, self._number = sampler, number
        seed, buckets = sampler.seed, sampler.buckets
        self._shuffled = [
            torch.randperm(len(bucket.samples), generator=generator_for(seed, "samples", number, *bucket.shape))
            for bucket in buckets
        ]
        self._begins = list(accumulate((bucket.num_batches for bucket in buckets), initial=0))
        self._order = torch.randperm(self._begins[-1], generator=generator_for(seed, "batches", number))
        sizes = torch.cat([torch.full((bucket.num_batches,), bucket.batch_size) for bucket in buckets])
        for bucket, end in zip(buckets, self._begins[1:], strict=True):
            sizes[end - 1] -= bucket.num_batches * bucket.batch_size - len(bucket.samples)
        self._positions = number * int(sizes.sum()) + sizes[self._order].cumsum(0) - sizes[self._order]

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, number: int) -> list[Draw]: ...
    @overload
    def __getitem__(self, number: slice) -> list[list[Draw]]: ...
    def __getitem__(self, number: int | slice) -> list[Draw] | list[list[Draw]]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        batch = int(self._order[number])
        place = bisect_right(self._begins, batch) - 1
        bucket = self._sampler.buckets[place]
        first = (batch - self._begins[place]) * bucket.batch_size
        uses = self._shuffled[place][first : first + bucket.batch_size]
        pairs = zip(bucket.samples[uses].tolist(), bucket.repeats[uses].tolist(), strict=True)
        position = int(self._positions[number])
        return [
            Draw(index, repeat, self._caption(index, repeat), position + count)
            for count, (index, repeat) in enumerate(pairs)
        ]

    def _caption(self, index: int, repeat: int) -> int:
        """Which caption this use of a sample sees, -1 for the empty one; drawn only where there is a choice."""
        cached, dropout = self._sampler.samples[index], self._sampler.caption_dropout
        if not dropout and len(cached.texts) == 1:
            return 0
        generator = generator_for(self._sampler.seed, "caption", self._number, cached.key, repeat)
        if torch.rand((), generator=generator).item() < dropout:
            return -1
        return int(torch.randint(len(cached.texts), (), generator=generator))
