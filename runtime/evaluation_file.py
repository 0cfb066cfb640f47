"""`evaluation.json`: what the step `evaluate` found of the checkpoints of a run, and what the report shows of it.

Plain JSON with the fields of `Evaluation`. Losses are held-out mean squared errors of the velocity, by the checkpoint's
name; lower is better. Paths are relative to the file's folder, with forward slashes; those of LoRAs which lie neither
in this folder nor in one beside it are absolute. Needs no torch.
"""

import json
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from wangen.generator.errors import WangenError, unreadable
from wangen.generator.files import write_text

BASE = "base"
"""What the model without any LoRA is called among a video's files."""

_CURE = "run evaluate again"


@dataclass(frozen=True)
class ScoredCheckpoint:
    """One checkpoint, judged.

    Attributes:
        name: short and unique, as the other tables call it.
        file: the LoRA, relative as `told_path` writes it, or absolute; of two experts the low-noise one, empty where
            the other alone has one.
        mean_loss: over all points.
        delta: mean_loss less the base's; below 0 the checkpoint is better.
        ci_low: lower end of delta's paired bootstrap interval over the held-out files; None of a single file.
        ci_high: upper end, likewise.
        rank: 1 is the best.
        step: optimizer steps, of two experts those of their run, and of the later file; None when it is not known.
        file_high_noise: the high-noise expert's LoRA; empty for models with one transformer, and where it has none.
        file_steps: of two experts' files each one's step, the high-noise one's first; empty of one file.
    """

    name: str
    file: str
    mean_loss: float
    delta: float
    ci_low: float | None
    ci_high: float | None
    rank: int
    step: int | None = None
    file_high_noise: str = ""
    file_steps: tuple[int, ...] = ()

    @property
    def is_better(self) -> bool:
        """Whether the whole interval lies below the base."""
        return self.ci_high is not None and self.ci_high < 0

    @property
    def is_worse(self) -> bool:
        """Whether the whole interval lies above the base."""
        return self.ci_low is not None and self.ci_low > 0

    def interval(self, confidence: float) -> str:
        """Of the difference, in words."""
        if self.ci_low is None or self.ci_high is None:
            return "no interval, as a single file is held out"
        return f"{100 * confidence:.0f} % interval {self.ci_low:+.5f} to {self.ci_high:+.5f}"


@dataclass(frozen=True)
class Row:
    """Losses of the base and of every checkpoint on a part of the points.

    Attributes:
        name: the part: a timestep in [0, 1000], an activity, or a set that was not trained on.
        base: mean loss of the base.
        losses: checkpoint -> mean loss.
        num_items: how many items it is the mean of; 0 when that is not said.
    """

    name: str
    base: float
    losses: Mapping[str, float]
    num_items: int = 0


@dataclass(frozen=True)
class Video:
    """The same prompt and noise for the base and for checkpoints.

    Attributes:
        activity: what it shows, as the rows by activity call it.
        prompt: as it was sampled.
        seed: of the noise.
        files: `base` or checkpoint -> file.
        signals: `base` or checkpoint -> signal -> value (freeze, black, flicker, motion, PSNR to the base …).
        controls: copies of the control images that an edit began with.
    """

    activity: str
    prompt: str
    seed: int
    files: Mapping[str, str]
    signals: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    controls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Memorisation:
    """How near a generated video is to the training clips, in latent space.

    Attributes:
        checkpoint: which made it.
        video: its file.
        nearest: the nearest training clip.
        distance: to it.
        usual_distance: of the base's video of the same prompt and seed to its nearest clip.
        suspicious: it is so near that it is probably a copy.
    """

    checkpoint: str
    video: str
    nearest: str
    distance: float
    usual_distance: float | None = None
    suspicious: bool = False


@dataclass(frozen=True)
class Evaluation:
    """All that `evaluate` found.

    Attributes:
        mean_base: held-out loss of the base over all points.
        checkpoints: in any order.
        best: name of the best one.
        num_items: held-out items.
        num_trained: those of them that were trained on after all, as far as is known.
        confidence: of the intervals, 0 to 1.
        per_timestep: rows named by the timestep.
        per_activity: rows named by the activity.
        forgetting: rows of sets outside of what was trained; there a rise is a loss of what the base could.
        videos: in the order in which they are shown.
        memorisation: of videos and training clips.
        warnings: sentences for people.
    """

    mean_base: float
    checkpoints: tuple[ScoredCheckpoint, ...]
    best: str
    num_items: int = 0
    num_trained: int = 0
    confidence: float = 0.95
    per_timestep: tuple[Row, ...] = ()
    per_activity: tuple[Row, ...] = ()
    forgetting: tuple[Row, ...] = ()
    videos: tuple[Video, ...] = ()
    memorisation: tuple[Memorisation, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def ranked(self) -> list[ScoredCheckpoint]:
        """The checkpoints, best first."""
        return sorted(self.checkpoints, key=lambda checkpoint: checkpoint.rank)

    @property
    def winner(self) -> ScoredCheckpoint:
        """The best checkpoint."""
        return next(checkpoint for checkpoint in self.checkpoints if checkpoint.name == self.best)


def told_path(file: Path, folder: Path) -> str:
    """How a path is written: relative to the evaluation's folder where the file lies in that or in one beside it.

    >>> told_path(Path("/runs/cats/a.safetensors"), Path("/runs/cats"))
    'a.safetensors'
    >>> told_path(Path("/runs/cats/a.safetensors"), Path("/runs/judged"))
    '../cats/a.safetensors'
    """
    file, folder = file.resolve(), folder.resolve()
    if file.is_relative_to(folder):
        return file.relative_to(folder).as_posix()
    beside = folder.parent
    if beside != beside.parent and file.is_relative_to(beside):
        return f"../{file.relative_to(beside).as_posix()}"
    return file.as_posix()


def write_evaluation(evaluation: Evaluation, path: Path) -> None:
    """Write the file, whole or not at all.

    Raises:
        WangenError: the disk refused.
        ValueError: a number is not finite.
    """
    write_text(path, json.dumps(asdict(evaluation), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_evaluation(path: Path) -> Evaluation:
    """Read the file; keys that are not known here are a newer version's and are left out.

    Raises:
        WangenError: it cannot be read, is no JSON, or lacks or mistypes a field.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise WangenError(f"no JSON ({error})", where=str(path), cure=_CURE) from None
    try:
        evaluation: Evaluation = _made(Evaluation, found, "the file")
    except (TypeError, KeyError) as error:
        raise WangenError(f"no evaluation: {error.args[0]}", where=str(path), cure=_CURE) from None
    if evaluation.best not in {checkpoint.name for checkpoint in evaluation.checkpoints}:
        raise WangenError(f"the best checkpoint {evaluation.best!r} is not in its list", where=str(path), cure=_CURE)
    return evaluation


def _made(kind: Any, value: Any, name: str) -> Any:
    """A value of JSON as a field's type.

    Raises:
        TypeError: it is of another type, in words.
        KeyError: a field is missing, in words.
    """
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"{name} is no object")
        return kind(**_fields(kind, value, name))  # type: ignore[operator]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _made(inner[0], value, name)
    if origin is tuple and isinstance(value, list):
        return tuple(_made(inner[0], part, name) for part in value)
    if origin is Mapping and isinstance(value, dict):
        return {str(key): _made(inner[1], part, name) for key, part in value.items()}
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) <= sys.float_info.max:
            return float(value)
    elif origin is None and type(value) is kind and (kind is not int or abs(value) < 2**63):
        return value
    raise TypeError(f"{name} has the value {value!r:.40}")


def _fields(kind: Any, value: Mapping[str, Any], name: str) -> dict[str, Any]:
    made = {}
    for part in fields(kind):
        if part.name in value:
            made[part.name] = _made(typing.get_type_hints(kind)[part.name], value[part.name], part.name)
        elif part.default is MISSING and part.default_factory is MISSING:
            raise KeyError(f"{name} has no {part.name}")
    return made
