"""How long a step does nothing but wait for other processes, measured without waiting for a GPU."""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch


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
        """Around what tensors of a device are sent for, and around where they are needed."""
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
