"""Whether a run stays as fast as it began: what becomes slow without an error is said while it can be helped."""

import logging
from collections.abc import Callable
from statistics import median

import torch

from wangen.generator.errors import bytes_text

log = logging.getLogger("wangen")

WINDOW_S, WINDOW_STEPS = 60.0, 20
"""Times of no less than this are compared: single steps differ by chance, and by the sizes of their items."""
WINDOWS_BEFORE, WINDOWS_IN_A_ROW = 3, 2
SLOW = 2.0
"""So many times the time that the same work took before."""
WAITING = 0.5
"""Share of the time spent waiting for the cache."""
STALLED_S = 60.0
FULL = 0.05
"""Share of a card's memory that is free: with less it is full."""


class _Lasting:
    """Tells once when something has been so in several windows in a row."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def begins(self, is_so: bool) -> bool:
        if self._in_a_row == WINDOWS_IN_A_ROW:  # it was told
            return False
        self._in_a_row = self._in_a_row + 1 if is_so else 0
        return self._in_a_row == WINDOWS_IN_A_ROW


class Pace:
    """Compares the time that work takes with what the same work took before; what becomes slow is logged, once."""

    def __init__(self, device: torch.device, *, reads_cache: bool = True) -> None:
        """Begin.

        Args:
            device: where the run computes: on a GPU its free memory is looked at where steps are slow.
            reads_cache: a batch that is waited for is read, not encoded.
        """
        self._device, self._reads_cache = device, reads_cache
        self._before: list[float] = []  # seconds for a unit of work, in windows that were not slow
        self._slow, self._waits = _Lasting(), _Lasting()
        self._begin()

    def _begin(self) -> None:
        self._steps, self._seconds, self._waited_s, self._work = 0, 0.0, 0.0, 0.0

    def add(self, steps: int, seconds: float, waited_s: float, work: float) -> None:
        """Take note of steps.

        Args:
            steps: how many.
            seconds: that they took, without what is no training and without waiting for other processes.
            waited_s: of these, for batches.
            work: in a unit that is the same for all steps, as FLOP.
        """
        self._steps += steps
        self._seconds += seconds
        self._waited_s += waited_s
        self._work += work
        computed_s = self._seconds - self._waited_s
        if self._seconds < WINDOW_S or self._steps < WINDOW_STEPS or min(computed_s, self._work) <= 0:
            return
        cost, waited = computed_s / self._work, self._waited_s / self._seconds
        usual = median(self._before) if len(self._before) >= WINDOWS_BEFORE else cost
        if cost <= SLOW * usual:
            self._before.append(cost)
        if self._slow.begins(cost > SLOW * usual):
            log.warning("  steps have become slow: the same work takes %.1f times as long as before. %s",
                        cost / usual, self._cause())  # fmt: skip
        if self._waits.begins(self._reads_cache and waited > WAITING):
            log.warning("  %.0f %% of the time goes into waiting for the cache: its disk is slow, or busy. Copy the "
                        "cache folders to an SSD, or raise --max_data_loader_n_workers", 100 * waited)  # fmt: skip
        self._begin()

    def _cause(self) -> str:
        if self._device.type != "cuda":
            return "Does something else compute on this machine?"
        free, total = torch.cuda.mem_get_info(self._device)
        if free < FULL * total:
            return (f"Of {bytes_text(total)} of this card {bytes_text(free)} are free: the driver for Windows then "
                    "moves memory to the host, without an error. End other programs on it, or take a smaller "
                    "--vram")  # fmt: skip
        return "Does something else compute on this card, or is it hot? nvidia-smi shows both"


def patient(stop: Callable[[], bool]) -> Callable[[float], bool]:
    """A question for whoever waits for a batch, who says for how many seconds: whether to stop.

    A wait of a minute is logged, once.
    """
    told = False

    def asked(waited_s: float) -> bool:
        nonlocal told
        if waited_s >= STALLED_S and not told:
            told = True
            log.warning("  nothing has come from the cache for %.0f s: does its disk answer? Ctrl-C saves and stops",
                        waited_s)  # fmt: skip
        return stop()

    return asked
