"""Live progress: a bar on a terminal, a plain line now and then in a log."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("wangen")

LINE_EVERY_S = 10.0

Advance = Callable[[int, str], None]
"""Called with how many more are done, and a few words on the present state."""


@contextmanager
def progress(label: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Show how far `total` things are; `done` of them were done before."""
    show = _bar if sys.stderr.isatty() else _lines
    with show(label, total, done) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: int, done: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("left  {task.fields[state]}", markup=False),  # it may be a file name with brackets
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, completed=done, state="")
        yield lambda more, state: bar.update(task, advance=more, state=state)


@contextmanager
def _lines(label: str, total: int, done: int) -> Iterator[Advance]:
    started = last = time.monotonic()
    before = done

    def advance(more: int, state: str) -> None:
        nonlocal done, last
        done += more
        now = time.monotonic()
        if done >= total or now - last >= LINE_EVERY_S:
            last = now
            left_s = (now - started) / max(1, done - before) * (total - done)
            words = (f"{label} {done}/{total}", state, f"{left_s:.0f} s left" if done < total else "")
            log.info("  %s", "  ".join(filter(None, words)))

    yield advance
