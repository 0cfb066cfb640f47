"""Live progress bars on a terminal; nothing in a log or a pipe."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(label: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show how many of `total` things are done (None: nobody knows how many); yields what is told of each by name."""
    if not sys.stderr.isatty() or total == 0:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}", markup=False),  # a file name may hold brackets
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(label, total=total, name="")
        yield lambda name: shown.update(task, advance=1, name=name)


@contextmanager
def byte_bar(name: str, num_bytes: int) -> Iterator[Callable[[str, int], None]]:
    """Show how many bytes of a file are done, and how fast; yields what is told of the doing and the bytes done."""
    if not sys.stderr.isatty():
        yield lambda _doing, _done: None
        return
    from rich.console import Console
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
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def tell(doing: str, done: int) -> None:
            if doing not in tasks:  # a speed of its own for each
                tasks[doing] = shown.add_task(f"{doing} {name}", total=num_bytes, completed=done)
            shown.update(tasks[doing], completed=done)

        yield tell
