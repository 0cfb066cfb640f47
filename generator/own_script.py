"""The script that runs this step: its steps, and what an edit by hand made wrong in it."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from wangen.generator import scripts
from wangen.generator.errors import WangenError, did_you_mean
from wangen.generator.finding import Finding
from wangen.generator.lock import IN_SCRIPT
from wangen.generator.quoting import QUOTES
from wangen.generator.script_bytes import wrong_line_ends, wrong_mark
from wangen.generator.table import Step

Placed = tuple[str, Step | WangenError]
"""Where a step stands in a script, and the step, or what is wrong with its line."""

_VALUE = "letters, digits and . _ , + - as its value"


@dataclass
class OwnScript:
    """What is wrong with the script's bytes and its block of knobs, what may be, and its steps."""

    findings: list[Finding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    steps: list[Placed] = field(default_factory=list)


def read_own_script() -> OwnScript:
    """Of the script that runs this step; empty where none does."""
    path, own = Path(os.environ.get(IN_SCRIPT, "")), OwnScript()
    shell = path.suffix[1:]
    if shell not in QUOTES:
        return own
    # It may be gone, and one that was edited may say things that only its shell can read.
    with suppress(OSError, WangenError):
        data = path.read_bytes()
        for spoilt in filter(None, (wrong_line_ends(data, shell, path.name), wrong_mark(data, shell))):
            finding = Finding(path.name, spoilt.found, spoilt.cure)
            if shell == "ps1":  # PowerShell 7 reads it as it is meant
                own.warnings.append(str(finding))
            else:
                own.findings.append(finding)
        for wrong in _wrong_knobs(data, shell):
            own.findings.append(Finding(path.name, *wrong))
        set_knobs = scripts.read_knobs(data)
        lines = [list(_filled(line, set_knobs)) for line in scripts.marked_steps(data, shell)]
        own.steps += [(f"{path.name}, {command}", step) for command, step in scripts.parsed(lines)]
    return own


def _wrong_knobs(data: bytes, shell: str) -> Iterator[tuple[str, str]]:
    """What is wrong with the block of knobs, and what to do: lines that set none, knobs that are not set or not used.

    Raises:
        WangenError: a line of a step cannot be read, after the lines of the block.
    """
    invalid = scripts.invalid_knobs(data)
    for line in invalid:
        yield f"no knob is set by {line!r}", f"write {_VALUE}"
    named = {name for line in invalid for name in re.findall(r"[A-Z][A-Z0-9_]*", line.upper())}
    words = [word for line in scripts.marked_steps(data, shell) for word in line]
    used = dict.fromkeys(word.partition("\0")[2] for word in words if "\0" in word)
    knobs = scripts.read_knobs(data)
    unset = [name for name in used if name not in knobs]
    for name in knobs:
        if name not in used:
            yield f"no step uses the knob {name}", did_you_mean(name, unset or used, "take its line out")
    for name in unset:
        if name not in named:
            yield f"the knob {name} is not set", f"write it into the block of knobs, with {_VALUE}, or publish again"


def _filled(words: Iterable[str], knobs: dict[str, str]) -> Iterator[str]:
    """A command line with the values of the knobs; a flag is left out where its knob is not set."""
    before: list[str] = []  # a flag whose value may follow
    for word in words:
        text, mark, name = word.partition("\0")
        if mark and name not in knobs:
            if text:
                yield from before
            before = []
            continue
        yield from before
        before = [text + knobs.get(name, "")]
    yield from before
