"""The console script. The overview is shown from a file, because importing the table and click takes longer than
reading it; `reference.py` writes that file from them, and a test compares the two.
"""

import os
import sys
from types import FrameType

OVERVIEW = __file__.removesuffix("entry.py") + "overview.txt"
STOPPED = "stopped. Nothing saved is lost: run the same line again to go on."


def entry() -> None:
    """Run `wangen` with the words of the command line and exit with its code."""
    if sys.argv[1:] in ([], ["--help"]):
        with open(OVERVIEW, encoding="utf-8") as file:  # noqa: PTH123 - pathlib alone takes a bare interpreter's start
            sys.stdout.write(file.read())
        return
    import signal

    signal.signal(signal.SIGINT, stop)
    from wangen.generator.cli import main

    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done: only the interpreter is left to end
    sys.exit(code)


def stop(_signal_number: int, frame: FrameType | None) -> None:
    """Ctrl-C, and SIGTERM in a step: a KeyboardInterrupt, except while libraries are imported.

    An import that is broken off leaves a library half made; some swallow the interrupt, others end in a traceback about
    something else. Nothing is open at such a moment, so the process just ends, with the message and exit code 1.

    Raises:
        KeyboardInterrupt: no import is under way.
    """
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, f"wangen: {STOPPED}\n".encode())
            os._exit(1)
        frame = frame.f_back
    raise KeyboardInterrupt
