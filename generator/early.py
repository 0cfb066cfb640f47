"""How a process ends that is stopped before anything else of it is loaded; what this imports is not stopped so."""

import os

STOPPED = "stopped. Nothing saved is lost: run the same line again to go on."

WAS_STOPPED = 130
"""The exit code of what Ctrl-C or a signal stopped, as shells have it (128 + SIGINT): there is nothing to mend."""


def end_at_once(_signal_number: int, _frame: object) -> None:
    """Ctrl-C while nothing is open, as before a step begins: end with the message and the exit code."""
    try:  # noqa: SIM105 - contextlib would come first
        os.write(2, f"wangen: {STOPPED}\n".encode())
    except OSError:  # standard error may be closed, or nobody reads it
        pass
    os._exit(WAS_STOPPED)
