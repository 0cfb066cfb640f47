"""Held-out loss: the velocity's mean squared error at fixed items, timesteps and noise, for base and adapter.

A training loss says little, for its timesteps are drawn anew each time and their spread hides what is learned. Here
every point (item, timestep, noise) is the same at every validation, on every machine and for base and adapter, so that
differences are the adapter's. The loss differs much more between timesteps than between adapters: read the rows.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from wangen.generator.errors import many
from wangen.generator.steps import Train
from wangen.runtime.fast import graphs
from wangen.runtime.loader import CachedSample, Draw, read_batch
from wangen.runtime.randomness import generator_for
from wangen.runtime.training.plan import ExpertPlan
from wangen.runtime.training.prepared import Prepared, clean_frames

log = logging.getLogger("wangen")

Judge = Callable[[Prepared], torch.Tensor]
"""The plain mean squared error of each item, (B,), for latents that are made ready as in training."""


@dataclass(frozen=True)
class Losses:
    """The losses of one model at every point.

    Attributes:
        keys: the items' content keys.
        sigmas: the noise levels.
        seed: of the noise.
        values: for each item its loss at each noise level.
    """

    keys: tuple[str, ...]
    sigmas: tuple[float, ...]
    seed: int
    values: tuple[tuple[float, ...], ...]

    def as_facts(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @staticmethod
    def from_facts(facts: Mapping[str, Any]) -> "Losses":
        """What `as_facts` gave, also after it went through JSON."""
        values = tuple(tuple(row) for row in facts["values"])
        return Losses(tuple(facts["keys"]), tuple(facts["sigmas"]), facts["seed"], values)

    def same_points(self, other: "Losses") -> bool:
        """Whether both were measured at the same points, so that they can be compared."""
        return (self.keys, self.sigmas, self.seed) == (other.keys, other.sigmas, other.seed)


@dataclass(frozen=True)
class ValidationRow:
    """The mean loss over all items at one timestep, in [0, 1000]."""

    timestep: float
    base: float
    adapter: float
    ema: float | None


@dataclass(frozen=True)
class Validation:
    """What an adapter has learned of items that it never saw.

    Attributes:
        rows: by timestep.
        mean_base: over all points.
        mean_adapter: over all points.
        mean_ema: of the averaged weights, where they are kept.
        num_items: held-out items.
        delta: mean_adapter - mean_base; below 0 the adapter is better.
        standard_error: of delta, over the items' files (each item compared with itself), those of one video being one;
            None of a single one.
        num_better: items at which the adapter is better.
    """

    rows: tuple[ValidationRow, ...]
    mean_base: float
    mean_adapter: float
    mean_ema: float | None
    num_items: int
    delta: float
    standard_error: float | None
    num_better: int

    @property
    def is_average_better(self) -> bool:
        """Whether the averaged weights have the lower mean loss; of equal ones they have not."""
        if self.mean_ema is None:
            return False
        return self.mean_ema < self.mean_adapter or not math.isfinite(self.mean_adapter)

    @property
    def lowest(self) -> float:
        """The mean loss of the adapter or of its average, whichever is lower."""
        return self.mean_ema if self.mean_ema is not None and self.is_average_better else self.mean_adapter

    def as_record(self) -> dict[str, Any]:
        """As a line of `metrics.jsonl`."""
        return {"validation": asdict(self)}

    def numbers(self) -> dict[str, float]:
        """As single numbers for an experiment log, by name."""
        means = {"base": self.mean_base, "adapter": self.mean_adapter, "delta": self.delta}
        found = means | ({} if self.mean_ema is None else {"ema": self.mean_ema})
        timesteps = [row.timestep for row in self.rows]
        digits = next((n for n in range(4) if len({f"{t:.{n}f}" for t in timesteps}) == len(timesteps)), 4)
        width = 4 + (digits and digits + 1)
        return found | {f"timestep_{row.timestep:0{width}.{digits}f}": row.adapter for row in self.rows}

    def lines(self) -> list[str]:
        """For the log: the means, then a row per timestep."""
        spread = "" if self.standard_error is None else f" ± {self.standard_error:.5f}"
        averaged = "" if self.mean_ema is None else f"; averaged weights {self.mean_ema:.5f}"
        head = (
            f"held-out loss {self.mean_adapter:.5f}, base {self.mean_base:.5f}, difference {self.delta:+.5f}{spread}, "
            f"better at {self.num_better} of {many(self.num_items, 'item')}{averaged}"
        )
        return [head, *(f"  t {row.timestep:5.1f}  {row.base:.5f} -> {row.adapter:.5f}" for row in self.rows)]


def stratified_sigmas(low: float, high: float, number: int) -> tuple[float, ...]:
    """The midpoints of so many equal parts of [low, high]: even over the range, and never at its ends.

    >>> stratified_sigmas(0.0, 1.0, 4)
    (0.125, 0.375, 0.625, 0.875)
    """
    return tuple(low + (high - low) * (part + 0.5) / number for part in range(number))


def validation_sigmas(options: Train, expert: ExpertPlan) -> tuple[float, ...]:
    """The noise levels at which a run judges an expert: even over what it is trained at."""
    low, high = max(expert.low, options.min_timestep / 1000), min(expert.high, options.max_timestep / 1000)
    return stratified_sigmas(low, high, options.validation_timesteps)


def measure(
    judge: Judge,
    samples: Sequence[CachedSample],
    sigmas: Sequence[float],
    seed: int,
    *,
    condition_frames: int = 0,
    on_item: Callable[[str], None] = lambda _name: None,
) -> Losses:
    """The loss of each sample at each noise level, with noise drawn for (seed, item, noise level).

    Call it inside `evaluating`. No gradient is kept and no global random state is touched.

    Args:
        judge: the model, as `step.item_errors`.
        samples: held-out items from the cache; their first caption counts.
        sigmas: noise levels from `stratified_sigmas`.
        seed: of the noise.
        condition_frames: first frames of a clip that are given clean (TI2V), 4n+1 or 0.
        on_item: told each item's name when it is done.
    """
    rows = []
    for index, cached in enumerate(samples):
        batch = read_batch(samples, [Draw(index, 0)])
        (key,), values = batch.keys, []
        given = clean_frames(condition_frames, batch.latents.shape[2])
        for number, sigma in enumerate(sigmas):
            noise = torch.randn(batch.latents.shape, generator=generator_for(seed, "validation", key, number))
            prepared = Prepared(batch, [(seed, 0, key, 0)], torch.tensor([sigma]), noise, [given])
            with torch.no_grad():
                values.append(judge(prepared).double().cpu())
        rows.append(tuple(torch.cat(values).tolist()))
        on_item(cached.sample.name)
    keys = tuple(cached.key for cached in samples)
    return Losses(keys, tuple(sigmas), seed, tuple(rows))


def compare(base: Losses, adapter: Losses, groups: Sequence[str], ema: Losses | None = None) -> Validation:
    """The rows and means of losses that were measured at the same points.

    Args:
        base: without what was trained.
        adapter: with it.
        groups: of each item what says which others it resembles, as `video_key` gives it.
        ema: with the average.

    Raises:
        ValueError: the points differ, or there are none.
    """
    if not all(base.same_points(other) for other in (adapter, *([ema] if ema else []))) or not base.values:
        raise ValueError("losses at different points, or at none, cannot be compared")
    rows = tuple(
        ValidationRow(1000 * sigma, _at(base, number), _at(adapter, number), _at(ema, number) if ema else None)
        for number, sigma in enumerate(base.sigmas)
    )
    differences = [fmean(ours) - fmean(theirs) for ours, theirs in zip(adapter.values, base.values, strict=True)]
    return Validation(
        rows=rows,
        mean_base=fmean(row.base for row in rows),
        mean_adapter=fmean(row.adapter for row in rows),
        mean_ema=fmean(_at(ema, number) for number in range(len(rows))) if ema else None,
        num_items=len(differences),
        delta=fmean(differences),
        standard_error=_standard_error(differences, groups),
        num_better=sum(difference < 0 for difference in differences),
    )


def _standard_error(differences: Sequence[float], groups: Sequence[str]) -> float | None:
    """The standard error of the mean where items of one group say the same; None of a single group.

    The estimator of a mean over clusters: of groups of one item each it is that of independent items.
    """
    mean = fmean(differences)
    sums: dict[str, float] = {}
    for difference, group in zip(differences, groups, strict=True):
        sums[group] = sums.get(group, 0.0) + difference - mean
    if len(sums) < 2:
        return None
    variance = sum(value * value for value in sums.values()) * len(sums) / (len(sums) - 1)
    return math.sqrt(variance) / len(differences)


def _at(losses: Losses, number: int) -> float:
    """The mean over the items at one noise level."""
    return fmean(row[number] for row in losses.values)


def is_better(validation: Validation, best: float | None) -> bool:
    """Whether `--keep_best` keeps what was judged; of equal ones the earlier stays, what is not finite never is best.

    Args:
        validation: of the adapter, and of its average if there is one, as they are now.
        best: the mean loss of the best one so far, None before the first.
    """
    return math.isfinite(validation.lowest) and (best is None or validation.lowest < best)


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """While the block runs nothing drops out; then every module's mode is what it was."""
    graphs.make_room()
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
