"""Which process is which: on this machine, in this container, now and before."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

NO_CONTAINER = "pid:[4026531836]"
"""The space of process ids that Linux starts with, a constant of its source; containers have others."""

Process = tuple[int, float]
"""Process id and start time in seconds, since the system booted or else since 1970: ids are used again."""


def here() -> str:
    """Where process ids are those of this process: its machine, and its container if it is in one."""
    return ", ".join(filter(None, [socket.gethostname(), container()]))


def container() -> str:
    """What tells this container from others on the machine; empty outside of one, and where there is no Linux."""
    try:
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - a link to nowhere, which pathlib would make a path
    except OSError:
        return ""
    return "" if space == NO_CONTAINER else f"container {space}"


def identity(process: "psutil.Process") -> Process:
    """What tells a process of this machine from all others, before and after it."""
    return process.pid, _since_boot_s(process.pid) or process.create_time()


def _since_boot_s(pid: int) -> float:
    """When Linux started a process, in seconds since it booted itself: no clock that is set anew changes that.

    The time by the clock, which psutil says, moves with the clock: a live run would look like another process.

    Returns:
        0.0 where there is no such file.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(words[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def is_python(process: "psutil.Process") -> bool:
    """Whether a process is a Python, by its name."""
    import psutil

    try:
        return process.name().lower().startswith("python")
    except psutil.Error:
        return False


def alive(process: Process) -> bool:
    """Whether a process of this machine runs; another one that got its number later does not count."""
    import psutil

    pid, started = process
    try:
        found = psutil.Process(pid)
        since_boot_s = _since_boot_s(pid)
        # By the clock it is in the locks of other systems, and of earlier versions.
        same = since_boot_s == started or abs(found.create_time() - started) < 1.0
        return same and found.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:  # another user's process: it lives
        return True
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False
