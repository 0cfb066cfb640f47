"""The console script. The overview is shown from a file, because importing the table and click takes longer than
reading it; `reference.py` writes that file from them, and a test compares the two.
"""

import os
import sys

from wangen.generator import COMPLETE
from wangen.generator.early import end_at_once

OVERVIEW = __file__.removesuffix("entry.py") + "overview.txt"


def begin_module() -> None:
    """What comes first in `python -m wangen.runtime`, and nothing where somebody imports that.

    Ctrl-C and SIGTERM are heard from here on; until a step begins the first would else end in a traceback.
    `python -m wangen.runtime.train` ends here: it would load a module, do nothing, and succeed.
    """
    if sys.argv[:1] != ["-m"]:  # Python looks for a module to run
        return
    words = iter(sys.orig_argv)
    first = next((word for word in words if word.startswith("-m")), "")
    named = first[2:] or next(words, "")
    if named == "wangen.runtime":
        _hear_stops()
    elif named.startswith("wangen.runtime.") and named != "wangen.runtime.doctor":
        sys.stderr.write(f"wangen: {named} is no program\n  do:    python -m wangen.runtime STEP, train for example\n")
        sys.exit(2)


def _hear_stops() -> None:
    """Have Ctrl-C and SIGTERM end the process with a message until a step begins, which has its own way to stop."""
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_at_once)


def _fill_streams() -> None:
    """Open nothing in place of standard streams that are closed: else the next file that is opened would be one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def entry() -> None:
    """Run `wangen` with the words of the command line and exit with its code."""
    if sys.argv[1:] in ([], ["--help"]) and COMPLETE not in os.environ:
        with open(OVERVIEW, encoding="utf-8") as file:  # noqa: PTH123 - pathlib alone takes a bare interpreter's start
            sys.stdout.write(file.read())
        return
    # The Pythons that this one starts look for no module in the working folder either, whoever filled it.
    os.environ["PYTHONSAFEPATH"] = "1"
    _hear_stops()
    import atexit
    import io
    import signal

    # When all that may hang has ended; Python itself would take its handler away, and a second one would be the end.
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    _fill_streams()
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal's encoding lacks is shown, not an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    from wangen.generator.stopping import stop, stop_with_launcher

    stop_with_launcher()
    from wangen.generator.cli import main

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    code = main()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))  # a second one, while the first one's end is under way
    try:
        if sys.stdout:  # it may be closed (`>&-`)
            sys.stdout.flush()
    except OSError:  # a full disk or a closed pipe, which `main` has told; the interpreter would tell it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done: only the interpreter is left to end
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Of processes that trained together the interpreter would end the threads of gloo, which may abort (torch 2.13:
        # 3 of some 60 ends with --parallel fsdp).
        if sys.stderr:
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
