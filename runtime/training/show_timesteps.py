"""`--show_timesteps`: what a run would draw, for each expert, on the terminal or as a picture; no model is loaded."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING

import torch

from wangen import profiles
from wangen.generator.errors import WangenError, many
from wangen.generator.files import write_text
from wangen.generator.session import Report
from wangen.generator.steps import Train
from wangen.generator.train_refusals import is_narrowed, require_timesteps
from wangen.runtime.flow import loss_weight
from wangen.runtime.samples import read_samples
from wangen.runtime.training.distributions import Cut, Distribution, share
from wangen.runtime.training.plan import count_tokens
from wangen.runtime.training.timesteps import (
    HIGH,
    LOW,
    distribution_of,
    expert_ranges,
    expert_shares,
    left_to_the_other,
    looks_at_size,
    model_tokens,
    starving,
)

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger("wangen")

_ROWS = 20
"""Bins on the terminal: 50 timesteps each."""
_COLUMNS = 200
"""Bins of the picture: 5 timesteps each, so that the experts' boundaries fall between two of them."""
_BAR = 24
"""Letters in a row for bars; all columns together keep within the 80 of a narrow terminal."""
_POINTS = 16
"""Draws of equal share at which the loss weight of a bin is taken."""

_NAMES = {"": "all samples", LOW: "low noise", HIGH: "high noise"}
_COLOURS = {"": "#2f6fb2", LOW: "#2f6fb2", HIGH: "#c4622d"}


@dataclass(frozen=True)
class Drawing:
    """What a run draws, in bins of equal width over [0, 1] of sigma.

    Attributes:
        shares: expert -> its share of the samples.
        bins: expert -> the share of all samples that it gets in each bin; all of them sum to 1.
        weighted: the same times the loss weight, made to sum to 1: the say of each bin in the loss.
    """

    shares: Mapping[str, float]
    bins: Mapping[str, Sequence[float]]
    weighted: Mapping[str, Sequence[float]]


def show(options: Train, model: profiles.Model, tokens_per_frame: Mapping[int, int] | None = None) -> Report:
    """Draw the distribution of the timestep flags as `--show_timesteps` says.

    Args:
        options: the flags; `console` prints a table, `image` writes `<output_name>-timesteps.svg` into `--output_dir`.
        model: the profile of `--task`.
        tokens_per_frame: how many draws have how many tokens per frame; None takes the model's own resolution.

    Returns:
        A report in no folder: a report of training stays what it is.

    Raises:
        UsageError: the flags describe no distribution.
        WangenError: the picture cannot be written.
    """
    image = options.show_timesteps == "image"
    drawing = draw(options, model, tokens_per_frame, _COLUMNS if image else _ROWS)
    words = [f"{_NAMES[name]} {100 * part:.3g} %" for name, part in drawing.shares.items()]
    title, warnings = _described(options, model, tokens_per_frame), starving(options, model, drawing.shares)
    for name in drawing.shares if model.experts else ():
        warnings += left_to_the_other(options, *expert_ranges(options, model)[name])
    result = {"expert_shares": dict(drawing.shares), "warnings": warnings}
    if image:
        path = options.output_dir / f"{options.output_name}-timesteps.svg"
        write_text(path, _svg(options, drawing, title, words, warnings))
        return Report(None, f"the timesteps are drawn in {path}", result={**result, "image": str(path)})
    _print(drawing, title, words, warnings)
    return Report(None, f"{title}: {', '.join(words)}", result=result)


def sizes_of_dataset(options: Train, model: profiles.Model) -> Mapping[int, int] | None:
    """How many draws of an epoch have how many tokens per frame, where the flags look at that.

    Returns:
        None where they do not, and, with a warning, where the dataset cannot be read.
    """
    if not looks_at_size(options):
        return None
    try:
        return count_tokens(read_samples(options, model), model)
    except WangenError as error:
        log.warning("  drawn for the model's own resolution, not for the sizes of the dataset: %s", error)
        return None


def draw(options: Train, model: profiles.Model, tokens_per_frame: Mapping[int, int] | None, num_bins: int) -> Drawing:
    """The shares of all samples that fall into each bin, exactly, from the distribution itself.

    Args:
        options: the flags.
        model: the profile of `--task`.
        tokens_per_frame: how many draws have how many tokens per frame; None takes the model's own resolution.
        num_bins: bins of equal width over [0, 1].

    Raises:
        UsageError: as `require_timesteps` and, for an expert that gets samples, `distribution_of`.
    """
    require_timesteps(options)
    counts = tokens_per_frame or {model_tokens(model): 1}
    experts = _experts(options, model, counts)
    bins, weighted = ({name: [0.0] * num_bins for name in experts} for _ in range(2))
    for name, (low, high, expert_share) in experts.items():
        for tokens, count in counts.items() if expert_share else ():
            distribution = distribution_of(options, tokens, low=low, high=high, expert=name)
            for number in range(num_bins):
                ends = number / num_bins, (number + 1) / num_bins
                part = expert_share * count / sum(counts.values()) * share(distribution, *ends)
                if part > 0:
                    bins[name][number] += part
                    weighted[name][number] += part * _mean_weight(options, distribution, *ends)
    whole = math.fsum(map(math.fsum, weighted.values()))
    normal = {name: [part / whole for part in parts] for name, parts in weighted.items()}
    return Drawing({name: part for name, (_, _, part) in experts.items()}, bins, normal)


def _experts(options: Train, model: profiles.Model, counts: Mapping[int, int]) -> dict[str, tuple[float, float, float]]:
    """Name -> lowest sigma, highest sigma and share of the samples, of what the flags train."""
    if model.experts is None:
        return {"": (0.0, 1.0, 1.0)}
    ranges = expert_ranges(options, model)
    if options.experts != "both":
        name = HIGH if options.experts == "high" else LOW
        return {name: (*ranges[name], 1.0)}
    high = options.high_noise_share
    if high is None:
        high, _ = expert_shares(options, ranges[LOW][1], counts)
    return {LOW: (*ranges[LOW], 1 - high), HIGH: (*ranges[HIGH], high)}


def _mean_weight(options: Train, distribution: Distribution, low: float, high: float) -> float:
    """The mean loss weight of what is drawn from a bin."""
    inside = Cut(distribution, low, high)
    sigmas = torch.tensor([inside.quantile((point + 0.5) / _POINTS) for point in range(_POINTS)], dtype=torch.float64)
    return float(loss_weight(options.weighting_scheme, sigmas).mean())


def _described(options: Train, model: profiles.Model, tokens_per_frame: Mapping[int, int] | None) -> str:
    """The flags that decide, in the words of the command line."""
    words: list[str] = [options.timestep_sampling]
    if options.timestep_sampling == "shift":
        words.append(f"shift {options.discrete_flow_shift:g}")
    if looks_at_size(options):
        width, height = model.resolution
        words.append("at the dataset's sizes" if tokens_per_frame else f"at {width}x{height}")
    if is_narrowed(options):
        done = "cut" if options.preserve_distribution_shape else "squeezed"
        words.append(f"{done} to {options.min_timestep} … {options.max_timestep}")
    if options.weighting_scheme != "none":
        words.append(f"weighting {options.weighting_scheme}")
    if options.num_timestep_buckets:
        words.append(many(options.num_timestep_buckets, "stratum", "strata"))
    return ", ".join(words)


def _print(drawing: Drawing, title: str, words: Sequence[str], warnings: Sequence[str]) -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(drawing, title))
    for line in [*words, *(f"warning: {warning}" for warning in warnings)]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _table(drawing: Drawing, title: str) -> "Table":
    from rich.bar import Bar
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    highest = max(part for parts in drawing.bins.values() for part in parts)
    longest = _BAR // len(drawing.bins)
    table = Table(title=f"timesteps drawn: {title}", box=SIMPLE_HEAD)
    table.add_column("timesteps", justify="right", no_wrap=True)
    for name in drawing.shares:
        table.add_column(_NAMES[name], justify="right", no_wrap=True)
        table.add_column("", width=longest)
    table.add_column("weight", justify="right", no_wrap=True)
    width = 1000 // _ROWS
    for number in range(_ROWS):
        cells: list[str | Bar] = [f"{number * width} - {(number + 1) * width}"]
        for name, parts in drawing.bins.items():
            cells.append(f"{100 * parts[number]:.2f} %")
            cells.append(Bar(highest, 0, parts[number], width=longest, color=_COLOURS[name]))
        loss = math.fsum(parts[number] for parts in drawing.weighted.values())
        table.add_row(*cells, f"{100 * loss:.2f} %")
    return table


# ---- the picture: lengths in pixels ----------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LINE = 960, 470, 120  # the last in letters
_LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 60, 70, 860, 300


def _svg(options: Train, drawing: Drawing, title: str, words: Sequence[str], warnings: Sequence[str]) -> str:
    """A picture that stands for itself: the share of samples by timestep, and where it differs that of the loss."""
    loss = [math.fsum(parts) for parts in zip(*drawing.weighted.values(), strict=True)]
    highest = max(*(part for parts in drawing.bins.values() for part in parts), *loss)
    shapes = [_area(parts, highest, _COLOURS[name]) for name, parts in drawing.bins.items()]
    legend = [(_COLOURS[name], line) for name, line in zip(drawing.shares, words, strict=True)]
    if options.weighting_scheme not in ("none", "logit_normal", "mode"):
        points = " ".join(f"{_x(i + 0.5, len(loss)):.1f},{_y(part, highest):.1f}" for i, part in enumerate(loss))
        shapes.append(f'<polyline points="{points}" fill="none" stroke="#222" stroke-dasharray="5 3"/>')
        legend.append(("#222", "share of the loss weight"))
    texts = [_text(_LEFT, 26, f"Timesteps drawn: {title}", size=17)]
    for number, (colour, line) in enumerate(legend):
        texts.append(_text(_LEFT + 220 * number, 50, f"\N{BLACK SQUARE} {line}", colour=colour))
    texts += [_text(_x(tick, 10), _TOP + _PLOT_HEIGHT + 20, str(100 * tick), anchor="middle") for tick in range(11)]
    texts.append(_text(_LEFT, _HEIGHT - 46, "0 is the clean latent, 1000 is noise; height: share of the samples in a "
                       f"bin of {1000 // _COLUMNS} timesteps, at most {100 * highest:.3g} %"))  # fmt: skip
    lines = [line for warning in warnings for line in wrap(f"Warning: {warning}", _LINE)]
    texts += [_text(_LEFT, _HEIGHT - 26 + 16 * number, line, colour="#b00020") for number, line in enumerate(lines)]
    frame = f'<path d="M{_LEFT} {_TOP}v{_PLOT_HEIGHT}h{_PLOT_WIDTH}" fill="none" stroke="#888"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="system-ui, sans-serif">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join([*shapes, frame, *texts])
        + "\n</svg>\n"
    )


def _area(parts: Sequence[float], highest: float, colour: str) -> str:
    """A step for each bin, down to the axis at both ends."""
    steps = [f"V{_y(part, highest):.1f}H{_x(number + 1, len(parts)):.1f}" for number, part in enumerate(parts)]
    base = _TOP + _PLOT_HEIGHT
    return f'<path d="M{_LEFT} {base}{"".join(steps)}V{base}Z" fill="{colour}" fill-opacity="0.75"/>'


def _x(place: float, whole: int) -> float:
    return _LEFT + _PLOT_WIDTH * place / whole


def _y(part: float, highest: float) -> float:
    return _TOP + _PLOT_HEIGHT * (1 - part / highest)


def _text(x: float, y: float, words: str, *, size: int = 13, colour: str = "#222", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'
