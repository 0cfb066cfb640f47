r"""How one path is written on each platform: `C:\AI` on Windows, `/mnt/c/AI` in WSL, `C:/AI` in a Windows TOML.

A path is read once, by the rules of the machine that wrote it, into the place it names (a drive, a network share,
a Linux file system, or somewhere below a root) and written again by the rules of the machine that will open it.
`..` is kept, because a symbolic link may stand before it; `.` and doubled separators are dropped.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Literal

from wangen.generator.errors import WangenError, printable

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_PERCENT_VARIABLE = re.compile(r"%[A-Za-z_]\w*%")
_WHOLE_VARIABLE = re.compile(r"\A(?:\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\}|%[A-Za-z_]\w*%)\Z")
_DEVICE_NAME = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])", re.IGNORECASE)
_ILLEGAL_ON_WINDOWS = frozenset('<>:"/\\|?*')
_WSL_SERVERS = ("wsl.localhost", "wsl$")
_COMPONENT_UNITS = 255
_SLUG_LENGTH = 64


class PathError(WangenError):
    """A path that cannot be written for a platform.

    Args:
        code: the reason as one stable word, such as `not-visible` or `reserved-name`.
        found: the reason in words.
        where: the path.
        cure: what to write instead.
    """

    def __init__(self, code: str, found: str, *, where: str, cure: str) -> None:
        super().__init__(found, where=where, cure=cure)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Who writes or opens a path.

    Attributes:
        kind: the rules of its paths.
        distro: name of the WSL distribution, as `wsl -l` shows it.
        automount: folder below which WSL shows the Windows drives.
    """

    kind: Literal["windows", "wsl", "linux"]
    distro: str = ""
    automount: str = "/mnt/"


@dataclass(frozen=True)
class _Place:
    r"""What a path names: `head` is the drive letter, `server\share`, or the distribution's name."""

    kind: Literal["relative", "drive", "share", "distro", "linux"]
    head: str
    parts: tuple[str, ...]


def translate(path: str, source: Machine, target: Machine) -> str:
    r"""The path that `source` writes, as `target` writes it.

    Raises:
        PathError: the path is ambiguous, or the target cannot see it or cannot hold such a name.

    >>> translate("C:/AI//models", Machine(kind="windows"), Machine(kind="wsl"))
    '/mnt/c/AI/models'
    """
    place = _read_windows(path) if source.kind == "windows" else _read_posix(path, source)
    return _write_windows(path, place) if target.kind == "windows" else _write_posix(path, place, target)


def toml_path(path: str, target: Machine) -> str:
    r"""A path as `target` writes it, in the form a TOML holds: forward slashes on every platform.

    >>> toml_path(r"\\nas\share\x", Machine(kind="windows"))
    '//nas/share/x'
    """
    return path.replace("\\", "/") if target.kind == "windows" else path


def is_absolute_anywhere(path: str) -> bool:
    """Whether a path is absolute on some system.

    >>> is_absolute_anywhere("/data/a.png"), is_absolute_anywhere("C:/a.png"), is_absolute_anywhere("a.png")
    (True, True, False)
    """
    return PurePosixPath(path).is_absolute() or PureWindowsPath(path).is_absolute()


def is_foreign(path: str, machine: Machine) -> bool:
    r"""Whether a path is written as another system writes absolute ones: `C:\AI` or a share, `/data` on Windows.

    >>> is_foreign("C:/AI", Machine(kind="linux")), is_foreign("/data", Machine(kind="windows"))
    (True, True)
    """
    if machine.kind == "windows":
        return path.startswith("/") and not path.startswith("//")
    return re.match(r"[A-Za-z]:[\\/]|\\\\", path) is not None


def automount_root(wsl_conf: str) -> str:
    r"""Where WSL shows the Windows drives, from the text of `/etc/wsl.conf`.

    >>> automount_root("[automount]\nroot = /windir\n"), automount_root("")
    ('/windir/', '/mnt/')
    """
    section = ""
    for line in wsl_conf.split("\n"):
        text = line.strip()
        if text.startswith("["):
            section = text.strip("[]").strip().lower()
        key, equals, value = text.partition("=")
        if section == "automount" and equals and key.strip().lower() == "root":
            return value.strip().strip("\"'").rstrip("/") + "/"
    return "/mnt/"


def windows_name_problem(name: str) -> str | None:
    """Why Windows cannot hold a file or folder of this name, in words; None when it can.

    >>> windows_name_problem("nul .txt"), windows_name_problem("console")
    ('Windows reserves the name nul', None)
    """
    fault = _windows_fault(name)
    return fault[1] if fault else None


def new_folder_problem(folder: PurePath) -> str | None:
    r"""Why a folder that is to be made has no name that every system holds, in words; None when it has.

    Folders that are there already are as they are, but on Windows `C:x` and `\x` mean another one every time.

    >>> new_folder_problem(Path("nowhere/a:b")), new_folder_problem(Path("nowhere/ab"))
    ('Windows allows no : in a name', None)
    """
    if folder.anchor and not folder.is_absolute():
        return "this means another folder on every drive, or in every folder of a drive"
    new = [path.name for path in (folder, *folder.parents) if not Path(path).is_dir()]
    return next(filter(None, map(windows_name_problem, filter(None, new))), None)


def slugify(name: str) -> str:
    """A name for files and folders on every platform: `[a-z0-9_]`, at most 64 characters, never empty.

    Raises:
        WangenError: nothing is left of the name, or Windows reserves what is left.

    >>> slugify("Jane's Red House"), slugify("Straße №5")
    ('janes_red_house', 'strasse_no5')
    """
    plain = unicodedata.normalize("NFKD", re.sub(r"['’‘`´]", "", name)).casefold()
    plain = "".join(character for character in plain if not unicodedata.combining(character))
    slug = re.sub(r"[^a-z0-9]+", "_", plain).strip("_")[:_SLUG_LENGTH].rstrip("_")
    media = "and the media with --source FOLDER"
    if not slug:
        raise WangenError("no letter a-z and no digit is left of this name", where=repr(name),
                          cure=f"give a name with Latin letters or digits, {media}")  # fmt: skip
    problem = windows_name_problem(slug)
    if problem:
        raise WangenError(f"{problem}, so no folder can be called so", where=repr(name),
                          cure=f"give another name, {media}")  # fmt: skip
    return slug


def _windows_fault(name: str) -> tuple[str, str] | None:
    # Windows ends a device's name at the first dot or colon and ignores blanks before it: `nul .txt` is NUL.
    if name in ("", ".", ".."):
        return ("empty", "the name is empty") if not name else None
    bad = sorted({c for c in name if c in _ILLEGAL_ON_WINDOWS or ord(c) < 32})
    if bad:
        return "illegal-char", f"Windows allows no {' '.join(map(printable, bad))} in a name"
    stem = name.split(".")[0].rstrip(" ")
    if _DEVICE_NAME.fullmatch(stem):
        return "reserved-name", f"Windows reserves the name {stem}"
    if name[-1] in ". ":
        return "trailing-dot-space", "Windows drops a dot or blank at the end of a name"
    units = len(name.encode("utf-16-le", "surrogatepass")) // 2
    if units > _COMPONENT_UNITS:
        return "component-too-long", f"Windows allows {_COMPONENT_UNITS} characters in a name, this one has {units}"
    return None


def _refuse_unclear(path: str, parts: Iterable[str], pattern: re.Pattern[str]) -> None:
    if not path:
        raise PathError("empty", "the path is empty", where="''", cure="write the folder or file")
    if any(unicodedata.category(c) == "Cc" for c in path):
        raise PathError(
            "control-char",
            "the path holds a control character",
            where=repr(path),
            cure="write it in single quotes, or with /: in double quotes of a TOML \\n and \\t are no letters",
        )
    if _URI.match(path):
        raise PathError("uri", "this is an address, not a path", where=path, cure="write it without the file:// part")
    if path.startswith("~"):
        raise PathError("unexpanded-home", "~ means another folder for every user", where=path, cure="write it in full")
    if any(pattern.search(part) for part in parts):
        raise PathError(
            "unexpanded-variable", "the path holds a variable", where=path, cure="write its value in its place"
        )


def _kept(parts: Iterable[str]) -> tuple[str, ...]:
    return tuple(part for part in parts if part not in ("", "."))


def _read_windows(path: str) -> _Place:
    text = path.replace("/", "\\")
    _refuse_unclear(path, [text], _PERCENT_VARIABLE)
    _refuse_unclear(path, text.split("\\"), _WHOLE_VARIABLE)
    if text.startswith("\\\\?\\"):
        text = text[4:]
        text = "\\" + text[3:] if text[:4].upper() == "UNC\\" else text
    if text.startswith("\\\\"):
        return _read_share(path, text)
    if text[1:2] == ":" and text[0].isascii() and text[0].isalpha():
        if text[2:3] not in ("", "\\"):
            cure = f"write {text[:2]}\\{text[2:]}"
            raise PathError("drive-relative", "the path depends on the drive's current folder", where=path, cure=cure)
        return _Place("drive", text[0].upper(), _kept(text[2:].split("\\")))
    if text.startswith("\\"):
        raise PathError("root-relative", "the path names no drive", where=path, cure=f"write C:{text}")
    return _Place("relative", "", _kept(text.split("\\")))


def _read_share(path: str, text: str) -> _Place:
    server, share, *parts = (*_kept(text.split("\\")), "", "")
    if not share or server in ("?", ".."):
        cure = r"write \\server\share\folder, or the path with its drive letter"
        raise PathError("incomplete-share", "this names no network share", where=path, cure=cure)
    if server.lower() in _WSL_SERVERS:
        return _Place("distro", share, _kept(parts))
    return _Place("share", f"{server}\\{share}", _kept(parts))


def _read_posix(path: str, source: Machine) -> _Place:
    parts = path.split("/")
    _refuse_unclear(path, parts, _WHOLE_VARIABLE)
    if re.match(r"[A-Za-z]:[\\/]|\\\\", path):
        cure = "write it as this machine sees it, such as /mnt/c/AI in WSL"
        raise PathError("windows-path", "this is a Windows path", where=path, cure=cure)
    if not path.startswith("/"):
        return _Place("relative", "", _kept(parts))
    if source.kind == "linux":
        return _Place("linux", "", _kept(parts))
    drives = _kept(source.automount.split("/"))
    inner = _kept(parts)
    letter = inner[len(drives)] if inner[: len(drives)] == drives and len(inner) > len(drives) else ""
    # WSL mounts drives in lower case; /mnt/C and /mnt/cx are ordinary folders of the distribution.
    if len(letter) == 1 and "a" <= letter <= "z":
        return _Place("drive", letter.upper(), inner[len(drives) + 1 :])
    return _Place("distro", source.distro, inner)


def _write_windows(path: str, place: _Place) -> str:
    if place.kind == "linux":
        raise _not_visible(path, "Windows")
    for part in place.parts:
        fault = _windows_fault(part)
        if fault:
            raise PathError(fault[0], fault[1], where=path, cure=f"rename {part!r}")
    inner = "\\".join(place.parts)
    if place.kind == "relative":
        return inner or "."
    if place.kind == "drive":
        return f"{place.head}:\\{inner}"
    if place.kind == "share":
        return f"\\\\{place.head}\\{inner}"
    if not place.head:
        cure = "name the distribution in wangen.toml (`wsl -l` shows it)"
        raise PathError("unknown-distro", "this path lies in a WSL distribution of unknown name", where=path, cure=cure)
    return f"\\\\wsl.localhost\\{place.head}\\{inner}"


def _write_posix(path: str, place: _Place, target: Machine) -> str:
    inner = "/".join(place.parts)
    if place.kind == "relative":
        return inner or "."
    if place.kind == "linux":
        return f"/{inner}"
    if target.kind == "linux":
        raise _not_visible(path, "a Linux machine")
    if place.kind == "share":
        cure = "mount the share in WSL (sudo mount -t drvfs) and write the folder it is mounted on"
        raise PathError("unc-needs-mount", "WSL does not see network shares by itself", where=path, cure=cure)
    if place.kind == "drive":
        return f"{target.automount.rstrip('/')}/{place.head.lower()}/{inner}".rstrip("/")
    if place.head.casefold() != target.distro.casefold():
        cure = f"copy it into {target.distro or 'the distribution'} or put it on a Windows drive"
        raise PathError("other-distro", f"this path lies in the distribution {place.head}", where=path, cure=cure)
    return f"/{inner}"


def _not_visible(path: str, who: str) -> PathError:
    cure = "write the path as that machine sees it into its own section of wangen.toml, or copy the files there"
    return PathError("not-visible", f"{who} cannot see this path", where=path, cure=cure)
