"""Training states of weights in parts: `torch.distributed.checkpoint`, in the staged folder of every training state.

Each process writes its parts into one file and the first the library's index of them, which comes last; then the state
gets its manifest and its name as any other. So it is found or ignored as any other, and can be read by another number
of processes, each what it needs, and by a single one.

The index is a pickle: it is read by an unpickler that knows the library's own classes and no others. Beside each file
of parts stands the sum of its bytes, which whoever reads the file compares first.
"""

import io
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from wangen.generator.files import write_text
from wangen.runtime.communication import all_there
from wangen.runtime.training import checkpoint
from wangen.runtime.training.checkpoint import ExpertState, TrainingState
from wangen.runtime.training.ranks import TIMEOUT, Ranks, missing_after
from wangen.runtime.training.sharded import ShardedWeights
from wangen.runtime.training.state_manifest import IN_PARTS, not_readable

_KNOWN = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}  # fmt: skip
"""What an index names, beside dtypes and the path where it was written."""
_NO_INDEX = (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError)
"""What unpickling raises where something else lies there."""
_PARTS = ".distcp"
"""Ends the name of the library's files of parts; its index has another."""
_SUM = ".crc32"
"""Ends the name of the file beside a file of parts that holds the CRC-32 of its bytes, in hex."""
_ALL_SEEN_S = 60.0
"""So long the first process may take to see the others' files, which are written."""
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}


class ShardedStates:
    """Writes the states of one run; all processes have to ask for the same.

    Args:
        folder: of the run's states.
        ranks: the processes.
        asynchronous: `save` returns when the tensors are copied to host memory; they are written meanwhile.
    """

    def __init__(self, folder: Path, ranks: Ranks, *, asynchronous: bool) -> None:
        self._folder, self._ranks, self._asynchronous = folder, ranks, asynchronous
        # Its collectives run in a thread, beside those of training, and wait for the slowest disk.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._writing: tuple[Future[Any] | None, Path, Mapping[str, Any]] | None = None

    def save(self, state: TrainingState, weights: Mapping[str, ShardedWeights], *, keep: bool) -> None:
        """Begin to write a state; it is there after `settle`.

        Args:
            state: of the run, with this process's parts.
            weights: by the expert's name, those that its state is of.
            keep: as `checkpoint.save` has it.

        Raises:
            WangenError: the disk refused; earlier states are untouched.
        """
        assert self._writing is None, "one state is written at a time"
        staging = checkpoint.staging_of(self._folder, state.step)
        if self._ranks.is_first:
            with checkpoint.disk(self._folder):
                checkpoint.begin(staging)
        self._ranks.meet()  # the folder is there
        manifest = checkpoint.manifest_of(state, keep=keep, in_parts=True)
        writer = FileSystemWriter(staging / IN_PARTS)
        writer.fs = _Summed()
        write: Any = async_save if self._asynchronous else save
        with self._refusing():
            done = write(_tensors(state, weights), storage_writer=writer, process_group=self._group)
        self._writing = (done if self._asynchronous else None), staging, manifest

    @property
    def is_written(self) -> bool:
        """Whether `settle` would not wait, and has something to do."""
        return self._writing is not None and (self._writing[0] is None or self._writing[0].done())

    def settle(self) -> Path | None:
        """Wait for the state that is being written; the first process gives it its name and returns its folder.

        Raises:
            WangenError: the disk refused; earlier states are untouched.
        """
        if self._writing is None:
            return None
        (done, staging, manifest), self._writing = self._writing, None
        with self._refusing():
            if done is not None:
                done.result()
            if not self._ranks.is_first:
                return None
            self._require_all_parts(staging / IN_PARTS)
            return checkpoint.complete(staging, manifest)

    def _require_all_parts(self, folder: Path) -> None:
        """Wait until the first process sees what all of them have written.

        Raises:
            WangenError: it does not.
        """
        files = {found.relative_path for found in _Reader(folder).read_metadata().storage_data.values()}
        if missing := missing_after(_ALL_SEEN_S, folder, files):
            raise checkpoint.cannot_save(self._folder, f"{', '.join(sorted(missing))} of another process is not "
                                         "there: let all machines see the same folder")  # fmt: skip

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Around what the library writes.

        Raises:
            WangenError: the disk of one of the processes refused, or one is gone.
        """
        try:
            with all_there(), checkpoint.disk(self._folder):
                yield
        except CheckpointException as error:
            rank, (reason, _) = min(error.failures.items())
            raise checkpoint.cannot_save(self._folder, f"process {rank}: {reason}") from None


def _tensors(state: TrainingState, weights: Mapping[str, ShardedWeights]) -> dict[str, torch.Tensor]:
    """Everything of a state under one name each, parts as parts of the whole."""
    return {
        f"{part}/{expert}/{name}": weights[expert].distributed(_parameter(part, name), value)
        for expert, own in state.experts.items()
        for part in ("adapter", "optimizer", "ema")
        for name, value in getattr(own, part).items()
    }


def read(state: ExpertState, expert: str, weights: ShardedWeights | None) -> ExpertState:
    """An expert's state with its tensors: of weights in parts this process's, else all.

    Args:
        state: as `checkpoint.read` found it.
        expert: its name.
        weights: those that it goes into, however many processes wrote it; None for whole ones.

    Raises:
        WangenError: it is damaged, or cannot be read.
    """
    assert state.in_parts
    reader = _Reader(state.in_parts)
    try:
        index = reader.read_metadata().state_dict_metadata
        targets: dict[str, Any] = {}
        for key, found in index.items():
            part, owner, name = key.split("/", 2)
            if owner == expert and isinstance(found, TensorStorageMetadata):
                targets[key] = _empty(_parameter(part, name), found, weights)
        with warnings.catch_warnings():  # that it reads alone is what is wanted here
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(targets, storage_reader=reader, no_dist=True)
    except (OSError, CheckpointException, *_NO_INDEX) as error:
        cause = error.failures[0][0] if isinstance(error, CheckpointException) else error
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise not_readable(Path(cause.filename or state.in_parts), cause) from None
        reason = re.split(r"\. |\n", str(cause))[0]
        raise checkpoint.damaged(state.in_parts.parent, reason) from None
    parts: dict[str, dict[str, torch.Tensor]] = {"adapter": {}, "optimizer": {}, "ema": {}}
    for key, value in targets.items():
        part, _, name = key.split("/", 2)
        parts[part][name] = value.to_local() if isinstance(value, DTensor) else value
    adapter, optimizer, ema = parts.values()
    return replace(state, in_parts=None, adapter=adapter, optimizer=optimizer, ema=ema)


def _empty(parameter: str, found: TensorStorageMetadata, weights: ShardedWeights | None) -> torch.Tensor:
    if weights and parameter in weights.names and found.size == weights.shape(parameter):
        return weights.distributed(parameter, torch.empty_like(weights.parameters[parameter]))
    return torch.empty(found.size, dtype=found.properties.dtype)


def _parameter(part: str, name: str) -> str:
    """Whose state it is: the optimizer's names have behind the parameter's what they are of it."""
    return name.rpartition("/")[0] if part == "optimizer" else name


def _member(owner: Any, name: str) -> Any:
    """What `getattr` is in an index: the first releases of Python 3.11 store a member of an enumeration with it."""
    if not (isinstance(owner, type) and issubclass(owner, Enum)):
        raise pickle.UnpicklingError(f"it asks for {name} of {owner!r}")
    return owner[name]


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _PATHS:
            return PurePosixPath  # the other cannot be made on Windows
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _Summed(FileSystem):
    """Files of parts whose sum stands beside them, and is compared before they are read."""

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """An open file.

        Raises:
            ValueError: it has other bytes than were written.
        """
        place = Path(path)
        beside = place.with_name(place.name + _SUM)
        if mode == "rb" and beside.exists() and beside.read_text(encoding="ascii") != f"{_sum_of(place):08x}":
            raise ValueError(f"{place.name} has other bytes than were saved")
        with super().create_stream(place, mode) as stream:
            if mode == "rb" or place.suffix != _PARTS:
                yield stream
                return
            summing = _Summing(stream)
            yield summing
        write_text(beside, f"{summing.sum:08x}")


class _Summing(io.RawIOBase):
    """A file that is written to from its begin on, and the CRC-32 of what went into it."""

    def __init__(self, file: io.IOBase) -> None:
        self._file, self.sum = cast(io.BufferedWriter, file), 0

    def write(self, data: Any) -> int:
        """Write all of it; returns how many bytes."""
        self.sum = crc32(data, self.sum)
        return self._file.write(data)

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._file.tell()

    def fileno(self) -> int:
        """Of the file itself."""
        return self._file.fileno()

    def flush(self) -> None:
        """Hand over to the system what was written."""
        self._file.flush()

    def close(self) -> None:
        """Close the file itself."""
        self._file.close()


def _sum_of(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            found = crc32(chunk, found)
    return found


class _Reader(FileSystemReader):
    """The library's reader: its index cannot name anything but what one consists of, and bytes have their sums."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _Summed()

    def read_metadata(self, *_arguments: Any, **_given: Any) -> Metadata:
        """The index of the folder."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = _Index(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"its index is a {type(found).__name__}")
        return found
