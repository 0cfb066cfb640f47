"""What a run measures on its way: `metrics.jsonl`, the loss by timestep, and reading a GPU's numbers late.

Letters: B items of a step.
"""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from wangen.generator.errors import WangenError, many, write_cure
from wangen.generator.files import write_whole
from wangen.runtime.training.ranks import Ranks

log = logging.getLogger("wangen")

NUM_BINS = 10
READ_EVERY = 10
"""Steps between two readings of a GPU: each reading waits for it."""

Record = dict[str, Any]


class Metrics:
    """`metrics.jsonl`: a line of JSON for every step and every validation.

    A run that resumes has the lines up to the step it resumes from, and writes the later ones anew. Runs of several
    names share the file of their folder: each line says whose it is. Once it is open a disk that refuses stops no run:
    lines wait, with one warning, until it takes them.
    """

    def __init__(self, path: Path, step: int, experts: Collection[str] = ("",), *, name: str = "") -> None:
        """Open the file, without the lines of later steps and without a last line that was cut short.

        Args:
            path: the file; its folder is made.
            step: of the run, where it begins.
            experts: whose lines they are; an expert that was trained alone before keeps its own.
            name: of the run, for its lines; without it they carry none.

        Raises:
            WangenError: it cannot be written.
        """
        self._path = path
        self._mark = {"output_name": name} if name else {}
        self._waiting, self._taken = deque[bytes](), 0  # lines, and how much of the first one the file has
        self._end: int | None = None  # where the file ended with that part, if it is known
        self._is_refused = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, _lines_until(path, step, {"", *experts}, name))
            self._file: FileIO | None = self._opened()
        except OSError as error:
            raise WangenError(f"cannot write: {error.strerror}", where=str(path), cure=write_cure(error)) from None

    def _opened(self) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._path.open("ab", buffering=0)  # so that it is known how much of a line a full disk took

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line, in the file when this returns if the disk takes it; numbers that are not finite become null."""
        self._waiting.append(f"{json.dumps(_plain({**record, **self._mark}), allow_nan=False)}\n".encode())
        try:
            if self._file and not self._path.exists():
                log.warning("  %s is not there any more: it begins anew at this line", self._path)
                self._let_go()
            self._write()
        except OSError as error:
            if not self._is_refused:
                log.warning("  cannot write %s: %s; its lines wait until the disk takes them", self._path,
                            error.strerror)  # fmt: skip
            self._is_refused = True
            self._let_go()  # of a drive that comes back the file has to be opened anew

    def _write(self) -> None:
        file = self._file = self._file or self._opened_again()
        while self._waiting:
            self._taken += file.write(self._waiting[0][self._taken :])
            if self._taken == len(self._waiting[0]):
                self._waiting.popleft()
                self._taken = 0
        self._is_refused = False

    def _opened_again(self) -> FileIO:
        """The file, which goes on behind the part of a line that it has; where it has changed since, at a new line."""
        file = self._opened()
        size = os.fstat(file.fileno()).st_size
        if self._taken and size != self._end:
            self._taken = 0
            if size:
                file.write(b"\n")
        return file

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file:
            self._end = None
            with suppress(OSError):
                self._end = os.fstat(file.fileno()).st_size
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        """Close the file; lines that the disk still does not take are counted in a warning."""
        try:
            if self._waiting:
                self._write()
        except OSError as error:
            log.warning("  the last %s of %s cannot be written: %s", many(len(self._waiting), "line"), self._path,
                        error.strerror)  # fmt: skip
            self._waiting.clear()
        self._let_go()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def _lines_until(path: Path, step: int, experts: Collection[str], name: str) -> Iterator[bytes]:
    """Complete lines up to `step` (those of step 0 only if the run is past it), and all of other experts and runs."""
    if not path.is_file():
        return
    with path.open("rb") as file:  # of a million steps it has 300 MB
        for line in file:
            kept = False
            with suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):  # a line that is none
                record = json.loads(line)
                others = record.get("expert", "") not in experts or record.get("output_name", name) != name
                kept = line.endswith(b"\n") and (others or bool(step and record["step"] <= step))
            if kept:
                yield line


def _plain(value: Any) -> Any:
    """JSON's own types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class TimestepBins:
    """The mean loss in ten equal parts of [0, 1000], each item counted where its timestep falls."""

    def __init__(self) -> None:
        self.clear()

    def add(self, sigmas: Sequence[float], losses: Sequence[float]) -> None:
        """Count items: (B,) noise levels in [0, 1] and (B,) losses; what is not finite is left out."""
        for sigma, loss in zip(sigmas, losses, strict=True):
            if math.isfinite(loss):
                number = min(int(sigma * NUM_BINS), NUM_BINS - 1)
                self._sums[number] += loss
                self._counts[number] += 1

    def means(self) -> dict[str, float]:
        """By the bin's range, those that have items.

        >>> bins = TimestepBins()
        >>> bins.add([0.01, 0.95, 1.0], [4.0, 1.0, 2.0])
        >>> bins.means()
        {'0-100': 4.0, '900-1000': 1.5}
        """
        width = 1000 // NUM_BINS
        return {
            f"{number * width}-{(number + 1) * width}": self._sums[number] / count
            for number, count in enumerate(self._counts)
            if count
        }

    def as_facts(self) -> dict[str, Any]:
        """As plain JSON, for `load`."""
        return {"sums": list(self._sums), "counts": list(self._counts)}

    def load(self, facts: Mapping[str, Any] | None) -> None:
        """Go on from what `as_facts` gave; None begins again."""
        self.clear()
        if facts:
            self._sums, self._counts = list(facts["sums"]), list(facts["counts"])

    def clear(self) -> None:
        """Begin again, for example at an epoch's end."""
        self._sums, self._counts = [0.0] * NUM_BINS, [0] * NUM_BINS


class Pending:
    """Records whose numbers are still on the device: read together, so that no step waits for a GPU.

    Tensors of a record have no more than one dimension; `()` becomes a number, `(B,)` a list of them.
    """

    def __init__(self, device: torch.device, every: int | None = None, ranks: Ranks = Ranks()) -> None:  # noqa: B008
        """Read `every` so many records; the default is each one on a CPU and ten together on a GPU.

        Processes that train together read at the same steps, and each gets the items of all.
        """
        self._every = every or (1 if device.type == "cpu" else READ_EVERY)
        self._ranks = ranks
        self._waiting: list[Mapping[str, Any]] = []

    def add(self, record: Mapping[str, Any]) -> list[Record]:
        """Keep a record; returns all that wait, read, when it is their turn, else nothing."""
        self._waiting.append(record)
        return self.read() if len(self._waiting) >= self._every else []

    def read(self) -> list[Record]:
        """All that wait, in their order, with numbers for tensors: in one transfer from each device."""
        waiting, self._waiting = self._waiting, []
        tensors = [value.detach() for record in waiting for value in record.values() if isinstance(value, torch.Tensor)]
        numbers = iter(_read_together(tensors))
        read = [
            {name: next(numbers) if isinstance(value, torch.Tensor) else value for name, value in record.items()}
            for record in waiting
        ]
        return [_joined(records) for records in zip(*self._ranks.gathered(read), strict=True)]


def _joined(records: Sequence[Record]) -> Record:
    """One step's records of all processes: lists behind each other; what is one number is the same in all.

    >>> _joined([{"step": 3, "losses": [0.5]}, {"step": 3, "losses": [0.25]}])
    {'step': 3, 'losses': [0.5, 0.25]}
    """
    return {
        name: [item for record in records for item in record[name]] if isinstance(value, list) else value
        for name, value in records[0].items()
    }


def _read_together(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The values of small tensors: those of one device travel as one."""
    values: list[Any] = [None] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[number].reshape(-1).double() for number in numbers]).tolist()
        for number in numbers:
            count = tensors[number].numel()
            part, flat = flat[:count], flat[count:]
            values[number] = part if tensors[number].ndim else part[0]
    return values
