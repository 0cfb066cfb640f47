"""The Python that a bundle's scripts take, and what is installed in it. Nothing of it is imported here."""

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from wangen.generator.errors import WangenError
from wangen.generator.target import Target

if TYPE_CHECKING:
    from packaging.requirements import Requirement

TOLD = "WANGEN_PYTHON"
"""The environment variable that names another interpreter to the scripts."""

_TIMEOUT_S = 120
_ASK_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


class Fault(NamedTuple):
    """What is wrong with what is installed.

    Attributes:
        level: a `problem` stops the scripts.
        what: was found.
        cure: what to do.
        missing: name of the library that is not there; empty for any other fault.
    """

    level: Literal["note", "problem"]
    what: str
    cure: str
    missing: str = ""


def candidates(target: Target) -> list[Path]:
    """Where the scripts of a target look for their Python, as far as this host sees it, best first."""
    inside = ("Scripts", "python.exe") if target.platform.kind == "windows" else ("bin", "python")
    folders = [path for text in target.venv if (path := target.reach(target.path(text)))]
    given = os.environ.get(TOLD) if target.is_native else None
    active = [Path(os.environ["VIRTUAL_ENV"])] if target.is_native and "VIRTUAL_ENV" in os.environ else []
    return [Path(given)] if given else [folder.joinpath(*inside) for folder in (*folders, *active)]


def wanted_libraries() -> list["Requirement"]:
    """What wangen and its runtime need, as its package says."""
    from packaging.requirements import Requirement

    needs = [Requirement(line) for line in requires("wangen") or ()]
    return [need for need in needs if need.marker is None or need.marker.evaluate({"extra": "runtime"})]


def installed(python: Path, names: Iterable[str]) -> dict[str, str | None]:
    """The versions of packages in an interpreter; None of those that it does not have.

    Raises:
        WangenError: it does not run.
    """
    found: dict[str, str | None] = ask(python, _ASK_VERSIONS, names)
    return found


def ask(python: Path, code: str, words: Iterable[str] = ()) -> Any:
    """What a program of a few lines prints as JSON in an interpreter.

    Raises:
        WangenError: it does not run.
    """
    reason = ""
    try:
        done = subprocess.run([python, "-c", code, *words], capture_output=True, stdin=subprocess.DEVNULL,
                              timeout=_TIMEOUT_S, check=False)  # fmt: skip
        if done.returncode == 0:
            return json.loads(done.stdout)
        said = done.stderr.decode("utf-8", "replace").split("\n")
        reason = f"exit code {done.returncode} {next((line for line in reversed(said) if line.strip()), '')}".strip()
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_TIMEOUT_S} seconds"
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError:
        reason = "its answer cannot be read"
    raise WangenError(f"{python} does not run: {reason}", cure="run the setup script again")


def faults(wanted: Iterable["Requirement"], found: Mapping[str, str | None], accelerator: str) -> Iterator[Fault]:
    """What an interpreter lacks of the libraries that the runtime needs.

    Args:
        wanted: from `wanted_libraries`.
        found: package -> version, wangen's among them.
        accelerator: of the platform: `cuda`, `rocm` or `cpu`.
    """
    for need in wanted:
        have = found[need.name]
        if have is None:
            yield Fault("problem", f"the library {need.name} is not installed", "run the setup script", need.name)
        elif not need.specifier.contains(have, prereleases=True):
            yield Fault(
                "problem", f"{need.name} {have} is installed, {need.specifier} is needed", "run the setup script"
            )
    here = version("wangen")
    if found["wangen"] is None:
        yield Fault("problem", "wangen is not installed", "run the setup script", "wangen")
    elif found["wangen"] != here:
        yield Fault("problem", f"the environment has wangen {found['wangen']}, this is {here}", "run the setup script")
    if accelerator != "cpu" and (found["torch"] or "").endswith("+cpu"):
        yield Fault(
            "note", f"torch {found['torch']} computes on the CPU only", "the setup script installs another build"
        )
