"""Waiting for other processes: how long a step does, without waiting for a GPU; what is said when they are gone."""

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from wangen.generator.errors import WangenError
from wangen.runtime.devices import is_out_of_memory

GRACE_S = 15.0
"""So long a process that has lost another waits to be stopped by the launcher, which blames whom it sees end first."""

_LOST = re.compile(r"gloo|nccl|connection|timed out", re.IGNORECASE)
"""What is in a message of gloo, which raises plain errors; NCCL and the store have a class of their own."""


class CommunicationTime:
    """The time that steps spend inside collectives, summed up until it is read.

    What goes on beside the computing is not in it; that a slower process is waited for there, is. On a GPU two events
    in its stream enclose a collective, and are read when the step's numbers are.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._counts = True

    @contextlib.contextmanager
    def inside(self, device: torch.device) -> Iterator[None]:
        """Around what tensors of a device are sent for, and around where they are needed.

        Raises:
            WangenError: another process is gone.
        """
        with all_there():
            yield from self._timed(device)

    def _timed(self, device: torch.device) -> Iterator[None]:
        """The same, and the time counts."""
        if not self._counts:
            yield
        elif device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            yield
            ended.record()
            self._events.append((began, ended))
        else:
            start = self._clock()
            yield
            self._seconds += self._clock() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no training: nothing counts."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def forget(self) -> None:
        """Begin again."""
        self._seconds, self._events = 0.0, []

    def read(self) -> float:
        """Seconds since the last reading; on a GPU only after it has done what was asked of it."""
        milliseconds: float = sum(began.elapsed_time(ended) for began, ended in self._events)
        seconds = self._seconds + milliseconds / 1000
        self.forget()
        return seconds


@contextlib.contextmanager
def all_there() -> Iterator[None]:
    """Around what all processes do together.

    Raises:
        WangenError: another is gone, or they do not reach each other.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) or not (isinstance(error, dist.DistError) or _LOST.search(str(error))):
            raise
        _wait_to_be_stopped()
        reason = re.sub(r"^\[\S*\] |\. This is typically.*", "", str(error).splitlines()[0])
        raise WangenError(
            f"this process has lost the others ({reason})",
            cure="the one that ended first says why, on the terminal or in its log; the next start goes on from the "
            "last saved state",
        ) from None


def _wait_to_be_stopped() -> None:
    """Until the launcher's SIGTERM, but not for long; it asks for nothing any more, so no other handler sees it."""
    if threading.current_thread() is not threading.main_thread():  # a GPU's backward pass; signals are not heard here
        time.sleep(GRACE_S)
        return
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    told.wait(GRACE_S)
    signal.signal(signal.SIGTERM, before)
