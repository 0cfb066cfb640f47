"""The folders: rights, room, speed, and what they lie on."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from wangen.generator.doctor.facts import Facts, Place
from wangen.generator.doctor.findings import Finding, found
from wangen.generator.errors import bytes_text

_FULL, _LOW = 2 * 10**9, 20 * 10**9
_SLOW_WRITE, _SLOW_READ = 50e6, 100e6
_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "afpfs",
    "network",
    "fuse.sshfs",
    "fuse.rclone",
    "fuse.s3fs",
    "davfs",
)
_FAT = ("vfat", "msdos", "fat32", "fat")
_WSL_DRIVES = ("9p", "drvfs", "virtiofs")
_LONGEST_ROOT = 90
"""Below it come `files\\datasets\\NAME\\1280x720_cache\\` and a cache entry's name, up to 169 characters."""


def check(facts: Facts) -> Iterator[Finding]:
    """All that is said of the folders."""
    if facts.workspace:
        yield found("workspace-wrong", *facts.workspace)
    for place in facts.places:
        yield from _rights(place)
        if place.cloud:
            yield found("cloud", f"{place.what} lies in {place.cloud}", str(place.path))
        yield from _length(facts, place)
    by_mount: dict[str, list[Place]] = defaultdict(list)
    for place in facts.places:
        by_mount[place.mount].append(place)
    for places in by_mount.values():
        yield from _disk(facts, places)


def _rights(place: Place) -> Iterator[Finding]:
    if not place.writes:
        return
    if "ro" in place.options:
        yield found("read-only", f"{place.what} lies on a file system that is mounted read-only", str(place.path))
    elif not place.writable:
        below = "" if place.path == place.wanted else f", so that {place.wanted} cannot be made"
        yield found("not-writable", f"{place.what} cannot be written{below}", str(place.path))


def _length(facts: Facts, place: Place) -> Iterator[Finding]:
    root = place.as_target or str(place.wanted)
    windows = place.platform == "windows" and (place.fixed or facts.system.kind == "windows")
    if windows and len(root) > _LONGEST_ROOT and not facts.system.long_paths:
        yield found("long-root", f"the root of {place.what} has {len(root)} characters", root)


def _disk(facts: Facts, places: Iterable[Place]) -> Iterator[Finding]:
    """What is said once of all folders on one file system."""
    first, *others = places
    what = ", ".join(place.what for place in (first, *others))
    where, type_ = str(first.path), first.file_system
    rated = next((place for place in (first, *others) if place.write_rate is not None), first)
    yield Finding("ok", "disk", f"{what}: {type_ or 'a disk'}{_free(first)}{speed(rated)}", where)
    if first.free is not None and first.free < _LOW:
        yield found("disk-full" if first.free < _FULL else "disk-low", f"{bytes_text(first.free)} are free", where)
    if type_ in _FAT:
        yield found("disk-fat", f"the file system is {type_}", where)
    if facts.system.kind == "wsl" and type_ in _WSL_DRIVES:
        if used := [place.what for place in (first, *others) if place.platform != "windows"]:
            yield found("wsl-drive", f"{', '.join(used)}: a drive of Windows", where)
    elif type_ in _NETWORK:
        yield found("network-drive", f"{what}: a network drive ({type_})", where)
    if (rated.write_rate or _SLOW_WRITE) < _SLOW_WRITE or (rated.read_rate or _SLOW_READ) < _SLOW_READ:
        yield found("disk-slow", f"{what}:{speed(rated).replace(',', '', 1)}", where)


def _free(place: Place) -> str:
    return "" if place.free is None else f", {bytes_text(place.free)} free"


def speed(place: Place) -> str:
    """What was measured of a place's disk, as the end of a sentence; empty where nothing was."""
    if place.write_rate is None:
        return ""
    read = "" if place.read_rate is None else f", reads {place.read_rate / 1e6:.0f} MB/s"
    return f", writes {place.write_rate / 1e6:.0f} MB/s{read}"
