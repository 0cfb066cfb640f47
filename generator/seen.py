"""A target's steps and datasets with their paths as this host sees them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from wangen.generator.paths import is_foreign
from wangen.generator.table import AnyStep, options
from wangen.generator.target import Target
from wangen.generator.tomls import DatasetEntry


def seen_step(target: Target, step: AnyStep, elsewhere: list[str]) -> AnyStep:
    """The step with its paths as this host sees them; those that it does not see are left out and listed.

    Args:
        target: whose paths they are.
        step: a step of one of its scripts.
        elsewhere: grows by the paths that are another machine's.
    """
    changes: dict[str, Any] = {}
    for option in options(type(step)):
        value = getattr(step, option.name)
        if isinstance(value, Path):
            changes[option.name] = target.reach(str(value))
            if changes[option.name] is None:
                elsewhere.append(str(value))
        elif isinstance(value, tuple) and option.kind is Path:
            seen = {path: target.reach(str(path)) for path in value}
            changes[option.name] = tuple(filter(None, seen.values()))
            elsewhere += [str(path) for path, here in seen.items() if here is None]
    return replace(step, **changes)


def seen_entry(target: Target, entry: DatasetEntry, elsewhere: list[str]) -> DatasetEntry | None:
    """A block of a dataset's TOML with its paths as this host sees them; None where it does not see them all.

    A path of another system stays as it is.

    Args:
        target: whose paths they are.
        entry: the block.
        elsewhere: grows by the paths that are another machine's.
    """
    names = ("directory", "cache_directory", "manifest", "control_directory", "mask_directory")
    paths = {name: path for name in names if (path := getattr(entry, name))}
    if any(is_foreign(str(path), target.machine) for path in paths.values()):
        return entry  # who looks there says what is wrong with it
    seen: dict[str, Any] = {name: target.reach(str(path)) for name, path in paths.items()}
    elsewhere += [str(path) for name, path in paths.items() if not seen[name]]
    return replace(entry, **seen) if all(seen.values()) else None
