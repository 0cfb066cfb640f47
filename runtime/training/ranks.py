"""Processes that train together: each takes its share of every step's batches, and the gradients are added up.

All of them make the same optimizer step on the same weights, so one of them (rank 0) writes, shows and saves for all.
Weights that train in parts (`sharded`) are held, stepped and saved by each for its own. With one process nothing here
does anything. Gradients go over NCCL on GPUs; small facts about a step go over gloo, from host memory, so that no GPU
is waited for.
"""

import atexit
import contextlib
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from wangen.generator.errors import WRONG_USAGE, UsageError, WangenError
from wangen.generator.launch import Launch
from wangen.runtime.communication import CommunicationTime, all_there

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Result = TypeVar("Result")

TIMEOUT = timedelta(hours=6)
"""The others wait while one samples or saves; a process that is gone is noticed at once, whatever this is.

Only a machine that vanishes without closing its connections is noticed no sooner.
"""
PAUSE_S = 0.05
SEEN_S = 20.0
"""So long each may take to see the output folder's new file, before anything was trained."""


class Ranks:
    """The processes of a run as one of them sees them.

    Args:
        launch: which of how many it is.
        in_step: all go through the model equally often.

    Attributes:
        communication: how long the steps wait for other processes' tensors.
    """

    def __init__(self, launch: Launch = Launch(), *, in_step: bool = False) -> None:  # noqa: B008 - frozen
        self.launch, self.number, self.count, self.in_step = launch, launch.rank, launch.count, in_step
        self.communication = CommunicationTime()

    def marching(self) -> "Ranks":
        """The same, but all go through the model equally often: each pass gathers weights from all."""
        return Ranks(self.launch, in_step=True)

    @property
    def is_first(self) -> bool:
        """Whether this one writes and shows for all."""
        return self.number == 0

    def own(self, items: Sequence[Result]) -> list[Result]:
        """The share of this process in a list that all processes hold.

        Where they go in step, a shorter share is filled up with the first item, so that all have the same length.

        >>> [Ranks(Launch(rank, 2), in_step=True).own("abc") for rank in range(2)]
        [['a', 'c'], ['b', 'a']]
        """
        own = list(items[self.number :: self.count])
        rows = -(-len(items) // self.count) if self.in_step else 0
        return own + list(items[:1]) * (rows - len(own))

    def num_own(self, items: Sequence[Any]) -> int:
        """How many items of its share a process has by itself, without what fills it up."""
        return len(items[self.number :: self.count])

    def collected(self, own: Sequence[Result]) -> list[Result]:
        """What all made of their shares, in the order of the whole."""
        shares = self.gathered(list(own))
        total = sum(map(len, shares))
        return [shares[number % self.count][number // self.count] for number in range(total)]

    def gathered(self, value: Result) -> list[Result]:
        """The value of every process, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with all_there():
            dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether it holds for one of them."""
        if self.count == 1:
            return flag
        told = torch.tensor(int(flag))
        with all_there():
            dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told)

    def meet(self) -> None:
        """Wait until all are here."""
        self.any(False)

    @contextlib.contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """While it runs, no other process of this machine is in it; nothing in it may wait for another."""
        turns = max(self.gathered(self.launch.local_count))
        for _ in range(self.launch.local_rank):
            self.meet()
        yield  # after an error the others wait until the launcher stops them
        for _ in range(turns - self.launch.local_rank):
            self.meet()

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by the sum over all processes; the same bytes on all."""
        if self.count > 1:
            for tensor in tensors:
                with self.communication.inside(tensor.device):
                    dist.all_reduce(tensor)

    def require_same(self, what: str, facts: Mapping[str, Any], *, exit_code: int = 1) -> None:
        """Refuse to train on together what is not the same everywhere.

        Args:
            what: the facts are, in the plural.
            facts: by name; the message has the names of those that differ.
            exit_code: of the refusal; with `WRONG_USAGE` no launcher starts it again.

        Raises:
            WangenError: a process sees something else than the first.
        """
        first, *others = self.gathered(facts)
        for rank, own in enumerate(others, 1):
            names = sorted(name for name in {*first, *own} if first.get(name) != own.get(name))
            if names:
                raise WangenError(
                    f"process {rank} of {self.count} sees {what} that differ from those of process 0: "
                    + ", ".join(names),
                    cure="let all machines see the same folders and files, and give all the same line",
                    exit_code=exit_code,
                )

    def require_shared(self, folder: Path) -> None:
        """Refuse processes that do not all see one folder, in which each finds what the others write.

        Raises:
            WangenError: one sees another folder of this name.
        """
        if self.count == 1:
            return
        note = folder / f".shared-{self.gathered(uuid.uuid4().hex)[0]}"
        if self.is_first:
            note.touch()
        try:
            self.meet()  # it is there
            facts = {"--output_dir": not missing_after(SEEN_S, folder, {note.name})}
            self.require_same("output folders", facts, exit_code=WRONG_USAGE)
        finally:
            if self.is_first:
                note.unlink(missing_ok=True)


def missing_after(seconds: float, folder: Path, names: Set[str]) -> Set[str]:
    """Which of these files are not in a folder, given some time: a network shows late what another machine wrote."""
    until = time.monotonic() + seconds
    while (missing := names - {path.name for path in folder.iterdir()}) and time.monotonic() < until:
        time.sleep(PAUSE_S)
    return missing


def sum_of_bits(numbers: torch.Tensor) -> int:
    """A checksum of a float32 tensor's bits: the same in any order of its numbers, and defined for NaN as well.

    >>> one = torch.tensor([1.0, float("nan")])
    >>> sum_of_bits(one) == sum_of_bits(one.flip(0)), sum_of_bits(one) == sum_of_bits(one * 1.0000001)
    (True, False)
    """
    return int(numbers.view(torch.int32).sum(dtype=torch.int64))


@contextlib.contextmanager
def joined(launch: Launch, device: torch.device) -> Iterator[Ranks]:
    """The processes, connected while the block runs.

    Args:
        launch: which of how many this is.
        device: where it computes; what names no GPU then means this one.

    Raises:
        WangenError: they do not find each other.
        UsageError: nothing says where.
    """
    if launch.count == 1:
        yield Ranks(launch)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    with all_there():
        store, number, count = new_store()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=TIMEOUT)
    ranks, exit_code = Ranks(launch), [1]
    atexit.register(_end, exit_code)
    try:
        yield ranks
    except WangenError as error:
        exit_code[0] = error.exit_code
        raise
    ranks.meet()  # not after an error: then the others do not come here
    dist.destroy_process_group()
    atexit.unregister(_end)


def _end(exit_code: Sequence[int]) -> None:
    """After a failure end here, with its exit code, once all that came later has cleaned up.

    The interpreter would take down gloo's threads next. In the middle of a collective they call `std::terminate` then
    (torch 2.13: in 4 of 100 ends), and the launcher would tell of a SIGABRT instead of the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream:  # it may be closed (`>&-`)
            stream.flush()
    os._exit(exit_code[0])


def new_store() -> tuple["Store", int, int]:
    """Where the processes of this start find each other, the number of this one, and of all.

    Raises:
        UsageError: nothing says where.
    """
    from torch.distributed.rendezvous import rendezvous  # PyTorch for some cards has no such module

    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UsageError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but not set: {' and '.join(missing)}, by which processes meet",
            cure="start with torchrun, which sets them, or unset WORLD_SIZE to train alone",
        )
    found, number, count = next(rendezvous("env://", timeout=TIMEOUT))
    return dist.PrefixStore(agreed_name(found, number, count), found), number, count  # type: ignore[attr-defined]


def agreed_name(store: "Store", number: int, count: int) -> str:
    """A name for this start of the processes that all of them know, and no earlier start had.

    torch's launcher keeps its store when it starts processes again, and they would take the addresses of dead ones for
    those of the others. How often it did so is another number on each machine. So each asks with a name of its own, and
    the first answers it with the name of all, whatever else is in the store.

    Args:
        store: that all reach.
        number: of this process.
        count: of all.
    """
    own = uuid.uuid4().hex
    if number:
        store.set(f"asks/{number}", own)
        _wait_for(store, f"answer/{own}")
        name: str = store.get(f"answer/{own}").decode()
        store.set(f"knows/{name}/{number}", "")
        return name
    missing = list(range(1, count))
    while missing:
        for other in missing:
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", own)
        time.sleep(PAUSE_S)
        missing = [other for other in missing if not store.check([f"knows/{own}/{other}"])]
    return own


def _wait_for(store: "Store", key: str) -> None:
    """Until a key is there; signals are heard meanwhile, which the store's own way of waiting puts off."""
    while not store.check([key]):
        time.sleep(PAUSE_S)
