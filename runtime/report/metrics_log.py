"""Reading `metrics.jsonl` while it may be written: whole lines only, and of a file that grows only what is new."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_MANY = 10**12


class MetricsLog:
    """The records of a `metrics.jsonl`.

    Attributes:
        records: of every whole line so far.
        num_malformed: whole lines that are no record.
        cut_short: whether the file ends in the middle of a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self.records: list[Record] = []
        self.num_malformed = 0
        self.cut_short = False
        self._offset, self._inode, self._last = 0, 0, b""

    def read(self) -> list[Record]:
        """Read on; from the beginning when the file was replaced, as a run that resumes does it.

        Raises:
            OSError: it is there and cannot be read.
        """
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            self._forget()
            return self.records
        with self._path.open("rb") as file:
            file.seek(self._offset - len(self._last))
            # A file that replaced two others may have the inode of the first.
            if stat.st_ino != self._inode or file.read(len(self._last)) != self._last:
                self._forget()
                self._inode = stat.st_ino
                file.seek(0)
            new = file.read()
        whole, end, rest = new.rpartition(b"\n")
        self.cut_short = bool(rest)
        self._offset += len(new) - len(rest)
        self._last = whole.rpartition(b"\n")[2] + end or self._last
        for line in whole.splitlines():
            self._take(line)
        return self.records

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] < _MANY:
            self.records.append(record)
        else:
            self.num_malformed += 1


def num_steps(records: Iterable[Record]) -> int:
    """The optimizer steps of a run: of experts that were trained one after the other, those of both together.

    Such experts' lines have names of their own.

    >>> num_steps([{"step": 3, "output_name": "cats_low_noise"}, {"step": 2, "output_name": "cats_high_noise"}])
    5
    """
    last: dict[str, int] = {}
    for record in records:
        name = str(record.get("output_name", ""))
        last[name] = max(record["step"], last.get(name, 0))
    return sum(last.values())


def run_of(record: Record, otherwise: str) -> str:
    """Whose line it is: an expert that is trained alone has its own name, and belongs to the other one's run."""
    return str(record.get("output_name", otherwise)).removesuffix(f"_{record.get('expert')}")
