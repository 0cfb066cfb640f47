"""Every flag of every step with something hostile: one message, no traceback, no wait without end, and nothing lost.

The cases come from the table, so that a new step or flag has them at once; `docs/reliability.md` has their numbers.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from abuse import Outcome, digests, run, sources
from abuse_cases import (
    CONTENTS,
    Case,
    Words,
    content_cases,
    hostile_paths,
    line,
    path_cases,
    path_kinds,
    some,
    valid,
    value_cases,
)
from abuse_counts import table, told
from report_runs import step_line
from tiny import TinyRun

from wangen.generator.steps import STEPS

pytest_plugins = ["abuse_fixtures"]

COMMANDS = [step.command for step in STEPS]
PATHS, CONTENT, VALUES = 131, 181, 293
"""The fast tests take every so-many-th case: primes, so that flags meet different kinds."""
HEAVY = ("train", "generate", "evaluate")
"""The steps that load models before they look at some flags."""


class Trial:
    """Runs cases, each in a folder of its own that is gone afterwards, beside sources that must stay as they are."""

    def __init__(self, known: Words, tiny_run: TinyRun, folder: Path) -> None:
        self._known, self._source, self._folder = known, tiny_run.folder, folder
        self._before = sources(tiny_run.folder)

    def faults(self, cases: list[Case], change: Callable[[Case, Path, Words], dict[str, str]]) -> list[str]:
        """What is wrong with the cases, a line each.

        Args:
            cases: of one step.
            change: puts what is hostile into a folder and a line; returns the files that must stay: name -> digest.
        """
        return [f"--{case.option.name} {case.kind[:40]!r} {case.ending}: {fault}" for case in cases
                if (fault := self._fault(case, change))]  # fmt: skip

    def _fault(self, case: Case, change: Callable[[Case, Path, Words], dict[str, str]]) -> str:
        work = self._folder / "work"
        (work / "run").mkdir(parents=True)
        (work / "file.txt").write_text("x")
        (work / "run" / "metrics.jsonl").write_text(json.dumps(step_line(1, output_name="lora")) + "\n")
        words = valid(case.step, self._known)
        if case.option.name in case.step.one_of:
            words = {name: value for name, value in words.items() if name not in case.step.one_of}
        stays = change(case, work, words)
        found: Outcome = run(line(case.step, words), work)
        lost = [name for name, digest in stays.items() if digests(work).get(name) != digest]
        shutil.rmtree(work)
        return found.fault or (f"changes {bytes.fromhex(lost[0])!r}" if lost else "")

    def assert_sources_stay(self) -> None:
        assert sources(self._source) == self._before


@pytest.fixture
def trial(known: Words, tiny_run: TinyRun, tmp_path: Path) -> Iterator[Trial]:
    made = Trial(known, tiny_run, tmp_path)
    yield made
    made.assert_sources_stay()


def hostile_path(case: Case, work: Path, words: Words) -> dict[str, str]:
    words[case.option.name] = hostile_paths(work / "h")[case.kind]
    stays = digests(work)
    if case.option.name == "log_file":  # it is appended to
        stays.pop(os.fsencode(os.path.relpath(words["log_file"] or ".", work)).hex(), None)
    return stays


def hostile_content(case: Case, work: Path, words: Words) -> dict[str, str]:
    path = work / f"x{case.ending}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(CONTENTS[case.kind])
    words[case.option.name] = path if "/" not in case.ending else path.parent
    return digests(work)


def hostile_value(case: Case, _work: Path, words: Words) -> dict[str, str]:
    words[case.option.name] = (case.kind,) * (case.option.length or 1)
    return {}


def of(command: str, cases: list[Case], part: int) -> list[Case]:
    """Every so-many-th case of a command; fewer of those that load models."""
    own = [case for case in cases if case.step.command == command]
    return some(own, part * (4 if command in HEAVY and part > 1 else 1))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_paths_that_are_something_else(command, trial, tmp_path):
    cases = list(path_cases(path_kinds(tmp_path / "kinds")))
    assert trial.faults(of(command, cases, PATHS), hostile_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_files_that_hold_something_else(command, trial):
    assert trial.faults(of(command, list(content_cases()), CONTENT), hostile_content) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_values_that_are_none(command, trial):
    assert trial.faults(of(command, list(value_cases()), VALUES), hostile_value) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_many_more(command, trial, tmp_path):
    """One case of 29, or another part of them, which `ABUSE_PART` says: 1 is all, in half an hour."""
    part = int(os.environ.get("ABUSE_PART", "29"))
    cases = list(path_cases(path_kinds(tmp_path / "kinds")))
    found = [
        *trial.faults(of(command, cases, part), hostile_path),
        *trial.faults(of(command, list(content_cases()), part), hostile_content),
        *trial.faults(of(command, list(value_cases()), part), hostile_value),
    ]
    assert found == []


def test_the_page_has_the_numbers_of_the_suite():
    """If not: `python tests/abuse_counts.py`."""
    assert told() == table()
