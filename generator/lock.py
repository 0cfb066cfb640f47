"""One run at a time: a lock file that names its owner and beats while the owner lives.

The owner is the script (the nearest ancestor process that is not Python) when wangen's scripts run the step, so that
the lock also covers the moments between two steps; else it is the step itself. A lock whose owner is dead is free:
nothing has to be cleaned up after a kill. A script that is run inside a terminal's own process (cmd, PowerShell) leaves
an owner that lives on: its lock is free too when no step has run for a while.
"""

import errno
import glob
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from wangen.generator.errors import TakenOverError, WangenError
from wangen.generator.files import is_left, remove, whose
from wangen.generator.processes import Process, alive, container, here, identity, is_python

log = logging.getLogger("wangen")

IN_SCRIPT = "WANGEN_SCRIPT"
RUN_LOCK = "run.lock"
"""The lock of a run, in its output folder."""
RUN_LOCKS = "run*.lock"
"""The locks in an output folder: of a run, and of each part of its caching (`--shard`)."""
HEARTBEAT_S = 10.0
LEASE_S = 120.0
"""A lock held from another machine counts as abandoned when it has not beaten for this long."""
GAP_S = 60.0
"""So long after its last step a script on this machine still holds the lock."""
START_S = 2.0
"""A lock file without content is one that is being written, unless it is older than this."""

WAIT_S = 1.0
"""The pause before a lock of another machine is looked at again."""

_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK,
             errno.EXDEV}  # fmt: skip
"""What file systems without hard links answer; one that is put together of several may say the last."""

_TRIES = 3
"""How often a lock is tried to be taken that nobody holds, in case another takes it at the same moment."""

_IN_THE_WAY = {
    errno.EISDIR: "a folder bears the name of the lock: move it away, or give another --lock",
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a file bears the name of a folder above it: move the file away, or "
                    "give another --lock and --output_dir"),
}  # fmt: skip
"""What to do where something else has the place."""

_BEGINS = '{"host": '
"""How every lock file begins, also one that a kill has cut off; any other file is the user's."""
_LENGTHS = range(len('{"host": "", "run": [1, 0.0], "step": [1, 0.0]}'), 1 << 15)
"""How long a lock is: after a power loss a file may have its length, and nothing but zero bytes in it."""


@dataclass(frozen=True)
class Owner:
    """Who holds a lock.

    Attributes:
        host: name of the machine, and of the container on it: process ids of another one say nothing here.
        run: the script, or the step when there is no script.
        step: the step itself.
    """

    host: str
    run: Process
    step: Process

    def text(self, **more: object) -> str:
        """What stands in the lock file."""
        return json.dumps(asdict(self) | more)

    @classmethod
    def parse(cls, text: str) -> "Owner | None":
        """The owner in a lock file; None when the file is half-written or not ours."""
        try:
            values = json.loads(text)
            run, step = ((int(values[key][0]), float(values[key][1])) for key in ("run", "step"))
            return cls(str(values["host"]), run, step)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            return None


ON_DATASET = "works on this dataset"

_HELD: dict[Path, Owner] = {}
"""The locks that this process holds, by their full paths, and what it has written into them."""


@contextmanager
def hold(
    path: Path | None, does: str = ON_DATASET, *, by_script: bool = True, wait_s: float = 0.0, waits: bool = False
) -> Iterator[None]:
    """Hold the lock file while the block runs; None locks nothing.

    Args:
        path: the file.
        does: what another run that holds it does, for the message.
        by_script: the script that runs this step, if there is one, holds it until it ends, between its steps too.
        wait_s: so long one of another machine is waited for, which may have died there without a word.
        waits: whoever holds it is waited for, however long that is.

    Raises:
        WangenError: another live run holds it, or the file cannot be written.
    """
    if path is None:
        yield
        return
    mine = _owner() if by_script else this_process()
    _take(path, mine, does, math.inf if waits else wait_s, from_here=waits)
    place = path.resolve()  # now: where a link leads may change
    _HELD[place] = mine
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, mine, stop), daemon=True)
    try:
        beat.start()
        yield
    finally:
        stop.set()
        del _HELD[place]
        if beat.is_alive():  # a signal may have come while it started
            beat.join()
        # The next job may run on another machine or in another container, which cannot see that this script has ended.
        if not by_script or not os.environ.get(IN_SCRIPT) or "SLURM_JOB_ID" in os.environ or container():
            _release(path, mine)


def busy(path: Path) -> WangenError | None:
    """What to say while a live run holds a lock; None when it is free. The lock is neither taken nor cleared."""
    found = read(path)
    if found is None:
        return None
    text, age_s = found
    owner = Owner.parse(text)
    free = is_free(owner, age_s) or _is_copy(path, owner, text)
    return None if free else _busy(path, owner, age_s, ON_DATASET)


def require_own(path: Path) -> None:
    """Refuse to go on where another run has taken over a lock that this process holds, as while it was suspended.

    Raises:
        TakenOverError: it names another owner than the one that this process has written.
    """
    mine = _HELD.get(path.resolve())
    with suppress(OSError):  # a network folder may be away for a moment
        found = read(path) if mine else None
        owner = Owner.parse(found[0]) if found else None
        if owner and owner != mine:
            raise TakenOverError(
                f"process {owner.run[0]} on {owner.host} has taken this folder over, as it may while a run stands "
                "still; what this one has done since its last saved state is not written",
                where=str(path), cure="let the other run go on, or stop it and run the same line again",
            )  # fmt: skip


def busy_run(folder: Path) -> WangenError | None:
    """What to say while a run, or a part of one, is at work with an output folder; None when none is."""
    return next(filter(None, map(busy, sorted(folder.glob(RUN_LOCKS)))), None)


def _take(path: Path, mine: Owner, does: str, wait_s: float, *, from_here: bool) -> None:
    """Make the lock file; one that is held is waited for, one of this machine only with `from_here`."""
    until_s, tries, said = time.monotonic() + wait_s, _TRIES, False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        while tries:
            tries -= 1
            if create(path, _text(path, mine)):
                return
            found = read(path)
            if found is None:
                continue
            text, age_s = found
            other = Owner.parse(text)
            if not other and not _is_half(text):
                raise _no_lock(path)
            if other and (other.host, other.run) == (mine.host, mine.run) and not alive(other.step):
                _renew(path, mine)
                return
            if is_free(other, age_s) or _is_copy(path, other, text):
                _clear(path, text)
            elif (from_here or (other and other.host != mine.host)) and time.monotonic() < until_s:
                if from_here and other and not said:
                    log.info("  waiting: %s", _busy(path, other, age_s, does).found)
                    said = True
                tries = _TRIES
                time.sleep(WAIT_S)
            else:
                raise _busy(path, other, age_s, does)
    except OSError as error:
        cure = _IN_THE_WAY.get(error.errno or 0, "free space or fix the folder's rights")
        raise WangenError(f"cannot write the lock file: {error.strerror}", where=str(path), cure=cure) from None
    if path.is_symlink():  # to nowhere: it can neither be read nor made
        raise _no_lock(path)
    raise TakenOverError("another run took the lock at the same moment", where=str(path), cure="wait for it to end")


def _sweep(path: Path) -> None:
    """Remove what processes that were killed while they took this lock have left beside it."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}-*.tmp"):
        with suppress(OSError):  # another has just removed it
            if is_left(temporary):
                remove(temporary)


def create(path: Path, text: str) -> bool:
    """Make a lock file, whole or not at all; False when there is one.

    It is written beside its place and linked into it, so that who is killed here leaves no half of one. Where the file
    system knows no links it is written in its place.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    temporary = _beside(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_in_place(path, text)
    finally:
        remove(temporary)
    return True


def _create_in_place(path: Path, text: str) -> bool:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _renew(path: Path, mine: Owner) -> None:
    """The next step of the same run: the file is replaced, so that there is no moment without it."""
    temporary = _beside(path)
    temporary.write_text(_text(path, mine), encoding="utf-8")
    temporary.replace(path)


def _clear(path: Path, judged: str) -> None:
    """Remove a free lock. It is moved away first: of two runs that found it free, one must not remove the other's."""
    away = _beside(path)
    try:
        path.replace(away)
    except FileNotFoundError:
        return
    if away.read_text(encoding="utf-8", errors="replace") != judged:
        with suppress(OSError):
            away.rename(path) if os.name == "nt" else os.link(away, path)
    away.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.parent / f".{path.name}-{whose()}.tmp"


def read(path: Path) -> tuple[str, float] | None:
    """Content of a lock file and seconds since its last heartbeat; None when it is gone.

    They are below 0 where it is of another machine, whose clock is ahead.

    Raises:
        OSError: it cannot be read.
    """
    try:
        age_s = time.time() - path.stat().st_mtime
        return path.read_text(encoding="utf-8", errors="replace"), age_s
    except FileNotFoundError:
        return None


def is_free(owner: Owner | None, age_s: float) -> bool:
    """Whether nobody holds a lock file any more.

    Args:
        owner: what it says; None when that is nothing sensible.
        age_s: seconds since its last heartbeat.
    """
    if owner is None:
        return age_s > START_S
    if owner.host != here():
        return age_s > LEASE_S
    # A script can be killed alone, and its step goes on; between two steps there is none.
    return not alive(owner.step) and (not alive(owner.run) or age_s > GAP_S)


def _is_half(text: str) -> bool:
    """Whether a file that names no owner is a lock that a kill or a power loss has cut off."""
    return text.startswith(_BEGINS[: len(text)]) or (len(text) in _LENGTHS and not text.strip("\0"))


def _is_copy(path: Path, owner: Owner | None, text: str) -> bool:
    """Whether a lock came with its folder when that was copied, while its owner works on in the first one.

    Both the inode of the folder and its path must be others. A folder that was moved keeps its inode; one that is
    reached by another path does, too, and where inodes are made up anew (FUSE, CIFS) the path is the same.
    """
    noted = json.loads(text).get("folder") if owner and owner.host == here() else None
    if not isinstance(noted, list) or len(noted) != 2:
        return False
    return all(own and was and own != was for own, was in zip(_folder(path), noted, strict=True))


def _text(path: Path, mine: Owner) -> str:
    """An owner with the folder that the lock is made in; those of earlier versions say nothing of that."""
    return mine.text(folder=_folder(path))


def _folder(path: Path) -> tuple[int, str]:
    """Which folder a lock is in; inode 0 where the file system knows none."""
    folder = path.parent.resolve()
    return folder.stat().st_ino, str(folder)


def _no_lock(path: Path) -> WangenError:
    return WangenError("a file that is no lock is in the place of the lock", where=str(path),
                       cure="give another --lock, or move the file away")  # fmt: skip


def _busy(path: Path, owner: Owner | None, age_s: float, does: str) -> WangenError:
    who = "one that is just starting"
    if owner:
        # That of another machine is not known here.
        living = owner.run if owner.host != here() or alive(owner.run) else owner.step
        who = f"process {living[0]} on {owner.host}"
    found = f"another run {does}: {who}, last sign of life {max(0.0, age_s):.0f} s ago"
    cure = "wait for it to end or stop it"
    if age_s < -GAP_S:
        found = f"another run {does}: {who}, last sign of life {-age_s:.0f} s ahead of this machine's clock"
        cure = f"{cure}; if it is dead, remove this file"
    return TakenOverError(found, where=str(path), cure=cure)


def this_process() -> Owner:
    """The owner of what only this process works on, whatever script it belongs to."""
    import psutil

    me = identity(psutil.Process())
    return Owner(here(), me, me)


def _owner() -> Owner:
    import psutil

    step = psutil.Process()
    run = step
    if os.environ.get(IN_SCRIPT):
        run = next((parent for parent in step.parents() if not is_python(parent)), step)
    return Owner(here(), identity(run), identity(step))


def _beat(path: Path, mine: Owner, stop: threading.Event) -> None:
    """Show that the owner lives; a lock that went with its folder is made again, another's is left alone."""
    while not stop.wait(HEARTBEAT_S):
        with suppress(OSError):  # a network folder may be away for a moment; the work goes on
            found = read(path)
            if found is None:
                create(path, _text(path, mine))
            elif Owner.parse(found[0]) == mine:
                os.utime(path)


def _release(path: Path, mine: Owner) -> None:
    """Remove the lock unless it is another's by now."""
    with suppress(OSError):  # a lock that stays is free as soon as this process ends
        if Owner.parse(path.read_text(encoding="utf-8", errors="replace")) == mine:
            path.unlink(missing_ok=True)
