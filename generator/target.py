"""A target: one platform of a workspace, with its folders as its own machine and as this host see them."""

import os
import platform as host_platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal

from wangen import profiles
from wangen.generator.paths import Machine, PathError, automount_root, translate

WSL_CONF = Path("/etc/wsl.conf")


@dataclass(frozen=True)
class Target:
    """One platform of a workspace.

    Attributes:
        platform: its profile.
        root: the configured root as the target writes it; None for a bundle that can be moved.
        folder: the root as this host reaches it.
        roots: `models datasets outputs logs` as the target writes them, relative to the root or absolute.
        venv: folders of virtual environments, best first, as the target writes them.
        weights: weight role (`vae t5 dit`) -> file, where `wangen.toml` names one.
        machine: the rules of its paths.
    """

    platform: profiles.Platform
    root: str | None
    folder: Path
    roots: Mapping[str, str]
    venv: tuple[str, ...]
    weights: Mapping[str, str]
    machine: Machine

    def path(self, *parts: str) -> str:
        r"""Parts joined as the target writes paths: `outputs\cats` on Windows. Absolute when a root is set."""
        return str(self._pure(self.root or "", *parts))

    def reach(self, text: str) -> Path | None:
        """A path of the target as this host sees it, or None when it does not."""
        path = self._pure(text)
        if not path.is_absolute():
            return self.folder.joinpath(*path.parts)
        if self.root and path.is_relative_to(self._pure(self.root)):
            return self.folder.joinpath(*path.relative_to(self._pure(self.root)).parts)
        return from_here(text, self.machine, self.platform.kind)

    @property
    def is_native(self) -> bool:
        """Whether its scripts can run on the machine that this is."""
        return is_native(self.platform.kind)

    @property
    def _pure(self) -> type[PurePosixPath] | type[PureWindowsPath]:
        return PureWindowsPath if self.platform.kind == "windows" else PurePosixPath


def host_platform_name() -> Literal["linux", "wsl", "windows"]:
    """The platform profile of the machine this runs on.

    >>> host_platform_name() in ("linux", "wsl", "windows")
    True
    """
    if sys.platform == "win32":
        return "windows"
    return "wsl" if "microsoft" in host_platform.release().lower() else "linux"


def is_native(kind: str) -> bool:
    """Whether scripts of a platform of this kind can run on the machine that this is."""
    return kind == host_platform_name() or (kind == "slurm" and host_platform_name() == "linux")


def from_here(text: str, machine: Machine, kind: str) -> Path | None:
    """An absolute path as this host sees it: the same machine's, or that of Windows and its WSL; None when it does not.

    Args:
        text: the path, as `machine` writes it.
        machine: the rules of its paths.
        kind: of the platform.
    """
    if is_native(kind):
        return Path(text)
    host = host_platform_name()
    if {kind, host} != {"windows", "wsl"}:
        return None
    try:
        return Path(translate(text, machine, machine_of(host)))
    except PathError:
        return None


def machine_of(kind: str, section: Mapping[str, str] | None = None) -> Machine:
    """The rules of a platform's paths.

    In WSL itself the name of the distribution and the folder of the drives are what WSL says; on another host
    `wangen.toml` may say them (`distro`, `automount`).
    """
    if kind != "wsl":
        return Machine(kind="windows" if kind == "windows" else "linux")
    here = host_platform_name() == "wsl"
    said = {"distro": os.environ.get("WSL_DISTRO_NAME", "") if here else "", "automount": "/mnt/"}
    if here and WSL_CONF.is_file():
        said["automount"] = automount_root(WSL_CONF.read_text(encoding="utf-8"))
    said |= {key: value for key, value in (section or {}).items() if key in said}
    return Machine(kind="wsl", **said)
