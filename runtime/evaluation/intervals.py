"""How sure a difference is: paired bootstrap intervals over the held-out files.

Each item is compared with itself, so that how hard it is cancels out. What is left differs from file to file, and the
interval says how far the mean would move had other files been held out. Clips and resolutions of one file are alike:
they are drawn together. Of several checkpoints the best by the same files looks better than it is, so their intervals
are wider.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from wangen.runtime.randomness import seed_for

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """A mean difference over items and its interval.

    Attributes:
        mean: of the differences; below 0 the second is lower.
        low: lower end of the interval; None of fewer than two groups.
        high: its upper end.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def is_lower(self) -> bool:
        """Whether the whole interval lies below 0."""
        return self.high is not None and self.high < 0

    @property
    def is_higher(self) -> bool:
        """Whether the whole interval lies above 0."""
        return self.low is not None and self.low > 0


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    seed: int,
    groups: Sequence[str] | None = None,
    *,
    comparisons: int = 1,
) -> Difference:
    """The mean of second - first over items, and its percentile bootstrap interval (Efron and Tibshirani 1993, ch. 13).

    Args:
        first: a number for each item.
        second: likewise, in the same order.
        seed: of the resampling; the same numbers and seed give the same interval.
        groups: of each item, what it belongs to; groups are drawn whole. None: each item is one.
        comparisons: so many differences are looked at together, of which the best will be chosen: each interval is as
            wide as lets all of them hold in 95 % (Bonferroni's inequality).

    Raises:
        ValueError: the lengths differ, or there are no items.

    >>> paired_difference([2.0, 3.0, 4.0], [1.0, 2.0, 3.0], 0)
    Difference(mean=-1.0, low=-1.0, high=-1.0)
    """
    differences = [other - one for one, other in zip(first, second, strict=True)]
    if not differences:
        raise ValueError("no items to compare")
    _, places = np.unique(np.arange(len(differences)) if groups is None else np.asarray(groups), return_inverse=True)
    sums, counts = np.bincount(places, weights=differences), np.bincount(places)
    if len(sums) == 1:
        return Difference(fmean(differences), None, None)
    draws = np.random.default_rng(seed_for(seed, "bootstrap", len(sums)))
    chosen = draws.integers(0, len(sums), size=(RESAMPLES, len(sums)))
    means = sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1)
    outside = (1 - LEVEL) / comparisons
    low, high = np.quantile(means, [outside / 2, 1 - outside / 2])
    return Difference(fmean(differences), float(low), float(high))
