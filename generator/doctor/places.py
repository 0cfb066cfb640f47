"""Looking at folders: the disk they lie on, how fast it is, and whether something keeps them in a cloud.

What is measured is written into a file without a name (on Windows one that the system removes when it is closed), so
that nothing stays behind, however this ends.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath, PureWindowsPath
from typing import NamedTuple

import psutil

from wangen.generator.doctor.facts import Place
from wangen.generator.errors import UsageError
from wangen.generator.target import Target
from wangen.generator.workspace import Workspace

_CHUNK_BYTES = 4 * 2**20
_NUM_CHUNKS = 32
_LIMIT_S = 2.0
"""So long at most is written; a disk that is slower is known by then."""

_CLOUDS = {
    "OneDrive": r"onedrive( - .+)?|onedrive-.+",
    "Dropbox": r"dropbox( \(.+\))?",
    "iCloud Drive": r"iclouddrive|mobile documents",
    "Google Drive": r"google ?drive.*|my drive",
    "Nextcloud": r"nextcloud|owncloud",
    "pCloud": r"pclouddrive",
    "MEGA": r"megasync",
    "Box": r"box sync",
}
"""A service, and what its folder is called: the whole name of a folder, in lower case."""
_MARKS = {"Dropbox": ".dropbox.cache", "Syncthing": ".stfolder", "Nextcloud": ".sync_journal.db"}
"""What a service leaves at the top of its folder."""


class Mount(NamedTuple):
    """A file system: where it is mounted, its type and options."""

    point: str
    file_system: str
    options: tuple[str, ...]


def places_of(workspace: Workspace | None, folder: Path) -> list[Place]:
    """The folders of a workspace, or the one that `folder` is, with all that is known of each.

    Args:
        workspace: None looks at `folder` alone.
        folder: where the user is.
    """
    if workspace is None:
        return [look(Place(what="this folder", path=folder, wanted=folder))]
    wanted = [Place(what="workspace", path=workspace.folder, wanted=workspace.folder)]
    for name in workspace.platforms:
        with suppress(UsageError):  # a root that this machine does not see is nothing to look at here
            wanted += _of_target(workspace.target(name))
    seen: dict[Path, Place] = {}
    for place in wanted:  # bundles mostly lie below the workspace, on its disk
        seen.setdefault(place.wanted, place)
    rated: dict[str, Place] = {}
    return [look(place, rated) for place in seen.values()]


def _of_target(target: Target) -> list[Place]:
    name, kind, fixed = target.platform.name, target.platform.kind, target.root is not None
    made = [Place(what=f"bundle for {name}", path=target.folder, wanted=target.folder, as_target=target.root or "",
                  platform=kind, fixed=fixed)]  # fmt: skip
    for key, text in target.roots.items():
        written = target.path(text)
        path = target.reach(written)
        if path is not None and not path.is_relative_to(target.folder):
            made.append(Place(what=f"{key} for {name}", path=path, wanted=path, as_target=written, platform=kind,
                              fixed=fixed, writes=key != "models"))  # fmt: skip
    return made


def look(place: Place, rated: dict[str, Place] | None = None) -> Place:
    """The place with what is known of it.

    Args:
        place: with its `wanted` folder.
        rated: mount -> a place whose disk was measured already; it is added to.
    """
    wanted = place.wanted.absolute()
    path = next((above for above in (wanted, *wanted.parents) if _exists(above)), wanted)
    mount = mount_of(str(path), mounts())
    writable = path.is_dir() and os.access(path, os.W_OK)
    known, cloud = (rated or {}).get(mount.point), cloud_of(path)
    if known:
        write, read = known.write_rate, known.read_rate
    else:
        # A cloud service would take what is written for a file of the user's.
        write, read = measure(path) if place.writes and writable and not cloud else (None, None)
    found = replace(
        place, path=path, wanted=wanted, file_system=mount.file_system, mount=mount.point, options=mount.options,
        free=_free(path), writable=writable, cloud=cloud, write_rate=write, read_rate=read,
    )  # fmt: skip
    if rated is not None and write is not None:
        rated[mount.point] = found
    return found


def mounts() -> list[Mount]:
    """Every file system of this machine."""
    try:
        partitions = psutil.disk_partitions(all=True)
    except (OSError, RuntimeError):
        return []
    return [Mount(part.mountpoint, part.fstype.lower(), tuple(part.opts.split(","))) for part in partitions]


def mount_of(path: str, known: Iterable[Mount], *, windows: bool = sys.platform == "win32") -> Mount:
    """The file system that a path lies on; of a Windows share a made one.

    >>> disks = [Mount("/", "ext4", ("rw",)), Mount("/mnt/c", "9p", ("rw",)), Mount("/mnt", "tmpfs", ("ro",))]
    >>> [mount_of(path, disks, windows=False).point for path in ("/mnt/c/AI", "/mnt/cx", "/data")]
    ['/mnt/c', '/mnt', '/']
    """
    if windows and path.startswith(("\\\\", "//")):
        return Mount(PureWindowsPath(path).anchor, "network", ())

    def parts(text: str) -> tuple[str, ...]:
        return PureWindowsPath(text.lower()).parts if windows else tuple(part for part in text.split("/") if part)

    inside = [mount for mount in known if parts(path)[: len(parts(mount.point))] == parts(mount.point)]
    # Of two at the same place the later one hides the other.
    return max(reversed(inside), key=lambda mount: len(parts(mount.point)), default=Mount("", "", ()))


def cloud_of(path: Path) -> str:
    """The service that keeps a folder in the cloud, told by names and by what it leaves there; empty for none."""
    named = cloud_of_names(path)
    if named:
        return named
    roots = [Path(os.environ[name]) for name in ("OneDrive", "OneDriveCommercial") if os.environ.get(name)]
    if any(path.is_relative_to(root) for root in roots):
        return "OneDrive"
    above = (path, *path.parents)
    return next((service for service, mark in _MARKS.items() if any(_exists(each / mark) for each in above)), "")


def cloud_of_names(path: PurePath) -> str:
    r"""The service that the folders' names tell; empty for none.

    >>> cloud_of_names(PureWindowsPath(r"C:\Users\Ann\OneDrive - Contoso\cats"))
    'OneDrive'
    >>> cloud_of_names(PureWindowsPath(r"C:\AI\dropbox-tool"))
    ''
    """
    for part in path.parts:
        for service, pattern in _CLOUDS.items():
            if re.fullmatch(pattern, part.lower()):
                return service
    return ""


def measure(folder: Path) -> tuple[float | None, float | None]:
    """How fast a folder's disk writes, and reads what memory does not hold, in bytes per second; None: not measured."""
    chunk = os.urandom(_CHUNK_BYTES)  # some disks compress
    if shutil.disk_usage(folder).free < 4 * _NUM_CHUNKS * _CHUNK_BYTES:
        return None, None
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".wangen-doctor-", buffering=0) as file:
            began = time.perf_counter()
            written = 0
            while written < _NUM_CHUNKS and time.perf_counter() - began < _LIMIT_S:
                file.write(chunk)
                os.fsync(file.fileno())
                written += 1
            write = written * _CHUNK_BYTES / max(time.perf_counter() - began, 1e-9)
            return write, _read_rate(file.fileno(), written)
    except OSError:
        return None, None


def _read_rate(descriptor: int, num_chunks: int) -> float | None:
    """Where the system can be told to forget what was written."""
    if sys.platform != "linux":
        return None
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    began, count = time.perf_counter(), 0
    while count < num_chunks and time.perf_counter() - began < _LIMIT_S and os.read(descriptor, _CHUNK_BYTES):
        count += 1
    return count * _CHUNK_BYTES / max(time.perf_counter() - began, 1e-9)


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a drive that does not answer, or rights that are missing
        return False
