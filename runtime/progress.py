"""Live progress: a bar on a terminal, a plain line now and then in a log."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wangen.generator.errors import duration_text
from wangen.generator.progress import terminal

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger("wangen")

LINE_EVERY_S = 10.0

Advance = Callable[[int, str], None]
"""Called with how many more are done, and a few words on the present state."""


@contextmanager
def progress(label: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Show how far `total` things are; `done` of them were done before; nothing where the log shows only warnings."""
    console = terminal() if log.isEnabledFor(logging.INFO) else None
    with _bar(console, label, total, done) if console else _lines(label, total, done) as advance:
        yield advance


@contextmanager
def _bar(console: "Console", label: str, total: int, done: int) -> Iterator[Advance]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("left  {task.fields[state]}", markup=False),  # it may be a file name with brackets
    )
    rate = _Rate(done)
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=total, completed=done, state="", rate="")
        yield lambda more, state: bar.update(task, advance=more, state=state, rate=rate.words(more))


@contextmanager
def _lines(label: str, total: int, done: int) -> Iterator[Advance]:
    rate = _Rate(done)
    last = time.monotonic()

    def advance(more: int, state: str) -> None:
        nonlocal last
        words = rate.words(more)
        now = time.monotonic()
        if rate.done >= total or now - last >= LINE_EVERY_S:
            last = now
            left_s = (total - rate.done) / rate.per_s if rate.per_s else 0.0
            left = f"{duration_text(left_s)} left" if rate.done < total else ""
            parts = (f"{label} {rate.done}/{total}", words, state, left)
            log.info("  %s", "  ".join(filter(None, parts)))

    yield advance


class _Rate:
    """How many are done, and how many of them in a second, measured over the last half of them or more.

    So what happened once, such as compiling or a machine that slept, does not count for what is left for long.
    """

    def __init__(self, done: int) -> None:
        self.done = self._before = done
        self.per_s = 0.0
        self._since = self._next = (time.monotonic(), done)  # the time when so many were done

    def words(self, more: int) -> str:
        """Count `more`, and say the rate; of what takes longer than a second how long."""
        self.done += more
        now, (then, done_then) = time.monotonic(), self._since
        self.per_s = (self.done - done_then) / (now - then) if now > then else 0.0
        if self.done - self._before > 2 * (self._next[1] - self._before):
            self._since, self._next = self._next, (now, self.done)
        if not self.per_s:
            return ""
        return f"{self.per_s:.3g}/s" if self.per_s >= 1 else f"{1 / self.per_s:.3g} s each"
