"""Ctrl-C, SIGTERM and a lost terminal while training."""

import _thread
import logging
import signal
import threading
import time
from typing import Any

log = logging.getLogger("wangen")


ECHO_S = 3.0
"""One stop may arrive twice: from Slurm or the terminal, and handed on by the process that started this one."""


class Interrupt:
    """A signal while training: the first asks the loop to stop at the next step, a later one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._since_s = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._request) for number in _signals()}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, _number: int, _frame: object) -> None:
        if self.requested:
            if time.monotonic() - self._since_s < ECHO_S:
                return
            raise KeyboardInterrupt
        self.requested, self._since_s = True, time.monotonic()
        # What runs here may hold the terminal's locks, of the log or of a live bar: so another thread says it.
        _thread.start_new_thread(_say, ())


def _say() -> None:
    log.warning("  stopping after this step; the training state is saved (once more, after %.0f seconds, stops at "
                "once)", ECHO_S)  # fmt: skip


def hears_hangup() -> bool:
    """Whether this process is told that its terminal was closed or its connection lost: not under `nohup`."""
    return hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # Windows has none


def _signals() -> list[int]:
    """Those that ask to stop; batch systems send SIGXCPU near the end of the processor's time."""
    cpu_time = getattr(signal, "SIGXCPU", None)  # Windows has none
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hears_hangup() else []),
            *([cpu_time] if cpu_time is not None else [])]  # fmt: skip
