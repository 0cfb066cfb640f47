"""The charts of a run: from the lines of `metrics.jsonl` to `Chart`s."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from wangen.runtime.report.metrics_log import Record
from wangen.runtime.report.plotting import Chart, Line, Point, smoothed

_LOOKS = ("main", "second")
_FOUR_LOOKS = (*_LOOKS, "average", "base")
_HUGE, _TINY = 1e30, 1e-30
_SMOOTH_FROM = 20
"""Steps; fewer are shown as they are."""


@dataclass(frozen=True)
class _Spec:
    """A chart of single numbers: which of a record, and what they are multiplied by."""

    key: str
    title: str
    unit: str
    note: str
    columns: tuple[tuple[str, str], ...]
    factor: float = 1.0
    smooth: bool = False
    wide: bool = False


_RATES = (
    _Spec("grad-norm", "Gradient norm", "", "before clipping; a spike is a step that may have done harm",
          (("grad_norm", "gradient norm"),), smooth=True, wide=True),
    _Spec("seconds", "Time per step", "s", "without saving, validating and sampling", (("s_per_step", "step"),)),
    _Spec("tokens", "Throughput", "tokens/s", "video tokens that were trained on", (("tokens_per_s", "tokens"),)),
    _Spec("waiting", "Waiting for data", "%", "share of the time; above 10 % the cache is read too slowly",
          (("data_wait_share", "waiting"),), 100.0),
    _Spec("communication", "Waiting for other processes", "%",
          "share of the time that its steps stand in collectives; where all are equally fast the lines lie together",
          (("communication_share_max", "most of a process"), ("communication_share_min", "least")), 100.0),
    _Spec("memory", "Memory at most", "GB", "on a GPU what torch held, else this process",
          (("peak_memory_bytes", "memory"),), 1e-9),
    _Spec("mfu", "Use of the card", "%", "of its peak in bfloat16; 40 % is good with full checkpointing",
          (("mfu", "work that the model needs"), ("hfu", "with what is computed again")), 100.0),
)  # fmt: skip


def make_charts(records: Sequence[Record], trained: str = "LoRA") -> list[Chart]:
    """All charts that have something to show, in their order on the page; `trained` is what was trained."""
    found = [_loss(records), *_held_out(records, trained), *_by_bins(records), _learning_rates(records)]
    found += [_rate(records, spec) for spec in _RATES]
    return [chart for chart in found if chart is not None]


def window_of(num_steps: int) -> int:
    """Over how many steps a curve is smoothed.

    >>> window_of(10), window_of(100), window_of(5000)
    (1, 5, 100)
    """
    return max(5, num_steps // 50) if num_steps >= _SMOOTH_FROM else 1


def experts_of(records: Iterable[Record]) -> list[str]:
    """The experts that were trained or judged, in their order: `[""]` where there is only one transformer."""
    named = (str(record.get("expert", "")) for record in records if "loss" in record or "validation" in record)
    return list(dict.fromkeys(named)) or [""]


def validations(records: Iterable[Record], expert: str) -> list[tuple[int, dict[str, Any]]]:
    """The validations of an expert: (step, what the line says)."""
    return [
        (record["step"], record["validation"])
        for record in records
        if isinstance(record.get("validation"), dict) and record.get("expert", "") == expert
    ]


def comparable(points: Sequence[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    """Those validations that judged by the same as the last: by other items or timesteps the base has another loss."""
    base = [str(told.get("mean_base")) for _, told in points]  # words, so that NaN is NaN
    return [point for point, own in zip(points, base, strict=True) if own == base[-1]]


def points_of(pairs: Iterable[tuple[Any, Any]], factor: float = 1.0) -> list[Point]:
    """Those pairs that are numbers that can be drawn; what is as good as zero is zero."""
    return [
        (float(x), factor * y if abs(y) >= _TINY else 0.0)
        for x, y in pairs
        if isinstance(y, int | float) and not isinstance(y, bool) and abs(y) <= _HUGE
    ]


def _column(records: Iterable[Record], name: str, expert: str, factor: float = 1.0) -> list[Point]:
    ours = (record for record in records if name in record and record.get("expert", "") == expert)
    return points_of(((record["step"], record[name]) for record in ours), factor)


def chart_of(key: str, title: str, note: str, unit: str, lines: Iterable[Line], x_name: str = "step") -> Chart | None:
    """A chart of the lines that have points; None where none has."""
    drawn = [line for line in lines if line.points]
    return Chart(key, title, note, unit, drawn, x_name) if drawn else None


def _named(expert: str, name: str) -> str:
    return f"{expert.replace('_', ' ')}: {name}" if expert else name


def _with_smoothed(name: str, points: list[Point], look: str) -> list[Line]:
    """A curve as it is, and its smoothed one over it where there are enough points for one."""
    window = window_of(len(points))
    if window == 1:
        return [Line(name, points, look)]
    raw = "raw" if look == "main" else f"{look}-raw"
    return [Line(f"{name}, each step", points, raw), Line(f"{name}, mean of about {window}",
                                                          smoothed(points, window), look)]  # fmt: skip


def _loss(records: Sequence[Record]) -> Chart | None:
    lines: list[Line] = []
    for expert, look in zip(experts_of(records), _LOOKS, strict=False):
        lines += _with_smoothed(_named(expert, "loss"), _column(records, "loss", expert), look)
    note = "noisy by nature: every step has other items, noise and timesteps; the held-out loss says more"
    return chart_of("loss", "Training loss", note, "", lines)


def _held_out(records: Sequence[Record], trained: str) -> list[Chart | None]:
    found: list[Chart | None] = []
    for expert in experts_of(records):
        everything = validations(records, expert)
        points = comparable(everything)
        if not points:
            continue
        key, of = _of_expert(expert)
        means = [
            Line(name, points_of((step, told.get(field)) for step, told in points), look)
            for name, field, look in (
                ("base", "mean_base", "base"),
                (trained, "mean_adapter", "main"),
                ("average", "mean_ema", "average"),
            )
        ]
        note = "items that were never trained on; lower is better, and rising means learning by heart"
        if len(points) < len(everything):
            note += f"; what was judged by other items or timesteps, before step {points[0][0]}, is left out"
        found.append(chart_of(f"held-out{key}", f"Held-out loss{of}", note, "", means))
        found += [_by_timestep(points, key, of, trained), _gains(points, key, of, trained)]
    return found


def rows_of(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a validation by timestep; those that are none are left out."""
    rows = told.get("rows")
    known = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [row for row in known if points_of([(0, row.get("timestep"))])]


def _by_timestep(points: Sequence[tuple[int, dict[str, Any]]], key: str, of: str, trained: str) -> Chart | None:
    step, told = points[-1]
    lines = [
        Line(name, points_of((row["timestep"], row.get(field)) for row in rows_of(told)), look)
        for name, field, look in (
            ("base", "base", "base"),
            (f"{trained} at step {step}", "adapter", "main"),
            ("average", "ema", "average"),
        )
    ]
    note = "style shows at low timesteps, shapes and motion at high ones"
    return chart_of(f"timesteps{key}", f"Held-out loss by timestep{of}", note, "", lines, "timestep")


def _gains(points: Sequence[tuple[int, dict[str, Any]]], key: str, of: str, trained: str) -> Chart | None:
    """The trained loss less the base's at each timestep, over the steps."""
    if len(points) < 2:
        return None
    gains: dict[float, list[Point]] = {}
    for step, told in points:
        for row in rows_of(told):
            both = points_of([(step, row.get("adapter")), (step, row.get("base"))])
            if len(both) == 2:
                gains.setdefault(float(row["timestep"]), []).append((step, both[0][1] - both[1][1]))
    lines = _scaled((f"t {timestep:g}", values) for timestep, values in sorted(gains.items()))
    note = f"{trained} less base at each timestep; below 0 the {trained} is better"
    return chart_of(f"gains{key}", f"What was gained by timestep{of}", note, "", lines)


def _by_bins(records: Sequence[Record]) -> list[Chart | None]:
    """A chart of those records that name no expert, and one of each expert."""
    told = [record for record in records if isinstance(record.get("loss_by_timestep"), dict)]
    found = []
    for expert in dict.fromkeys(str(record.get("expert", "")) for record in told):
        bins: dict[str, list[Point]] = {}
        for record in (record for record in told if record.get("expert", "") == expert):
            for name, value in record["loss_by_timestep"].items():
                bins.setdefault(str(name), []).extend(points_of([(record["step"], value)]))
        named = ((f"t {name.replace('-', ' to ')}", sorted(bins[name])) for name in sorted(bins, key=_first_number))
        key, of = _of_expert(expert)
        note = "means of an epoch, in ten parts of the timesteps"
        found.append(chart_of(f"bins{key}", f"Training loss by timestep{of}", note, "", _scaled(named)))
    return found


def _of_expert(expert: str) -> tuple[str, str]:
    """What a chart of one expert has behind its key and its title."""
    return (f"-{expert.replace('_', '-')}", f", {expert.replace('_', '-')} expert") if expert else ("", "")


def _first_number(name: str) -> float:
    first = name.partition("-")[0]
    return float(first) if first.isdecimal() else math.inf


def _scaled(named: Iterable[tuple[str, list[Point]]]) -> list[Line]:
    """Lines that go from one end of the scale of colours to the other."""
    pairs = list(named)
    return [
        Line(name, points, f"b{round(9 * number / max(1, len(pairs) - 1))}")
        for number, (name, points) in enumerate(pairs)
    ]


def _learning_rates(records: Sequence[Record]) -> Chart | None:
    names = dict.fromkeys(name for record in records for name in record if name.startswith(("lr", "d*lr")))
    named = [(expert, name) for expert in experts_of(records) for name in names]
    lines = [
        Line(_named(expert, name), _column(records, name, expert), look)
        for (expert, name), look in zip(named, cycle(_FOUR_LOOKS), strict=False)
    ]
    return chart_of("learning-rate", "Learning rate", "as the schedule gave it", "", lines)


def _rate(records: Sequence[Record], spec: _Spec) -> Chart | None:
    lines: list[Line] = []
    named = [(expert, column, name) for expert in experts_of(records) for column, name in spec.columns]
    for (expert, column, name), look in zip(named, cycle(_FOUR_LOOKS), strict=False):
        points, name = _column(records, column, expert, spec.factor), _named(expert, name)
        lines += _with_smoothed(name, points, look) if spec.smooth else [Line(name, points, look)]
    found = chart_of(spec.key, spec.title, spec.note, spec.unit, lines)
    return replace(found, wide=spec.wide) if found else None
