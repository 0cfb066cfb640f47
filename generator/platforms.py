"""Platform profiles: those that ship with wangen, and the user's own in the folder `profiles/` of a workspace.

A user's file `profiles/NAME.toml` holds the same keys as ours. One that is named after a shipped profile replaces
the keys that it gives; a new one stands alone, or begins with the profile that it is `based_on`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from wangen import profiles
from wangen.generator import tomls
from wangen.generator.commands import from_toml
from wangen.generator.errors import UsageError
from wangen.generator.quoting import QUOTES
from wangen.generator.steps import STEPS, find_step
from wangen.generator.table import options
from wangen.profiles import Platform, TorchBuild

FOLDER = "profiles"
BASE = "based_on"

_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_SUFFIX = re.compile(r"[a-z0-9_]+")
_DRIVER = re.compile(r"[0-9]+\.[0-9]+")
_KEYS = {field.name for field in fields(Platform)} - {"name"}
_REQUIRED = {field.name for field in fields(Platform) if (field.default, field.default_factory) == (MISSING,) * 2}


def load(workspace: Path) -> dict[str, Platform]:
    """Every platform profile of a workspace by name: the shipped ones, and the user's.

    Raises:
        WangenError: a file of the user's is no TOML, has an unknown key or a wrong value.
    """
    values = {name: profiles.platform_values(name) for name in profiles.platform_names()}
    folder = workspace / FOLDER
    own = {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder.is_dir() else {}
    read = {name: _read(path) for name, path in own.items()}
    for name, path in own.items():
        values[name] = _merged(name, read, path, ())
    return {name: profiles.make_platform(name, given) for name, given in sorted(values.items())}


def step_values(sections: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Values of flags by step, each checked against the table: step -> flag -> value; spellings are taken as well.

    Raises:
        UsageError: there is no such step or flag, the value does not fit, or two spellings of a step contradict.
    """
    result: dict[str, dict[str, Any]] = {}
    for name, flags in sections.items():
        step = find_step(name)
        if step is None or not isinstance(flags, dict):
            raise UsageError(f"there is no step {name!r}", where=f"{where}{name}]",
                             cure=f"one of {', '.join(step.command for step in STEPS)}")  # fmt: skip
        values = from_toml(step, flags, f"{where}{name}]")
        if "config_file" in values:
            raise UsageError("config_file is for the command line: nobody would find the file where the scripts run",
                             where=f"{where}{name}]", cure="write its keys here")  # fmt: skip
        known = result.setdefault(step.command, {})
        if twice := [flag for flag, value in values.items() if known.get(flag, value) != value]:
            raise UsageError(f"{twice[0]} is said twice of {step.command}, as {known[twice[0]]} and {values[twice[0]]}",
                             where=f"{where}{name}]", cure="leave one of them out")  # fmt: skip
        known.update(values)
    return result


def _read(path: Path) -> dict[str, Any]:
    """The checked values of one file of the user's."""
    if not _NAME.fullmatch(path.stem):
        raise UsageError("a profile's name is made of a-z, 0-9 and -", where=str(path), cure="rename the file")
    values = tomls.load(path)
    tomls.refuse_unknown(values, _KEYS | {BASE}, str(path))
    return {key: _CHECKS[key](raw, key, str(path)) for key, raw in values.items()}


def _merged(name: str, read: Mapping[str, dict[str, Any]], path: Path, seen: tuple[str, ...]) -> dict[str, Any]:
    """A user's profile with the keys of what it is based on, its own on top."""
    own = dict(read[name])
    shipped = profiles.platform_names()
    base = own.pop(BASE, name if name in shipped else "")
    if base in seen or (base == name and name not in shipped):
        raise UsageError(f"the profile {name} is based on itself", where=str(path), cure=f"name another {BASE}")
    if base and base != name and base in read:
        below = _merged(base, read, path.with_stem(base), (*seen, name))
    elif base in shipped:
        below = profiles.platform_values(base)
    elif base:
        tomls.refuse_unknown({base: None}, {*shipped, *read}, f"{path}, {BASE}")
    else:
        below = {}
    values = {**below, **own}
    if missing := sorted(_REQUIRED - values.keys() - {"name"}):
        raise UsageError(f"the profile lacks {', '.join(missing)}", where=str(path),
                         cure=f'give them, or begin with another profile: {BASE} = "linux"')  # fmt: skip
    return values


def _text(raw: Any, key: str, where: str) -> str:
    if not isinstance(raw, str) or not raw:
        raise UsageError(f"{key} must be a text in quotes, got {raw!r}", where=where)
    return raw


def _list(raw: Any, key: str, where: str) -> list[str]:
    if not isinstance(raw, list) or not raw:
        raise UsageError(f"{key} must be a list of texts, got {raw!r}", where=where, cure=f'write {key} = ["…"]')
    return [_text(item, key, where) for item in raw]


def _one_of(raw: Any, key: str, where: str) -> str:
    known = get_args(get_type_hints(Platform)[key])
    if raw not in known:
        raise UsageError(f"{key} has no value {raw!r}", where=where, cure=f"one of {', '.join(known)}")
    return str(raw)


def _shells(raw: Any, key: str, where: str) -> list[str]:
    for shell in _list(raw, key, where):
        if shell not in QUOTES:
            raise UsageError(f"there is no template for the shell {shell!r}", where=where,
                             cure=f"known: {', '.join(QUOTES)}")  # fmt: skip
    return list(raw)


def _suffix(raw: Any, key: str, where: str) -> str:
    if not _SUFFIX.fullmatch(_text(raw, key, where)):
        raise UsageError(f"{key} is made of a-z, 0-9 and _, got {raw!r}", where=where)
    return str(raw)


def _builds(raw: Any, key: str, where: str) -> list[dict[str, str]]:
    if not isinstance(raw, list) or not raw or not all(isinstance(build, dict) for build in raw):
        raise UsageError(f"{key} is a list of tables", where=where, cure=f"write [[{key}]] above each")
    for build in raw:
        tomls.refuse_unknown(build, {field.name for field in fields(TorchBuild)}, f"{where}, [[{key}]]")
        _text(build.get("tag"), "tag", f"{where}, [[{key}]]")
        if build.get("driver", "0.0") and not _DRIVER.fullmatch(str(build.get("driver", "0.0"))):
            raise UsageError(f'driver is a CUDA version such as "12.8", got {build["driver"]!r}', where=where)
    return list(raw)


def _overrides(raw: Any, key: str, where: str) -> dict[str, dict[str, Any]]:
    if not isinstance(raw, dict):
        raise UsageError(f"{key} is no section", where=where, cure=f"write [{key}.train] and its flags below")
    return step_values(raw, f"{where}, [{key}.")


def _reasons(raw: Any, key: str, where: str) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise UsageError(f"{key} is no section", where=where, cure=f'write [{key}] and "train.seed" = "because …"')
    flags = {f"{step.command}.{option.name}" for step in STEPS for option in options(step)}
    tomls.refuse_unknown(raw, flags, f"{where}, [{key}]")
    return {name: _text(sentence, name, where) for name, sentence in raw.items()}


_CHECKS: Mapping[str, Callable[[Any, str, str], Any]] = {
    BASE: _text,
    "kind": _one_of,
    "shells": _shells,
    "suffix": _suffix,
    "venv": _list,
    "accelerator": _one_of,
    "torch_builds": _builds,
    "overrides": _overrides,
    "reasons": _reasons,
}
