"""The script that runs this step: its steps, and what an edit by hand made wrong in it."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
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
        for line in (invalid := scripts.invalid_knobs(data)):
            own.findings.append(Finding(path.name, f"no knob is set by {line!r}", f"write {_VALUE}"))
        lines, knobs = scripts.marked_steps(data, shell), scripts.read_knobs(data)
        _judge_knobs(own, path.name, invalid, lines, knobs)
        own.steps += [(f"{path.name}, {command}", step)
                      for command, step in scripts.parsed([list(_filled(line, knobs)) for line in lines])]  # fmt: skip
    return own


def _judge_knobs(
    own: OwnScript, name: str, invalid: Iterable[str], lines: Iterable[list[str]], knobs: Mapping[str, str]
) -> None:
    """Note knobs that are not set, and knobs that no step uses: of a step that was taken out, or misspelt.

    Args:
        own: gets what is found.
        name: of the script.
        invalid: lines of the block of knobs that set none.
        lines: of the steps, with the knobs' names in them.
        knobs: that are set.
    """
    used = dict.fromkeys(word.partition("\0")[2] for line in lines for word in line if "\0" in word)
    unset = [knob for knob in used if knob not in knobs]
    for knob in knobs:
        if knob not in used:
            said = Finding(name, f"no step uses the knob {knob}", did_you_mean(knob, unset, ""))
            if said.cure:
                own.findings.append(said)
            else:
                own.warnings.append(str(said))
    told = {knob for line in invalid for knob in re.findall(r"[A-Z][A-Z0-9_]*", line.upper())}
    for knob in unset:
        if knob not in told:
            cure = f"write it into the block of knobs, with {_VALUE}, or publish again"
            own.findings.append(Finding(name, f"the knob {knob} is not set", cure))


def _filled(words: Iterable[str], knobs: Mapping[str, str]) -> Iterator[str]:
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
