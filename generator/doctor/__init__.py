"""`wangen doctor`: what of this machine would stop, spoil or slow down a training, each with its cure.

The facts are gathered once: files and tools are read here, PyTorch and the card are tried by the scripts' Python in
processes of their own. The checks, which see the facts alone, make findings of them. Nothing is changed.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from wangen.generator import workspace as workspaces
from wangen.generator.commit import version_words
from wangen.generator.doctor import (
    check_cards,
    check_kernels,
    check_places,
    check_python,
    check_system,
    places,
    system,
    trials,
)
from wangen.generator.doctor.facts import Facts
from wangen.generator.doctor.findings import Finding
from wangen.generator.doctor.real import block
from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.setup import hardware
from wangen.generator.target import Target
from wangen.generator.workspace import Workspace

JSON_VERSION = 1
"""Grows when a field of the output of `--json` changes its meaning or goes away."""

CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_system.check, check_python.check, check_cards.check, check_kernels.check, check_places.check,
)  # fmt: skip

_LEVELS = ("ok", "note", "problem")


def run(folder: Path | None, *, as_json: bool, real: Mapping[str, str] | None = None) -> int:
    """Look at this machine and print what was found; returns the exit code: 1 when there is a problem.

    Args:
        folder: of the workspace; None looks for one from here.
        as_json: print one object instead of lines.
        real: print a block to paste into a report instead, with what is said there of a run; None does not.

    Raises:
        UsageError: the folder is no workspace, or two forms are asked for.
    """
    if as_json and real is not None:
        raise UsageError("--json and --real contradict each other", cure="give one of them")
    if not as_json:
        click.echo("wangen doctor: tries PyTorch, the card and the disks; this takes up to a minute …", err=True)
    facts = gather(folder)
    findings = examine(facts)
    problems = sum(finding.level == "problem" for finding in findings)
    if real is not None:
        click.echo(block(facts, findings, real))
        return 0
    if as_json:
        click.echo(json.dumps(_object(facts, findings), indent=2, default=str))
    else:
        click.echo(version_words())
        for finding in findings:
            click.echo(finding)
        notes = sum(finding.level == "note" for finding in findings)
        click.echo(f"{many(problems, 'problem')}, {many(notes, 'note')}; docs/doctor.md lists them all")
    return int(problems > 0)


def examine(facts: Facts) -> list[Finding]:
    """What all checks find, the worst last, where a terminal shows it."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    return sorted(findings, key=lambda finding: _LEVELS.index(finding.level))


def gather(folder: Path | None) -> Facts:
    """Look at all there is.

    Args:
        folder: of the workspace; None looks for one from here, and does without.

    Raises:
        WangenError: the folder is no workspace, or the working folder was removed.
    """
    try:
        here = Path.cwd()
    except OSError as error:
        raise WangenError(f"the folder that you are in cannot be read: {error.strerror}",
                          cure="go to another folder (cd) and run this there") from None  # fmt: skip
    place, wrong = _workspace(folder)
    target = _native(place)
    seen = hardware.look()
    accelerator = target.platform.accelerator if target else "rocm" if seen.amd and not seen.driver else "cuda"
    path, why, looked = trials.choose(target, sys.executable, here)
    python = trials.interpreter(path, why, looked, accelerator)
    return Facts(
        system=system.look(),
        memory=system.look_at_memory(),
        hardware=seen,
        cards=hardware.cards() if seen.driver else (),  # a driver that does not answer would be waited for again
        programs=hardware.programs() if seen.driver else (),
        python=python,
        trials={} if python.starts else trials.run(python.path),
        places=tuple(places.places_of(place, here)),
        workspace=wrong,
        shadows=_shadows(here),
    )


def _shadows(here: Path) -> tuple[str, ...]:
    """Files and folders that Python would take for a library, because it looks into the working folder first."""
    names = {*sys.stdlib_module_names, *check_python.SHOWN}
    try:
        found = [path for path in here.iterdir() if path.stem in names]
    except OSError:  # the check of the folder says so
        return ()
    return tuple(sorted(path.name for path in found if path.suffix == ".py" or (path / "__init__.py").is_file()))


def _workspace(folder: Path | None) -> tuple[Workspace | None, tuple[str, ...]]:
    """The workspace, and why it cannot be read: (found, where, cure)."""
    if folder is None:
        try:
            folder = workspaces.find(Path())
        except UsageError:
            return None, ()
    elif not (folder / workspaces.FILE).is_file():
        workspaces.read(folder)  # says so
    try:
        return workspaces.read(folder), ()
    except WangenError as error:
        return None, (error.found, error.where, error.cure)


def _native(place: Workspace | None) -> Target | None:
    """The first platform of a workspace whose scripts run on this machine."""
    for name in place.platforms if place else ():
        with suppress(UsageError):  # its root is on another machine
            target = place.target(name) if place else None
            if target and target.is_native:
                return target
    return None


def _object(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    return {
        "version": JSON_VERSION,
        "wangen": version_words(),
        "ok": not any(finding.level == "problem" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "facts": asdict(facts),
    }
