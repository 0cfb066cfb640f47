"""Files that are whole or absent, and patience with Windows around replace and delete."""

import errno
import filecmp
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO

from wangen.generator.errors import WangenError, write_cure

# Windows refuses to replace or remove a file that a virus scanner or an indexer has open for a moment.
RETRY_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
LONG_PAUSES_S = (1.5, 3.0, 5.0, 10.0, 10.0)
"""After these, for what a run of hours would end by; a scanner that reads a file keeps the folder around it, too."""

ABANDONED_S = 3600.0
"""A temporary file that nobody has written to for so long was left by a writer that was killed, wherever that was."""

_NAME_CHARACTERS = 40
"""So many of a file's name stand in that of its temporary file, which must not be too long."""

_WHOSE = re.compile(r"\..*-(?P<machine>[0-9a-f]{8})(?P<pid>[0-9a-f]{8})(?P<random>[0-9a-f]{8})?\.tmp")
"""Of every temporary file; in an older version's names the last part was absent."""


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two files hold the same, read now, to the first difference.

    Raises:
        OSError: one cannot be read.
    """
    filecmp.clear_cache()  # it takes a file of the same size and time for unchanged
    return filecmp.cmp(one, other, shallow=False)


def special(path: Path) -> str:
    """What a path is that is no file and no folder, such as a pipe; empty where it is one of them, or nothing is there.

    >>> special(Path(os.devnull)), special(Path("."))
    ('a device', '')
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # the reader will say it
        return "a link that leads to itself" if getattr(error, "errno", 0) == errno.ELOOP else ""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return ""
    return "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def is_file(path: Path) -> bool:
    """Whether a file is there, under whatever name somebody wrote down: one too long for the disk is none."""
    return os.path.isfile(path)  # noqa: PTH113 (Path's own raises for such a name)


def read_file(path: Path) -> bytes:
    """All bytes of a file that somebody gave. A pipe would be waited for, and a device never ends: both are refused.

    Raises:
        OSError: it cannot be read, is no file, or no file can have such a name.
    """
    if found := special(path):
        raise OSError(errno.EINVAL, f"it is {found} and no file", str(path))
    try:
        return path.read_bytes()
    except ValueError:
        raise OSError(errno.EINVAL, "a NUL character is in its name", str(path)) from None
    except MemoryError:
        raise OSError(errno.EFBIG, "it is larger than the memory", str(path)) from None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of reading and writing a file that is open say no name: here they say this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def spread(file: BinaryIO, num_pieces: int, piece_bytes: int) -> Iterator[bytes]:
    """What is left of a file, in pieces; of what is longer than so many pieces together, these at even distances."""
    start = file.tell()
    num_bytes = os.fstat(file.fileno()).st_size - start
    if num_bytes <= num_pieces * piece_bytes:
        while piece := file.read(piece_bytes):
            yield piece
        return
    for number in range(num_pieces):
        file.seek(start + (num_bytes - piece_bytes) * number // (num_pieces - 1))
        yield file.read(piece_bytes)


def write_whole(path: Path, chunks: Iterable[bytes | memoryview], *, mode: int | None = None) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of one, nor an empty one.

    Args:
        path: the file to make or replace; its folder must exist.
        chunks: its bytes.
        mode: permission bits; None: those of any new file.

    Raises:
        OSError: the disk refused; the temporary file is gone and the old file, if any, is untouched.
    """
    unique = temporary_beside(path)
    placed = False
    try:
        with naming(path):
            write_new(unique, chunks, mode)
        replace(unique, path)
        placed = True
    finally:
        if not placed:  # also when Ctrl-C came between the two
            with suppress(OSError):
                unique.unlink(missing_ok=True)
    sync_folder(path.parent)


def nearest_existing(path: Path) -> Path | None:
    """The path, or the nearest folder above it that exists; None when not even its drive does."""
    return next((place for place in (path.absolute(), *path.absolute().parents) if place.exists()), None)


def disk_of(folder: Path) -> int | None:
    """The number of the file system that a folder lies on, or would; None when not even its drive is there."""
    existing = nearest_existing(folder)
    return None if existing is None else existing.stat().st_dev


def bytes_on_disk_of(folder: Path, to_write: Mapping[Path, int]) -> int:
    """How many of the bytes that are to be written into other folders go to the file system of this one."""
    disk = disk_of(folder)
    return sum(num_bytes for other, num_bytes in to_write.items() if disk_of(other) == disk)


def full_disks(to_write: Mapping[Path, int]) -> Iterator[tuple[Path, int, int]]:
    """Of each file system that cannot hold what is to be written: its first folder, the bytes, and those free.

    Raises:
        OSError: a folder cannot be looked at.
    """
    by_disk = {disk_of(folder): folder for folder in reversed(list(to_write))}
    for folder in by_disk.values():
        if existing := nearest_existing(folder):
            free, needed = shutil.disk_usage(existing).free, bytes_on_disk_of(folder, to_write)
            if free < needed:
                yield folder, needed, free


def unwritable(folder: Path) -> str:
    """Why a folder cannot be made or written, in words; empty when it can, as far as that is seen without trying."""
    existing = nearest_existing(folder)
    if existing is None:
        return f"lies on a drive that is not there: {folder}"
    if not existing.is_dir():
        return f"cannot make the folder {folder}: {existing} is a file"
    return "" if os.access(existing, os.W_OK) else f"the folder cannot be written: {existing}"


def temporary_beside(path: Path) -> Path:
    """A name for the file that will take another one's place: of this process alone, and never too long."""
    return path.with_name(f".{path.name[:_NAME_CHARACTERS]}-{whose()}.tmp")


def whose() -> str:
    """24 hex digits for the name of a temporary file: machine, process, and a random part.

    So what a killed process left can be told from what a live one is writing, on a shared drive too.
    """
    return f"{machine()}{os.getpid():08x}{secrets.token_hex(4)}"


def is_left(temporary: Path) -> bool:
    """Whether the writer of a temporary file is dead: no such process here, or nothing written to it for an hour.

    Raises:
        OSError: the file is gone or cannot be looked at.
    """
    import psutil

    match = _WHOSE.fullmatch(temporary.name)
    if not match:
        return False
    if match["random"] and match["machine"] == machine() and not psutil.pid_exists(int(match["pid"], 16)):
        return True
    return time.time() - temporary.stat().st_mtime > ABANDONED_S


def remove_left(path: Path) -> None:
    """Remove the temporary files that killed writers have left beside a file which is about to be written."""
    _remove_left(path.parent, escape(path.name[:_NAME_CHARACTERS]))


def remove_all_left(folder: Path) -> None:
    """Remove the temporary files that killed writers have left in a folder, whatever they wrote there."""
    _remove_left(folder, "*")


def _remove_left(folder: Path, names: str) -> None:
    for temporary in folder.glob(f".{names}-*.tmp"):
        with suppress(OSError):
            if is_left(temporary):
                temporary.unlink()


def machine() -> str:
    """8 hex digits of where a process number counts: Windows and its WSL, or a machine's containers, share a name."""
    import socket
    from hashlib import sha256

    name = f"{socket.gethostname()} {sys.platform}"
    with suppress(OSError):
        name += str(Path("/proc/self/ns/pid").readlink())
    return sha256(name.encode()).hexdigest()[:8]


def write_new(path: Path, chunks: Iterable[bytes | memoryview], mode: int | None) -> None:
    """Write a file that must not exist yet, durable and with its rights; when that fails, it is gone again.

    Raises:
        OSError: there is such a file, which stays, or the disk refused.
    """
    file = path.open("xb")
    whole = False
    try:
        with file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            set_rights(path, mode)
        whole = True
    finally:
        if not whole:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def set_rights(path: Path, mode: int) -> None:
    """Give a file its permission bits; on a share or a stick that another user has mounted all files have its own."""
    with suppress(OSError):
        path.chmod(mode)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all, and make its folder first.

    Raises:
        WangenError: the folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A file name of another encoding becomes an escape, which is good JSON.
        write_whole(path, [text.encode("utf-8", "backslashreplace")])
    except OSError as error:
        raise WangenError(f"cannot write: {error.strerror}", where=str(path), cure=write_cure(error)) from None


def replace(source: Path, target: Path, *, long: bool = False) -> None:
    """Move a file into place over another one, or a folder where none is, patiently.

    Args:
        source: what to move.
        target: its name from now on.
        long: try for half a minute.

    Raises:
        OSError: still refused after 1.5 seconds, or 31, or at once for another reason than rights.
    """
    _patiently(lambda: source.replace(target), (*RETRY_PAUSES_S, *LONG_PAUSES_S) if long else RETRY_PAUSES_S)


def place_new(source: Path, target: Path) -> None:
    """Move a file into place where nothing is, also when several do so at once: one of them gets the name.

    Raises:
        FileExistsError: something is there, which stays; the source stays, too.
        OSError: the disk refused.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # exFAT and some network drives know no links
        target.open("xb").close()
        replace(source, target)
    else:
        remove(source)


def remove(path: Path) -> None:
    """Remove a file if it is there, patiently.

    Raises:
        OSError: still refused after 1.5 seconds, or at once for another reason than rights.
    """
    _patiently(lambda: path.unlink(missing_ok=True), RETRY_PAUSES_S)


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it if it is there, patiently.

    Raises:
        OSError: still refused after 1.5 seconds, or at once for another reason than rights; what was removed is gone.
    """

    def remove_rest() -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)

    _patiently(remove_rest, RETRY_PAUSES_S)


def sync_folder(folder: Path) -> None:
    """Make the new names in a folder durable; Windows and some network drives have no such call for folders.

    Raises:
        OSError: the folder cannot be opened, or the disk refused.
    """
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _patiently(action: Callable[[], object], pauses_s: Iterable[float]) -> None:
    for pause_s in pauses_s:
        try:
            action()
        except PermissionError:
            time.sleep(pause_s)
        else:
            return
    action()
