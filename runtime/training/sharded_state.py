"""Training states of weights in parts: `torch.distributed.checkpoint`, in the staged folder of every training state.

Each process writes its parts into one file and the first the library's index of them, which comes last; then the state
gets its manifest and its name as any other. So it is found or ignored as any other, and can be read by another number
of processes, each what it needs, and by a single one.

The index is a pickle: it is read by an unpickler that knows the library's own classes and no others.
"""

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from wangen.runtime.communication import all_there
from wangen.runtime.training import checkpoint
from wangen.runtime.training.checkpoint import IN_PARTS, ExpertState, TrainingState
from wangen.runtime.training.ranks import TIMEOUT, Ranks
from wangen.runtime.training.sharded import ShardedWeights

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
        self._ranks.any(False)  # the folder is there
        manifest = checkpoint.manifest_of(state, keep=keep, in_parts=True)
        writer = FileSystemWriter(staging / IN_PARTS)
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
            return checkpoint.complete(staging, manifest) if self._ranks.is_first else None

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
        WangenError: it is damaged.
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


class _Reader(FileSystemReader):
    """The library's reader with an index that cannot name anything but what an index consists of."""

    def read_metadata(self, *_arguments: Any, **_given: Any) -> Metadata:
        """The index of the folder."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = _Index(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"its index is a {type(found).__name__}")
        return found
