"""What the page tells of continuations of held-out clips: their quality by frame, by step and by clip."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from wangen.runtime.report.charts import chart_of, points_of
from wangen.runtime.report.metrics_log import Record
from wangen.runtime.report.plotting import Chart, Line, Point
from wangen.runtime.report.step_reports import is_number, mapping
from wangen.runtime.report.tables import Table

_LINES = (("model", "continuation", "main"), ("copy", "last given frame, repeated", "base"),
          ("vae", "the VAE itself", "average"))  # fmt: skip
"""What is compared: its name in a record, its words, its look."""
_UNITS = (("psnr", "PSNR", "dB", "{:.2f}"), ("ssim", "SSIM", "", "{:.3f}"))

Told = tuple[int, dict[str, Any]]
"""A step, and what its line says of the continuations."""


def continuations(records: Sequence[Record]) -> list[Told]:
    """Those lines of `metrics.jsonl` that tell of continuations."""
    return [(record["step"], told) for record in records if isinstance(told := record.get("continuations"), dict)]


def continuation_charts(records: Sequence[Record]) -> list[Chart]:
    """PSNR and SSIM of each frame at the last step, then their means over the steps."""
    told = continuations(records)
    charts = [*_by_frame(*told[-1]), *_by_step(told)] if told else []
    return [chart for chart in charts if chart is not None]


def _by_frame(step: int, told: dict[str, Any]) -> Iterator[Chart | None]:
    for unit, title, shown, _ in _UNITS:
        lines = [Line(words, _frames(told, name, unit), look) for name, words, look in _LINES]
        note = f"at step {step}, mean of the clips; frames are counted from 0, and those before were given"
        yield chart_of(f"continued-{unit}-frames", f"{title} of each frame", note, shown, lines, "frame")


def _by_step(told: Sequence[Told]) -> Iterator[Chart | None]:
    for unit, title, shown, _ in _UNITS:
        lines = [
            Line(words, points_of((step, _mean(one, name, unit)) for step, one in told), look)
            for name, words, look in _LINES
        ]
        note = "means over the continued frames; higher is better, and the VAE itself is the most to hope for"
        yield chart_of(f"continued-{unit}", f"{title} of continuations", note, shown, lines)


def _mean(told: dict[str, Any], name: str, unit: str) -> Any:
    return mapping(mapping(told, "means"), name).get(unit)


def _clips(told: dict[str, Any]) -> list[dict[str, Any]]:
    clips = told.get("clips")
    return [clip for clip in clips if isinstance(clip, dict)] if isinstance(clips, list) else []


def _values(clip: dict[str, Any], name: str, unit: str) -> list[Any]:
    """One value for each frame after the given ones."""
    values = mapping(clip, name).get(unit)
    return values if isinstance(values, list) else []


def _frames(told: dict[str, Any], name: str, unit: str) -> list[Point]:
    """By the frame's number the mean over the clips that are so long."""
    found: dict[float, list[float]] = {}
    for clip in _clips(told):
        given = clip.get("given_frames")
        if is_number(given):
            for frame, value in points_of((given + at, value) for at, value in enumerate(_values(clip, name, unit))):
                found.setdefault(frame, []).append(value)
    return [(frame, fmean(values)) for frame, values in sorted(found.items())]


def continuation_table(records: Sequence[Record]) -> Table | None:
    """The means of each clip at the last step, and of all together."""
    told = continuations(records)
    if not told:
        return None
    step, last = told[-1]
    rows = []
    for clip in _clips(last):
        cells = [(_values(clip, name, unit), form) for unit, _, _, form in _UNITS for name, *_ in _LINES]
        given = clip.get("given_frames")
        rows.append((str(clip.get("name", "")), str(given) if is_number(given) else "",
                     *(_mean_text(values, form) for values, form in cells)))  # fmt: skip
    means = [(_mean(last, name, unit), form) for unit, _, _, form in _UNITS for name, *_ in _LINES]
    rows.append(("all clips", "", *(_mean_text([value], form) for value, form in means)))
    others = ("repeated frame", "VAE")
    head = ("clip", "given frames", *(name for _, title, *_ in _UNITS for name in (title, *others)))
    return Table(f"Continuations at step {step}: PSNR in dB and SSIM, means over the continued frames", head, rows)


def _mean_text(values: Sequence[Any], form: str) -> str:
    numbers = [value for value in values if is_number(value)]
    return form.format(fmean(numbers)) if numbers else ""
