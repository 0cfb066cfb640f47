"""The reports that a run's steps left in its folder."""

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeGuard

from wangen.generator.files import is_file
from wangen.generator.run_folder import BEGUN
from wangen.generator.session import report_files
from wangen.generator.table import REPORT

STEPS_SHOWN = (
    "preprocess", "world_model", "caption", "check", "cache_latents", "cache_text", "check_cache", "train", "generate",
    "evaluate",
)  # fmt: skip
"""Whose reports are read, in the order of their work."""


def reports_of(folder: Path, problems: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each step whose report lies in a folder, with the newest one; what cannot be read is added to the problems."""
    for step in STEPS_SHOWN:
        read = [(path.name, _json(path, problems)) for path in report_files(folder, step)]
        found = {name: report for name, report in read if isinstance(report, dict) and report.get("step") == step}
        if found:
            yield step, _together(found, f"{step}{REPORT}")


def begun_in(folder: Path, problems: list[str]) -> Mapping[str, Any]:
    """What the last start of training says of itself, where it has not ended: has written no report since."""
    path = folder / BEGUN
    if not is_file(path) or any(time_s(report) >= time_s(path) for report in report_files(folder, "train")):
        return {}
    found = _json(path, problems)
    return found if isinstance(found, dict) else {}


def time_s(path: Path) -> float:
    """When a file was written, in seconds since 1970; 0 of one that is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _together(reports: Mapping[str, Mapping[str, Any]], whole: str) -> Mapping[str, Any]:
    """The newest report of a step; where that is of a part of its work, one for all parts of the same work.

    Args:
        reports: by file name, the newest first.
        whole: what the file of the whole work is called.
    """
    names = list(takewhile(lambda name: name != whole, reports)) or [whole]
    newest = reports[names[0]]
    counts = [_num_parts(reports[name]) for name in names]
    of = next(filter(None, counts), None)
    parts = [reports[name] for name, count in zip(names, counts, strict=True) if count in (of, None)]
    if len(parts) == 1:
        return newest
    failed = [str(part.get("summary", "")) for part in parts if part.get("ok") is False]
    computed = sum(filter(is_number, (mapping(part, "counts").get("computed") for part in parts)))
    seconds = filter(is_number, (mapping(part, "timings").get("total_s") for part in parts))
    told = f"{len(parts)} of {of} parts: {computed} entries encoded"
    return {**newest, "ok": not failed, "summary": failed[0] if failed else told,
            "timings": {"total_s": max(seconds, default=0)}}  # fmt: skip


def _num_parts(report: Mapping[str, Any]) -> int | None:
    """Of how many parts one is that a report is of; None where it failed before it knew."""
    told = str(mapping(report, "inputs").get("part", "")).rpartition("/")[2]
    return int(told) if told.isdecimal() else None


def _json(path: Path, problems: list[str]) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError):
        problems.append(f"{path.name} is no JSON: it is being written, or was cut short")
    return None


def mapping(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a report that is an object; an empty one where it is something else."""
    value = found.get(name)
    return value if isinstance(value, Mapping) else {}


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of JSON is a finite number that a float can hold.

    >>> [is_number(value) for value in (1, 0.5, True, float("nan"), 10**400, "1")]
    [True, True, False, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
