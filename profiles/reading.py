"""The files of profiles, and what one says, checked against the dataclass that it becomes: keys, types, choices."""

import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")


class ProfileError(Exception):
    """Something wrong in a profile's file. `cli.main` says it as a `UsageError`, which profiles know nothing of.

    Args:
        found: what is wrong, as a fact.
        where: the file, and the key.
        cure: what to write.
    """

    def __init__(self, found: str, *, where: str, cure: str) -> None:
        super().__init__(found)
        self.found = found
        self.where = where
        self.cure = cure


_WORDS = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def names(folder: str) -> list[str]:
    """The names of the profiles in one of the folders beside this module."""
    return sorted(file.stem for file in path(folder, "").parent.glob("*.toml"))


@cache
def _home() -> Path:
    return Path(str(files("wangen.profiles")))


def path(folder: str, name: str) -> Path:
    """The file of a profile."""
    return _home() / folder / f"{name}.toml"


def read(folder: str, name: str) -> dict[str, Any]:
    """The values of a profile's file.

    Raises:
        KeyError: there is none of that name.
        ProfileError: it is no TOML.
    """
    if name not in names(folder):
        raise KeyError(name)
    file = path(folder, name)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"not valid TOML: {error}", where=str(file), cure="mend the file") from None


def make(kind: type[Made], values: Any, where: str) -> Made:
    """A dataclass from the values of a table.

    Args:
        kind: whose fields say which keys there are and what they take.
        values: as TOML gives them.
        where: the file and the table, for the message.

    Raises:
        ProfileError: a key is unknown or missing, or its value is of another type or choice.
    """
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in table(values, where):
        if key not in known:
            near = get_close_matches(key, sorted(known), n=1)
            cure = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise ProfileError(f"unknown key {key!r}", where=where, cure=cure)
    needed = [name for name, field in known.items() if (field.default, field.default_factory) == (MISSING, MISSING)]
    if missing := [name for name in needed if name not in values]:
        raise ProfileError(f"{missing[0]} is missing", where=where, cure=f"write {missing[0]} = … there, or begin with "
                         "a profile that has it: based_on")  # fmt: skip
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{key: _value(hints[key], value, f"{where}, {key}") for key, value in values.items()})


def table(values: Any, where: str) -> dict[str, Any]:
    """The values, which are those of a table.

    Raises:
        ProfileError: they are not.
    """
    if not isinstance(values, dict):
        raise ProfileError(f"a table belongs here, got {values!r}", where=where, cure="write it as [name] and its keys "
                         "below")  # fmt: skip
    return values


def _value(hint: Any, raw: Any, where: str) -> Any:
    """A value as a field of this type holds it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _value(parts[0], raw, where)
    if origin is Literal:
        if raw not in parts:
            raise ProfileError(f"there is no {raw!r} here", where=where, cure=f"one of {', '.join(parts)}")
        return raw
    if origin is tuple:
        num = None if parts[-1] is ... else len(parts)
        if not isinstance(raw, list) or (num is not None and len(raw) != num):
            wanted = "a list" if num is None else f"a list of {num}"
            raise ProfileError(f"{wanted} belongs here, got {raw!r}", where=where, cure="write it as [a, b]")
        return tuple(_value(parts[0], item, where) for item in raw)
    if is_dataclass(hint):
        return raw if type(raw) is hint else make(hint, raw, where)  # type: ignore[arg-type]
    if origin is not None and issubclass(origin, Mapping):
        return {_key(parts[0], key, where): _value(parts[1], item, f"{where}.{key}")
                for key, item in table(raw, where).items()}  # fmt: skip
    if hint in _WORDS and type(raw) is not hint and not (hint is float and type(raw) is int):
        raise ProfileError(f"{_WORDS[hint]} belongs here, got {raw!r}", where=where, cure=f"write {_WORDS[hint]}")
    return raw


def _key(kind: type, key: str, where: str) -> Any:
    if kind is int and not key.isdecimal():
        raise ProfileError(f"a whole number belongs here, got {key!r}", where=where, cure="write it as [presets.24]")
    return kind(key)
