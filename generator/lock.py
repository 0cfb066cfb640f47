"""One run at a time: a lock file that names its owner and beats while the owner lives.

The owner is the script (the nearest ancestor process that is not Python) when wangen's scripts run the step, so that
the lock also covers the moments between two steps; else it is the step itself. A lock whose owner is dead is free:
nothing has to be cleaned up after a kill.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wangen.generator.errors import WangenError

IN_SCRIPT = "WANGEN_SCRIPT"
HEARTBEAT_S = 10.0
LEASE_S = 120.0
"""A lock held from another machine counts as abandoned when it has not beaten for this long."""


@contextmanager
def hold(path: Path | None) -> Iterator[None]:
    """Hold the lock file while the block runs; None locks nothing.

    Raises:
        WangenError: another live run holds it, or the file cannot be written.
    """
    if path is None:
        yield
        return
    mine = _owner()
    _take(path, mine)
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, stop), daemon=True)
    beat.start()
    try:
        yield
    finally:
        stop.set()
        beat.join()
        if not os.environ.get(IN_SCRIPT):
            path.unlink(missing_ok=True)


def _take(path: Path, mine: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(3):
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                _clear_if_free(path, mine)
                continue
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(mine, file)
            return
    except OSError as error:
        raise WangenError(f"cannot write the lock file: {error.strerror}", where=str(path)) from None
    raise WangenError("another run took the lock at the same moment", where=str(path), cure="wait for it to end")


def _clear_if_free(path: Path, mine: dict[str, Any]) -> None:
    """Remove the lock file if it is ours or its owner is gone; refuse otherwise."""
    try:
        age_s = time.time() - path.stat().st_mtime
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    try:
        other = json.loads(text)
    except ValueError:  # killed between creating and writing, or being written right now
        other = {}
    if other == mine or _is_free(other, age_s):
        path.unlink(missing_ok=True)
        return
    raise WangenError(
        f"another run works on this dataset: process {other.get('pid')} on {other.get('host')}, "
        f"last sign of life {age_s:.0f} s ago",
        where=str(path),
        cure="wait for it to end or stop it",
    )


def _is_free(owner: dict[str, Any], age_s: float) -> bool:
    if not owner:
        return age_s > 2.0
    if owner.get("host") != socket.gethostname():
        return age_s > LEASE_S
    return not _alive(owner["pid"], owner["started"])


def _alive(pid: int, started: float) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # another user's process: it lives
        return True


def _owner() -> dict[str, Any]:
    import psutil

    process = psutil.Process()
    if os.environ.get(IN_SCRIPT):
        process = next((p for p in process.parents() if not p.name().lower().startswith("python")), process)
    return {"host": socket.gethostname(), "pid": process.pid, "started": process.create_time()}


def _beat(path: Path, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_S):
        try:
            os.utime(path)
        except OSError:  # the folder is gone or read-only: the lock cannot be kept, the work goes on
            return
