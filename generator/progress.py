"""A live progress bar on a terminal; nothing in a log or a pipe."""

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
