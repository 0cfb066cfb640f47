"""Ctrl-C and SIGTERM while training."""

import logging
import signal
import threading
from typing import Any

log = logging.getLogger("wangen")


class Interrupt:
    """Ctrl-C or SIGTERM while training: the first asks the loop to stop at the next step, the second stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, _number: int, _frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        log.warning("  stopping after this step; the training state is saved (once more stops at once)")
