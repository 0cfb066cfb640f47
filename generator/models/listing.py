"""`wangen models list` and `where`: what each task needs, what was found on this machine, and what is missing."""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import click

from wangen import profiles
from wangen.generator.bundle import is_called, models_below, models_folder
from wangen.generator.errors import UsageError, WangenError, bytes_text, many, printable
from wangen.generator.models.places import (
    TOKENIZER,
    Held,
    Shelf,
    downloads_called,
    here,
    known_model,
    models_folders,
    on_this_machine,
)
from wangen.generator.target import Target
from wangen.generator.workspace import Workspace
from wangen.profiles import Model

_UNBOUNDED = 10_000
"""Columns of what goes into a pipe: its lines are never wrapped."""


def run_list(task: str | None, folder: Path | None, as_json: bool) -> int:
    """Show every task with its files: what is found, with its size, and what is missing.

    Args:
        task: this one only.
        folder: the models folder; None: that of the workspace, or `models` here.
        as_json: print it for programs.

    Raises:
        WangenError: there is no such task or folder, or no models folder that this host can see.
    """
    place = _workspace(folder)
    targets = models_folders(folder, place)
    models = [known_model(task)] if task else [profiles.model(name) for name in profiles.model_names()]
    shelves = [Shelf(target, place) for target in targets]
    found = {model.name: [shelf.look(model) for shelf in shelves] for model in models}
    if as_json:
        click.echo(json.dumps(_plain(targets, models, found), indent=2))
        return 0
    rows = [row for model in models for row in _rows(targets, model, found[model.name])]
    _show([("task", "role", "size", "file"), *rows])
    click.echo("\nnames that are found, best first; one with a + can be fetched by its name:")
    for line in _names(models):
        click.echo(line)
    click.echo()
    _say_searched(targets)
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
        WangenError: no such folder or file, or no models folder that this host can see.
    """
    place = _workspace(folder)
    targets = on_this_machine(models_folders(folder, place))
    if what not in profiles.model_names():
        return _where_file(what, targets)
    model = profiles.model(what)
    good = True
    for target in targets:
        click.echo(f"{model.name} ({model.title}) in {_folder_text(target)}")
        shelf = Shelf(target, place)
        for held in shelf.look(model):
            good &= held.state == "there"
            click.echo(f"  {held.role:<14}  {_state_text(held)}")
            for line in _help(shelf, model, held):
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
        cure = f"name a file, or one of {', '.join(profiles.model_names())}"
        if Path(name).exists():
            cure = f"what that one is says: wangen models identify {printable(name)}"
        raise UsageError(f"{name!r} is no task, and no file of that name is known or found",
                         where=", ".join(map(_folder_text, targets)), cure=cure)  # fmt: skip
    for path in found:
        click.echo(f"{printable(str(path))}  {bytes_text(path.stat().st_size)}")
    if not found:
        click.echo(f"{name}: missing")
    click.echo(f"taken by: {', '.join(users) or 'no task, by this name'}")
    _say_searched(targets)
    return 0 if found else 1


def _say_searched(targets: Sequence[Target]) -> None:
    for target in targets:
        folder = models_folder(target)
        if folder is None:
            click.echo(f"not seen from here, as it is another machine's: {_folder_text(target)}")
        else:
            below = "and every folder below" if folder.is_dir() else "(there is no such folder)"
            click.echo(f"searched: {_folder_text(target)} {below}")


def _workspace(folder: Path | None) -> Workspace | None:
    """The workspace whose files are meant: none where a folder is given, which must be there."""
    if folder and not folder.is_dir():
        found = "this is a file, not a models folder" if folder.exists() else "there is no such folder"
        raise WangenError(f"--dir: {found}", where=str(folder), cure="name the folder that the weights are below")
    return None if folder else here()


def _help(shelf: Shelf, model: Model, held: Held) -> list[str]:
    """What to do about a role whose file is not there, or is not what it should be."""
    if held.state in ("there", "unseen"):
        return []
    weights = next((weights for weights in model.weights if weights.flag == held.role), None)
    offered = weights is None or weights.downloads
    fetch = f"fetch it with: wangen models download {held.role} --task {model.name}" if offered else "put it there"
    if shelf.is_named(held.role):
        can = weights and held.state == "missing" and shelf.to_fetch(weights, held)
        lines = (held.cure, "wangen.toml names this: put the right one there, or mend that line", fetch if can else "")
        return [*filter(None, lines)]
    if weights is None:
        return [fetch]
    if held.state == "missing":
        return [f"taken under any of these names: {', '.join(weights.files)}", fetch]
    other = shelf.look_at(model, weights, without=held.path)
    if other.path == held.path or other.state == "missing":
        return [held.cure, f"or move it away and {fetch}"]
    return [held.cure, f"if it is moved away, this is taken: {_state_text(other)}"]


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
        yield model.name, states[0].role, " or ".join(map(bytes_text, sorted(sizes))), text


def _names(models: Sequence[Model]) -> Iterable[str]:
    """Every role with the tasks that share its names, and the names: none is torn, and a pipe's lines have any length.

    What can be fetched by its name has a `+`.
    """
    shared: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for model in models:
        for weights in model.weights:
            names = tuple(f"{name} +" if len(downloads_called(name)) == 1 else name for name in weights.files)
            shared.setdefault((weights.flag, names), []).append(model.name)
        files = tuple(download.path for download in model.tokenizer)
        shared.setdefault((TOKENIZER, files), []).append(model.name)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNBOUNDED
    for (role, names), tasks in shared.items():
        for text, indent in ((f"{role} of {', '.join(tasks)}:", ""), (", ".join(names), "    ")):
            yield textwrap.fill(text, width, initial_indent=indent, subsequent_indent="    ",
                                break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _state_text(held: Held, below: Path | None = None) -> str:
    """A role's file and what is wrong with it: below a folder for a table with a column for sizes, else in full."""
    if held.path is None:
        return held.words
    if held.state == "missing":
        return "missing" if below else f"missing: {printable(str(held.path))}"
    path = held.path.relative_to(below) if below and held.path.is_relative_to(below) else held.path
    size = "" if below else f"  {bytes_text(held.num_bytes)}"
    return f"{printable(str(path))}{size}" + (f"  ({held.state}: {held.words})" if held.words else "")


def _is_there(held: Held) -> bool:
    return held.state == "there"


def _folder_text(target: Target) -> str:
    return str(models_folder(target) or target.path(target.roots["models"]))


def _show(rows: Sequence[Sequence[str]]) -> None:
    """A table; a terminal may wrap its lines, but no name is torn by a line's end in it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


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
