"""Distributions of sigma on [0, 1], each with an exact cdf and quantile.

sigma is the noise level: 0 is the clean latent, 1 is noise. sigma = quantile(u) of ONE uniform number u in [0, 1) draws
it, so that a range is cut out without rejecting a draw, draws can be stratified, and the share of any range is known.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Protocol

from wangen.runtime.flow import sigmoid

_NORMAL = NormalDist()


class Distribution(Protocol):
    """A distribution of sigma on [0, 1]."""

    def cdf(self, sigma: float) -> float:
        """The share of draws at or below sigma."""

    def quantile(self, u: float) -> float:
        """The sigma that a share u of the draws, in [0, 1], lies below: the inverse of `cdf`."""


@dataclass(frozen=True)
class Uniform:
    """Every sigma alike."""

    def cdf(self, sigma: float) -> float:
        """See `Distribution`."""
        return min(max(sigma, 0.0), 1.0)

    def quantile(self, u: float) -> float:
        """See `Distribution`."""
        return u


@dataclass(frozen=True)
class LogitNormal:
    """sigma = sigmoid(n) for a normal n: https://arxiv.org/abs/2403.03206, eq. 19.

    A shift of S adds log S to the mean: S sigma / (1 + (S - 1) sigma) has the odds of sigma times S.

    Attributes:
        mean: of n.
        deviation: of n, above 0.

    >>> LogitNormal(math.log(3), 1.0).quantile(0.5)
    0.75
    """

    mean: float
    deviation: float

    def cdf(self, sigma: float) -> float:
        """See `Distribution`."""
        if not 0 < sigma < 1:
            return 0.0 if sigma <= 0 else 1.0
        logit = math.log(sigma) - math.log1p(-sigma)
        # The complement keeps the digits of a small share, which 1 + erf would lose.
        return 0.5 * math.erfc((self.mean - logit) / (self.deviation * math.sqrt(2)))

    def quantile(self, u: float) -> float:
        """See `Distribution`."""
        if not 0 < u < 1:
            return 0.0 if u <= 0 else 1.0
        return sigmoid(self.mean + self.deviation * _NORMAL.inv_cdf(u))


@dataclass(frozen=True)
class Mode:
    """sigma = 1 - u - s (cos²(pi u / 2) - 1 + u) for a uniform u: https://arxiv.org/abs/2403.03206, eq. 20.

    Attributes:
        scale: s, within `wangen.generator.train_refusals.MODE_SCALES`; above 0 favours the middle, below 0 both ends.
    """

    scale: float

    def cdf(self, sigma: float) -> float:
        """See `Distribution`; by bisection, for the curve has no inverse in closed form."""
        return _bisected(self.quantile, sigma, 0.0, 1.0)

    def quantile(self, u: float) -> float:
        """See `Distribution`; the published curve falls with u, and taken at 1 - u it rises."""
        return u + self.scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)


@dataclass(frozen=True)
class Mixture:
    """Draws from several distributions, each with its share.

    Attributes:
        parts: share and distribution of each; the shares sum to 1.
    """

    parts: tuple[tuple[float, Distribution], ...]

    def cdf(self, sigma: float) -> float:
        """See `Distribution`."""
        return math.fsum(share * part.cdf(sigma) for share, part in self.parts)

    def quantile(self, u: float) -> float:
        """See `Distribution`; by bisection between the quantiles of the parts."""
        ends = [part.quantile(u) for _, part in self.parts]
        return _bisected(self.cdf, u, min(ends), max(ends))


@dataclass(frozen=True)
class Squeezed:
    """A distribution moved whole into a range: its shape is kept, its place is not.

    Attributes:
        base: the distribution on [0, 1].
        low: lowest sigma.
        high: highest sigma, above `low`.
    """

    base: Distribution
    low: float
    high: float

    def cdf(self, sigma: float) -> float:
        """See `Distribution`."""
        return self.base.cdf((sigma - self.low) / (self.high - self.low))

    def quantile(self, u: float) -> float:
        """See `Distribution`."""
        return _within(self.low + (self.high - self.low) * self.base.quantile(u), self.low, self.high)


@dataclass(frozen=True)
class Cut:
    """The part of a distribution that falls into a range, as if every draw outside of it had been thrown away.

    Attributes:
        base: the distribution.
        low: lowest sigma.
        high: highest sigma; `base` has some mass in the range.
    """

    base: Distribution
    low: float
    high: float

    @cached_property
    def _shares(self) -> tuple[float, float]:
        below = self.base.cdf(self.low)
        return below, self.base.cdf(self.high) - below

    def cdf(self, sigma: float) -> float:
        """See `Distribution`."""
        below, mass = self._shares
        return (self.base.cdf(_within(sigma, self.low, self.high)) - below) / mass

    def quantile(self, u: float) -> float:
        """See `Distribution`."""
        below, mass = self._shares
        return _within(self.base.quantile(below + u * mass), self.low, self.high)


def share(distribution: Distribution, low: float, high: float) -> float:
    """The share of draws with low < sigma <= high.

    >>> share(Uniform(), 0.875, 1.0)
    0.125
    """
    return distribution.cdf(high) - distribution.cdf(low)


def _within(number: float, low: float, high: float) -> float:
    return min(max(number, low), high)


def _bisected(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a rising function has the wanted value, between two arguments; 60 halvings exhaust a float's digits."""
    if wanted <= rising(low):
        return low
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < wanted:
            low = middle
        else:
            high = middle
    return high
