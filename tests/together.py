"""Processes that train together as torchrun would start them, but forked from the tests, which have torch loaded."""

import os
import socket
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass

from killing import fork

from wangen.generator.cli import main
from wangen.generator.steps import Train

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Done:
    """What processes that trained together left.

    Attributes:
        codes: their exit codes, by rank.
        told: what all of them wrote.
    """

    codes: list[int]
    told: str


def together(options: Train, count: int, *, on_each_machine: int = 0, others: Train | None = None) -> Done:
    """Train in so many processes of this machine.

    Args:
        options: the flags.
        count: of the processes; 1 is a run without any other.
        on_each_machine: they are told that a machine has so many of them, the last what is left; 0 means all.
        others: the flags of all but the first, where they are others.
    """
    options.output_dir.mkdir(parents=True, exist_ok=True)
    words = options.output_dir.with_name(f".{options.output_dir.name}-{time.monotonic_ns()}.txt")
    port, local = str(free_port()), on_each_machine or count

    def train(rank: int) -> int:
        beside = min(local, count - rank // local * local)
        if count > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank % local),
                           "LOCAL_WORLD_SIZE": str(beside), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": port}  # fmt: skip
        warnings.resetwarnings()  # of libraries, which are errors in the tests' own process
        with words.open("a", encoding="utf-8", buffering=1) as file:
            sys.stdout = sys.stderr = file
            try:
                return main((others if others and rank else options).argv())
            finally:
                traceback.print_exception(sys.exception())

    children = [fork(lambda rank=rank: train(rank)) for rank in range(count)]
    return Done([_end_of(child) for child in children], words.read_text(encoding="utf-8"))


def trained(options: Train, count: int, *, on_each_machine: int = 0) -> str:
    """The same where all has to go well; what was said."""
    done = together(options, count, on_each_machine=on_each_machine)
    assert done.codes == [0] * count, f"{done.codes}: {done.told}"
    return done.told


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _end_of(child: int) -> int:
    """The exit code of a process, which is killed when it takes too long."""
    ends = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
