"""The workspace: one folder with `wangen.toml` and `datasets/`, and the places it publishes to.

`wangen.toml` says which platforms to publish for, their roots as that machine writes them, and the defaults of a run.
Until a root is set, a platform is published to `published/<platform>/` as a bundle that can be moved as it is.
"""

import os
import platform as host_platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from wangen import profiles
from wangen.generator import tomls
from wangen.generator.commands import convert
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.session import write_text
from wangen.generator.steps import find_step, options

FILE = "wangen.toml"
ROOTS = {"models": "models", "datasets": "files/datasets", "outputs": "outputs", "logs": "logs"}
"""Folders below the root, and what they are called unless `wangen.toml` says otherwise."""

_TEMPLATE = """\
# The settings of this wangen workspace. Lines that begin with # are examples; take the # away to use one.

model = "{model}"            # wangen publish --model NAME chooses another: {models}
# resolution = [832, 480]    # bucket area as [width, height]; the default is the model profile's
# num_frames = 81            # clip length in frames at the model's rate, 4n+1; the default is the model profile's
platforms = [{platforms}]    # wangen publish --platform NAME chooses among: {all_platforms}

# Where each platform's files live, as that machine writes the path. Without a root the bundle goes to
# published/<platform>/ here; it can be moved or copied to another machine as it is.
{sections}
# Settings of a run, by step; every flag of `wangen STEP --help` can stand here.
[steps.train]
# learning_rate = 1e-4
# network_dim = 16
# max_train_epochs = 35
"""

_SECTION = """
[platform.{name}]
# root = '{root}'
# host_root = '{host_root}'    # how this computer reaches that root
# models = '{models}'
{venv}
"""


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
    """

    platform: profiles.Platform
    root: str | None
    folder: Path
    roots: Mapping[str, str]
    venv: tuple[str, ...]
    weights: Mapping[str, str]

    def path(self, *parts: str) -> str:
        r"""Parts joined as the target writes paths: `outputs\cats` on Windows. Absolute when a root is set."""
        pure = PureWindowsPath if self.platform.kind == "windows" else PurePosixPath
        return str(pure(self.root or "", *parts))

    def reach(self, text: str) -> Path | None:
        """A path of the target as this host sees it, or None when it does not."""
        pure = PureWindowsPath if self.platform.kind == "windows" else PurePosixPath
        path = pure(text)
        if not path.is_absolute():
            return self.folder.joinpath(*path.parts)
        if self.root and path.is_relative_to(pure(self.root)):
            return self.folder.joinpath(*path.relative_to(pure(self.root)).parts)
        return Path(text) if _native(self.platform.kind) else None


@dataclass(frozen=True)
class Workspace:
    """A workspace as its `wangen.toml` describes it.

    Attributes:
        folder: where it lives.
        model: name of the default model profile.
        resolution: bucket area as (width, height) in pixels, where it differs from the model profile's.
        num_frames: clip length in frames, where it differs from the model profile's.
        targets: the platforms to publish for.
        steps: step -> flag -> value: the user's defaults, already checked against the table.
    """

    folder: Path
    model: str
    resolution: tuple[int, int] | None
    num_frames: int | None
    targets: tuple[Target, ...]
    steps: Mapping[str, Mapping[str, Any]]

    def profile(self, name: str | None = None) -> profiles.Model:
        """The model profile of that name (default: the workspace's), with the workspace's resolution and length.

        Raises:
            UsageError: there is no such model.
        """
        chosen = name or self.model
        if chosen not in profiles.model_names():
            raise UsageError(f"there is no model {chosen!r}", cure=f"one of {', '.join(profiles.model_names())}")
        model = profiles.model(chosen)
        return replace(
            model, resolution=self.resolution or model.resolution, num_frames=self.num_frames or model.num_frames
        )

    def target(self, name: str) -> Target:
        """The target of that platform, listed in `platforms` or not.

        Raises:
            UsageError: there is no such platform.
        """
        for target in self.targets:
            if target.platform.name == name:
                return target
        known = ", ".join(profiles.platform_names())
        raise UsageError(f"there is no platform {name!r}", cure=f"one of {known}")


def init(folder: Path, model: str = "t2v-1.3B") -> Path:
    """Make a workspace: `wangen.toml` and `datasets/`. An existing one stays as it is.

    Returns:
        The path of `wangen.toml`.
    """
    (folder / "datasets").mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    if not path.exists():
        names = profiles.platform_names()
        text = _TEMPLATE.format(
            model=model,
            models=", ".join(profiles.model_names()),
            platforms=", ".join(f'"{name}"' for name in names),
            all_platforms=", ".join(names),
            sections="".join(_section(name) for name in names),
        )
        write_text(path, text)
    return path


def find(start: Path) -> Path:
    """The workspace folder at or above `start`.

    Raises:
        UsageError: there is none.
    """
    for folder in (start.absolute(), *start.absolute().parents):
        if (folder / FILE).is_file():
            return folder
    raise UsageError(f"no {FILE} here or above", where=str(start), cure="make a workspace with: wangen init")


def read(folder: Path) -> Workspace:
    """The workspace of a folder.

    Raises:
        WangenError: no `wangen.toml`, an unknown key, a wrong value.
    """
    path = folder / FILE
    values = tomls.load(path)
    tomls.refuse_unknown(values, {"model", "resolution", "num_frames", "platforms", "platform", "steps"}, str(path))
    model = values.get("model", "t2v-1.3B")
    if model not in profiles.model_names():
        raise UsageError(
            f"there is no model {model!r}", where=str(path), cure=f"one of {', '.join(profiles.model_names())}"
        )
    sections = values.get("platform", {})
    tomls.refuse_unknown(sections, set(profiles.platform_names()), f"{path}, [platform.…]")
    names = values.get("platforms", profiles.platform_names())
    unknown = [name for name in names if name not in profiles.platform_names()]
    if unknown:
        raise UsageError(f"there is no platform {unknown[0]!r}", where=str(path),
                         cure=f"one of {', '.join(profiles.platform_names())}")  # fmt: skip
    targets = tuple(_target(folder, path, name, sections.get(name, {})) for name in names)
    return Workspace(
        folder=folder,
        model=model,
        resolution=tomls.sizes("resolution", values["resolution"], str(path)) if "resolution" in values else None,
        num_frames=tomls.frames("num_frames", values["num_frames"], str(path))[0] if "num_frames" in values else None,
        targets=targets,
        steps=_steps(values.get("steps", {}), path),
    )


def host_platform_name() -> str:
    """The platform profile of the machine this runs on.

    >>> host_platform_name() in ("linux", "wsl", "windows")
    True
    """
    if sys.platform == "win32":
        return "windows"
    return "wsl" if "microsoft" in host_platform.release().lower() else "linux"


def _native(kind: str) -> bool:
    return kind == host_platform_name() or (kind == "slurm" and host_platform_name() == "linux")


def _section(name: str) -> str:
    kind = profiles.platform(name).kind
    root = r"C:\AI" if kind == "windows" else "/mnt/c/AI" if kind == "wsl" else "/data/ai"
    host_root = {"linux": "/mnt/share/ai", "wsl": r"\\wsl.localhost\Ubuntu\mnt\c\AI"}.get(kind, "/mnt/c/AI")
    in_venv = _native(kind) and sys.prefix != sys.base_prefix
    venv = (
        f"venv = '{sys.prefix}'    # where wangen was installed when this file was made"
        if in_venv
        else "# venv = 'venv'"
    )
    return _SECTION.format(name=name, root=root, host_root=host_root, models=f"{root}/models", venv=venv)


def _target(folder: Path, file: Path, name: str, section: Mapping[str, Any]) -> Target:
    where = f"{file}, [platform.{name}]"
    tomls.refuse_unknown(section, {"root", "host_root", "venv", "vae", "t5", "dit", *ROOTS}, where)
    for key, value in section.items():
        if not isinstance(value, str) or not value:
            raise UsageError(f"{key} must be a path in quotes, got {value!r}", where=where)
    platform = profiles.platform(name)
    root = section.get("root")
    return Target(
        platform=platform,
        root=root,
        folder=_host_root(folder, platform, section, where),
        roots={key: section.get(key, default) for key, default in ROOTS.items()},
        venv=(*([section["venv"]] if "venv" in section else []), *platform.venv),
        weights={role: section[role] for role in ("vae", "t5", "dit") if role in section},
    )


def _host_root(folder: Path, platform: profiles.Platform, section: Mapping[str, Any], where: str) -> Path:
    if "host_root" in section:
        return Path(section["host_root"])
    if "root" not in section:
        return folder / "published" / platform.name
    root = section["root"]
    if _native(platform.kind):
        return Path(root)
    if platform.kind == "windows" and host_platform_name() == "wsl" and root[1:3] in (":\\", ":/"):
        return Path("/mnt", root[0].lower(), *PureWindowsPath(root).parts[1:])
    raise UsageError(f"this host cannot see {root}", where=where, cure="set host_root to how it is reached from here")


def _steps(sections: Mapping[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for name, flags in sections.items():
        step = find_step(name)
        if step is None or not isinstance(flags, dict):
            raise UsageError(f"there is no step {name!r}", where=f"{path}, [steps.{name}]")
        known = {option.name: option for option in options(step)}
        tomls.refuse_unknown(flags, set(known), f"{path}, [steps.{name}]")
        result[step.command] = {key: convert(known[key], raw, f"{path}, {key}") for key, raw in flags.items()}
    return result


def require_writable(folder: Path) -> None:
    """Make the folder and see that it can be written.

    Raises:
        WangenError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WangenError(f"cannot make the folder: {error.strerror}", where=str(folder)) from None
    if not os.access(folder, os.W_OK):
        raise WangenError("the folder cannot be written", where=str(folder), cure="fix its rights or choose another")
