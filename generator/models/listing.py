"""`wangen models list` and `where`: what each task needs, what was found on this machine, and what is missing."""

import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import click

from wangen import profiles
from wangen.generator.bundle import is_called, models_below, models_folder
from wangen.generator.errors import UsageError, bytes_text, many
from wangen.generator.models.places import (
    TOKENIZER,
    Held,
    Shelf,
    here,
    known_model,
    models_folders,
    on_this_machine,
)
from wangen.generator.target import Target
from wangen.profiles import Model

_UNBOUNDED = 10_000
"""Columns of a table that goes into a pipe: its lines are never wrapped."""


def run_list(task: str | None, folder: Path | None, as_json: bool) -> int:
    """Show every task with its files: what is found, with its size, and what is missing.

    Args:
        task: this one only.
        folder: the models folder; None: that of the workspace, or `models` here.
        as_json: print it for programs.

    Raises:
        UsageError: there is no such task, or no models folder that this host can see.
    """
    targets = models_folders(folder, here())
    models = [known_model(task)] if task else [profiles.model(name) for name in profiles.model_names()]
    shelves = [Shelf(target) for target in targets]
    found = {model.name: [shelf.look(model) for shelf in shelves] for model in models}
    if as_json:
        click.echo(json.dumps(_plain(targets, models, found), indent=2))
        return 0
    rows = [row for model in models for row in _rows(targets, model, found[model.name])]
    _show(("task", "role", "file", "size"), rows)
    click.echo()
    _show(("role", "for", "names that are found, best first"), _names(models))
    click.echo()
    for target in targets:
        click.echo(f"searched: {_folder_text(target)}")
    held = {each.path: each for states in found.values() for looked in states for each in looked if _is_there(each)}
    size = bytes_text(sum(each.num_bytes for each in held.values()))
    click.echo(
        f"{many(len(held), 'file')} found ({size}); what a task lacks is fetched with: wangen models download TASK"
    )
    return 0


def run_where(what: str, folder: Path | None) -> int:
    """Show which file each role of a task resolves to, or where a file is.

    Args:
        what: a task, or the name of a file.
        folder: the models folder; None: that of the workspace, or `models` here.

    Returns:
        1 when something is missing, broken or something else than its name says.

    Raises:
        UsageError: no models folder that this host can see.
    """
    targets = on_this_machine(models_folders(folder, here()))
    if what not in profiles.model_names():
        return _where_file(what, targets)
    model = profiles.model(what)
    good = True
    for target in targets:
        click.echo(f"{model.name} ({model.title}) in {_folder_text(target)}")
        for held in Shelf(target).look(model):
            good &= held.state == "there"
            click.echo(f"  {held.role:<14}  {_state_text(held)}")
            for line in _help(model, held):
                click.echo(f"  {'':<14}  {line}")
    _say_searched(targets)
    return 0 if good else 1


def _where_file(name: str, targets: Sequence[Target]) -> int:
    """Every file of that name, and the roles that take it."""
    users = [
        f"--{weights.flag} of {model.name}"
        for model in map(profiles.model, profiles.model_names())
        for weights in model.weights
        if any(
            is_called(PurePosixPath(known), name) or is_called(PurePosixPath(name), known) for known in weights.files
        )
    ]
    found = [
        (models_folder(target) or Path()) / path
        for target in targets
        for path in models_below(target)
        if is_called(path, name)
    ]
    if not users and not found:
        raise UsageError(f"{name!r} is no task, and no file of that name is known or found",
                         where=", ".join(map(_folder_text, targets)),
                         cure=f"name a file, or one of {', '.join(profiles.model_names())}")  # fmt: skip
    for path in found:
        click.echo(f"{path}  {bytes_text(path.stat().st_size)}")
    if not found:
        click.echo(f"{name}: missing")
    click.echo(f"taken by: {', '.join(users) or 'no task, by this name'}")
    _say_searched(targets)
    return 0 if found else 1


def _say_searched(targets: Sequence[Target]) -> None:
    for target in targets:
        click.echo(f"searched: {_folder_text(target)} and every folder below")


def _help(model: Model, held: Held) -> list[str]:
    """What to do about a role whose file is not there."""
    if held.state != "missing":
        return []
    names = [name for weights in model.weights if weights.flag == held.role for name in weights.files]
    fetch = f"fetch it with: wangen models download {held.role} --task {model.name}"
    return [*([f"taken under any of these names: {', '.join(names)}"] if names else []), fetch]


def _rows(targets: Sequence[Target], model: Model, looked: Sequence[Sequence[Held]]) -> Iterable[tuple[str, ...]]:
    """One row for each role; where targets differ, each says what it has."""
    for states in zip(*looked, strict=True):
        texts = {
            target.platform.name: _state_text(held, models_folder(target) or Path())
            for target, held in zip(targets, states, strict=True)
        }
        same = len({*texts.values()}) == 1
        text = next(iter(texts.values())) if same else "; ".join(f"{name}: {said}" for name, said in texts.items())
        sizes = {held.num_bytes for held in states if _is_there(held)}
        yield model.name, states[0].role, text, " or ".join(map(bytes_text, sorted(sizes)))


def _names(models: Sequence[Model]) -> list[tuple[str, ...]]:
    """Every role with the tasks that share its names, and the names."""
    shared: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for model in models:
        for weights in model.weights:
            shared.setdefault((weights.flag, weights.files), []).append(model.name)
        files = tuple(download.path for download in model.tokenizer)
        shared.setdefault((TOKENIZER, files), []).append(model.name)
    return [(role, _filled(tasks, 30), _filled(files, 80)) for (role, files), tasks in shared.items()]


def _filled(names: Sequence[str], width: int) -> str:
    """Names in lines of about this width, none of them torn."""
    return textwrap.fill(", ".join(names), width, break_long_words=False, break_on_hyphens=False)


def _state_text(held: Held, below: Path | None = None) -> str:
    """A role's file and what is wrong with it: below a folder for a table with a column for sizes, else in full."""
    if held.path is None:
        return held.words
    if held.state == "missing":
        return "missing" if below else f"missing: {held.path}"
    path = held.path.relative_to(below) if below and held.path.is_relative_to(below) else held.path
    size = "" if below else f"  {bytes_text(held.num_bytes)}"
    return f"{path}{size}" + (f"  ({held.state}: {held.words})" if held.words else "")


def _is_there(held: Held) -> bool:
    return held.state == "there"


def _folder_text(target: Target) -> str:
    return str(models_folder(target) or target.path(target.roots["models"]))


def _show(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table: as wide as the terminal, or as wide as it needs where nobody looks."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("task", "role", "size"))
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else _UNBOUNDED
    console = Console(markup=False, highlight=False, emoji=False, width=width)
    with console.capture() as shown:
        console.print(table)
    for line in shown.get().splitlines():
        click.echo(line.rstrip())


def _plain(targets: Sequence[Target], models: Sequence[Model], found: dict[str, list[list[Held]]]) -> dict[str, Any]:
    """What a program reads."""
    return {
        "folders": [_folder_text(target) for target in targets],
        "tasks": [
            {"task": model.name, "title": model.title, "roles": _plain_roles(targets, model, found[model.name])}
            for model in models
        ],
    }


def _plain_roles(targets: Sequence[Target], model: Model, looked: Sequence[Sequence[Held]]) -> list[dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {
        weights.flag: {
            "kind": weights.kind,
            "names": weights.files,
            "downloads": [f"{download.repo}/{download.path}" for download in weights.downloads],
        }
        for weights in model.weights
    }
    known[TOKENIZER] = {"downloads": [f"{download.repo}/{download.path}" for download in model.tokenizer]}
    return [
        {
            "role": states[0].role,
            **known[states[0].role],
            "found": [
                {
                    "folder": _folder_text(target),
                    "path": str(held.path) if held.path else None,
                    "state": held.state,
                    "words": held.words,
                    "num_bytes": held.num_bytes,
                }
                for target, held in zip(targets, states, strict=True)
            ],
        }
        for states in zip(*looked, strict=True)
    ]
