"""What Ctrl-C does, and what is said then; and what a process does whose launcher is gone."""

import os
import signal
import sys
from types import FrameType

from wangen.generator.early import end_at_once

PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`: the signal that comes when the thread that started this process is gone."""


def stop(signal_number: int, frame: FrameType | None) -> None:
    """Ctrl-C and SIGTERM: a KeyboardInterrupt, except while libraries are imported.

    An import that is broken off leaves a library half made; some swallow the interrupt, others end in a traceback about
    something else. Nothing is open at such a moment, so the process just ends, with the message and the exit code.

    Raises:
        KeyboardInterrupt: no import is under way.
    """
    while frame:
        # It alone lies under every import; others of its module answer quick questions in the middle of work.
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename.startswith("<frozen importlib"):
            end_at_once(signal_number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def stop_with_launcher() -> None:
    """Have SIGTERM come when torch's launcher, which started this process, is killed; on Linux only.

    Else its processes would train on without it, and a second start would find the output folder taken.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    import ctypes

    launcher = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it was killed before that line
        os.kill(os.getpid(), signal.SIGTERM)
