"""From losses at fixed points to what a person reads: means, rows by timestep and activity, intervals, the ranking."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from wangen.runtime.evaluation.intervals import Difference, paired_difference
from wangen.runtime.evaluation_file import BASE, Row, ScoredCheckpoint, told_path
from wangen.runtime.loader import CachedSample
from wangen.runtime.training.held_out import video_key
from wangen.runtime.training.validation import Losses


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that is judged.

    Attributes:
        name: short and unique.
        step: optimizer steps, of two experts those of their run, and of the later file; None when nothing says it.
        file: its LoRA; of two experts the low-noise one, None where the other alone has one.
        file_high_noise: the high-noise expert's; None for models with one transformer, and where it has none.
        file_steps: of two experts' files each one's step, the high-noise one's first; empty of one file.
    """

    name: str
    step: int | None
    file: Path | None
    file_high_noise: Path | None = None
    file_steps: tuple[int, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Its LoRAs, one or two."""
        return tuple(filter(None, (self.file, self.file_high_noise)))


def name_of(who: Candidate | None) -> str:
    """What a candidate is called, or the base."""
    return who.name if who else BASE


def sources_of(items: Sequence[CachedSample]) -> list[str]:
    """Of each item the digest of its file."""
    return [item.sample.source.digest for item in items]


def independent(items: Sequence[CachedSample]) -> list[str]:
    """Of each item what says which others it resembles: the video that it was cut from, or else its file."""
    return [video_key(item) for item in items]


def joined(parts: Sequence[Losses]) -> Losses:
    """The losses of both experts' ranges, of the same items, as those of one model, by rising noise level.

    Raises:
        ValueError: the items or the seeds differ.
    """
    first = parts[0]
    if any((part.keys, part.seed) != (first.keys, first.seed) for part in parts):
        raise ValueError("losses of different items cannot be joined")
    places = sorted(
        (sigma, number, place) for number, part in enumerate(parts) for place, sigma in enumerate(part.sigmas)
    )
    values = tuple(
        tuple(parts[number].values[item][place] for _, number, place in places) for item in range(len(first.keys))
    )
    return Losses(first.keys, tuple(sigma for sigma, _, _ in places), first.seed, values)


def difference(base: Losses, other: Losses, groups: Sequence[str], *, comparisons: int = 1) -> Difference:
    """How much lower or higher a checkpoint's loss is than the base's, with its interval over the items' files.

    Args:
        base: without any LoRA.
        other: with one.
        groups: of each item its file, or the video that it was cut from.
        comparisons: as for `paired_difference`: the number of checkpoints, where the best of them is chosen.

    Raises:
        ValueError: they were measured at different points.
    """
    _require_same(base, [other])
    return paired_difference(_of_items(base), _of_items(other), base.seed, groups, comparisons=comparisons)


def ranking(
    base: Losses, found: Mapping[str, Losses], candidates: Sequence[Candidate], groups: Sequence[str], folder: Path
) -> list[ScoredCheckpoint]:
    """The candidates by their mean loss, the lowest first; of equal ones the earlier stays first.

    Args:
        base: without any LoRA.
        found: candidate -> its losses at the same points.
        candidates: in the order of their steps.
        groups: of each item its file, or the video that it was cut from.
        folder: of the evaluation.
    """
    order = sorted(candidates, key=lambda candidate: mean(found[candidate.name]))
    made = []
    for rank, candidate in enumerate(order, start=1):
        losses = found[candidate.name]
        delta = difference(base, losses, groups, comparisons=len(candidates))
        made.append(
            ScoredCheckpoint(
                name=candidate.name,
                file=told_path(candidate.file, folder) if candidate.file else "",
                mean_loss=mean(losses),
                delta=delta.mean,
                ci_low=delta.low,
                ci_high=delta.high,
                rank=rank,
                step=candidate.step,
                file_high_noise=told_path(candidate.file_high_noise, folder) if candidate.file_high_noise else "",
                file_steps=candidate.file_steps,
            )
        )
    return made


def mean(losses: Losses) -> float:
    """Over all points."""
    return fmean(_of_items(losses))


def by_timestep(base: Losses, found: Mapping[str, Losses]) -> tuple[Row, ...]:
    """A row for each timestep, in [0, 1000]."""
    _require_same(base, found.values())

    def at(place: int) -> Callable[[Losses], float]:
        return lambda losses: fmean(row[place] for row in losses.values)

    return tuple(
        _row(f"{1000 * sigma:.1f}", base, found, at(place), len(base.keys)) for place, sigma in enumerate(base.sigmas)
    )


def by_activity(base: Losses, found: Mapping[str, Losses], activities: Sequence[str]) -> tuple[Row, ...]:
    """A row for each activity that has a name, in the order of their names.

    Args:
        base: without any LoRA.
        found: checkpoint -> losses.
        activities: of each item of `base.keys`; empty where neither label nor caption says one.
    """
    _require_same(base, found.values())

    def over(places: Sequence[int]) -> Callable[[Losses], float]:
        return lambda losses: fmean(fmean(losses.values[place]) for place in places)

    rows = []
    for activity in sorted(set(activities) - {""}):
        places = [place for place, name in enumerate(activities) if name == activity]
        rows.append(_row(activity, base, found, over(places), len(places)))
    return tuple(rows)


def whole(name: str, base: Losses, found: Mapping[str, Losses]) -> Row:
    """One row over all points of a set, for example one of what was not trained."""
    _require_same(base, found.values())
    return _row(name, base, found, mean, len(base.keys))


def _row(name: str, base: Losses, found: Mapping[str, Losses], of: Callable[[Losses], float], num_items: int) -> Row:
    return Row(name, of(base), {checkpoint: of(losses) for checkpoint, losses in found.items()}, num_items)


def _of_items(losses: Losses) -> list[float]:
    return [fmean(row) for row in losses.values]


def _require_same(base: Losses, others: Iterable[Losses]) -> None:
    if not base.values or not all(base.same_points(other) for other in others):
        raise ValueError("losses at different points, or at none, cannot be compared")


def activity_of(item: CachedSample) -> str:
    """What an item shows: its label in the manifest, else its caption."""
    return item.sample.item.label or item.sample.item.caption
