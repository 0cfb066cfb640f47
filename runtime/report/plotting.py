"""A chart as an SVG: nice ticks, thinned paths, and the same numbers for hovering and as a table.

Geometry is in the units of the SVG's view box, WIDTH x HEIGHT, with y downwards.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Point = tuple[float, float]

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 350, 10, 192
MAX_POINTS = 400
"""Of a line: more than a screen has columns for it."""
MAX_DOTS = 40
MAX_ROWS = 40


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: in the legend.
        points: (x, y) in the order of x, all finite.
        look: the class of its style: main, raw, second, second-raw, base, average, or b0 to b9 of a scale.
    """

    name: str
    points: Sequence[Point]
    look: str = "main"


@dataclass(frozen=True)
class Tick:
    """A mark of an axis: where it is, and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart: what it shows, in words and numbers.

    Attributes:
        key: unique on the page, of letters and dashes.
        title: what is shown.
        note: how to read it.
        unit: of y, behind the title; may be empty.
        lines: at least one, each with at least one point.
        x_name: what x counts.
        wide: whether y may span so much that only its logarithm can be read.
    """

    key: str
    title: str
    note: str
    unit: str
    lines: Sequence[Line]
    x_name: str = "step"
    wide: bool = False

    @cached_property
    def drawn(self) -> list[Line]:
        """The lines with no more points than can be seen."""
        return [Line(line.name, thinned(line.points, MAX_POINTS), line.look) for line in self.lines]

    @cached_property
    def logarithmic(self) -> bool:
        """Whether y spans so much that only its logarithm can be read."""
        values = [y for line in self.drawn for _, y in line.points]
        return self.wide and min(values) > 0 and max(values) / min(values) > 200

    @cached_property
    def _x_range(self) -> tuple[float, float]:
        return _widened([x for line in self.drawn for x, _ in line.points], 0.0, 1.0)

    @cached_property
    def _y_range(self) -> tuple[float, float]:
        values = [y for line in self.drawn for _, y in line.points]
        return _widened([math.log10(y) for y in values] if self.logarithmic else values, 0.05, 0.5)

    def x(self, value: float) -> float:
        """Where a value of x is."""
        low, high = self._x_range
        return round(LEFT + (RIGHT - LEFT) * (value - low) / (high - low), 1)

    def y(self, value: float) -> float:
        """Where a value of y is."""
        low, high = self._y_range
        value = math.log10(value) if self.logarithmic else value
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    @property
    def x_ticks(self) -> list[Tick]:
        """Marks of the axis of x, which are whole numbers."""
        return [Tick(self.x(value), text) for value, text in ticks(*self._x_range, 4, whole=True)]

    @property
    def y_ticks(self) -> list[Tick]:
        """Marks of the axis of y."""
        low, high = self._y_range
        if not self.logarithmic:
            return [Tick(self.y(value), text) for value, text in ticks(low, high, 4)]
        powers = range(math.ceil(low), math.floor(high) + 1)
        return [Tick(self.y(10.0**power), number_text(10.0**power)) for power in powers]

    def path(self, line: Line) -> str:
        """What an SVG path takes for a line of `drawn`."""
        return "M" + "L".join(f"{self.x(x):g} {self.y(y):g}" for x, y in line.points)

    def dots(self, line: Line) -> list[Point]:
        """Where the points of a line of `drawn` are, when they are few enough to be seen one by one."""
        return [(self.x(x), self.y(y)) for x, y in line.points] if len(line.points) <= MAX_DOTS else []

    @property
    def hover(self) -> dict[str, Any]:
        """What the page's script needs to show values: for every line its points in data and in the view box."""
        return {
            "x": self.x_name,
            "lines": [
                {"name": line.name, "points": [[self.x(x), self.y(y), f"{x:.10g}", number_text(y)]
                                               for x, y in line.points]}
                for line in self.drawn
            ],
        }  # fmt: skip

    @property
    def rows(self) -> list[list[str]]:
        """The same as a table: x, and of every line its value there, or the last one before and where that was."""
        marks = sorted({x for line in self.drawn for x, _ in line.points})
        last = len(marks) - 1
        chosen = marks if last < MAX_ROWS else [marks[last * n // (MAX_ROWS - 1)] for n in range(MAX_ROWS)]
        return [[f"{x:.10g}", *(_at(line.points, x) for line in self.drawn)] for x in chosen]


def _at(points: Sequence[Point], x: float) -> str:
    number = bisect_right(points, x, key=lambda point: point[0])
    if not number:
        return ""
    before, value = points[number - 1]
    return number_text(value) if before == x else f"{number_text(value)} (at {before:.10g})"


def _widened(values: Sequence[float], share: float, alone: float) -> tuple[float, float]:
    """The range of values with a share of it more on both sides; of a single value with such a part of the value."""
    low, high = min(values), max(values)
    more = (high - low) * share if high > low else abs(high) * alone or 1.0
    return low - more, high + more


def ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[tuple[float, str]]:
    """Round values within a range, about so many, with their texts.

    >>> ticks(0.093, 0.271, 4)
    [(0.1, '0.1'), (0.15, '0.15'), (0.2, '0.2'), (0.25, '0.25')]
    >>> [text for _, text in ticks(1, 3, 4, whole=True)]
    ['1', '2', '3']
    """
    rough = (high - low) / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(part * size for part in (1, 2, 5, 10) if part * size >= rough * 0.7)
    if whole:
        step = max(1.0, round(step))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(round(n * step, 12), number_text(n * step)) for n in range(first, last + 1)]


def number_text(value: float) -> str:
    """A number for people, with four digits.

    >>> [number_text(value) for value in (0.0, 12.0, 0.123456, 12000.0, 3.2e6, 0.0001, -0.00001234)]
    ['0', '12', '0.1235', '12k', '3.2M', '1e-4', '-1.234e-5']
    """
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if unit == 'k' else factor):.4g}{unit}"
    if value and abs(value) < 1e-3:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.4g}"


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: of equal parts the lowest and the highest, so that no spike is lost.

    >>> thinned([(x, 9.0 if x == 3 else 0.0) for x in range(8)], 4)
    [(0, 0.0), (3, 9.0), (4, 0.0)]
    """
    if len(points) <= limit:
        return list(points)
    parts = limit // 2
    kept: list[Point] = []
    for number in range(parts):
        part = points[len(points) * number // parts : len(points) * (number + 1) // parts]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """An exponential moving mean over about `window` points, without the pull to zero at its beginning.

    As Adam corrects its averages (https://arxiv.org/abs/1412.6980, section 3).

    >>> smoothed([(1, 4.0), (2, 4.0)], 10)
    [(1, 4.0), (2, 4.0)]
    """
    keep = 1 - 1 / window
    mean, weight, found = 0.0, 0.0, []
    for x, y in points:
        mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
        found.append((x, round(mean / weight, 12)))
    return found
