"""Live progress bars on a terminal; nothing in a log or a pipe."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def terminal() -> "Console | None":
    """The terminal for a live bar, if standard error is one.

    It may be closed at any moment while the work goes on: what cannot be shown any more is dropped.
    """
    if not sys.stderr or not sys.stderr.isatty():  # it is None for a process that began without one
        return None
    from rich.console import Console

    beneath = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # where another bar is shown already
    return Console(file=_Forgiving(beneath))  # type: ignore[arg-type]  # it is as much of a file as rich uses


class _Forgiving:
    """A file whose writes never fail."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> None:
        """Write, if that can be."""
        with suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        """Flush, if that can be."""
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def bar(label: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show how many of `total` things are done (None: nobody knows how many); yields what is told of each by name."""
    console = terminal()
    if console is None or total == 0:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}", markup=False),  # a file name may hold brackets
    )
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(label, total=total, name="")
        yield lambda name: shown.update(task, advance=1, name=name)


@contextmanager
def byte_bar(name: str, num_bytes: int) -> Iterator[Callable[[str, int], None]]:
    """Show how many bytes of a file are done, and how fast; yields what is told of the doing and the bytes done."""
    console = terminal()
    if console is None:
        yield lambda _doing, _done: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def tell(doing: str, done: int) -> None:
            if doing not in tasks:  # a speed of its own for each
                tasks[doing] = shown.add_task(f"{doing} {name}", total=num_bytes, completed=done)
            shown.update(tasks[doing], completed=done)

        yield tell
