"""`wangen cache pack`, `unpack` and `verify`. Needs no torch."""

from collections.abc import Callable
from pathlib import Path

import click

from wangen.generator.errors import bytes_text, many
from wangen.runtime.cache import Folder
from wangen.runtime.cache.packing import Moved
from wangen.runtime.cache.packing import pack as pack_folder
from wangen.runtime.cache.packing import unpack as unpack_folder
from wangen.runtime.cache_tools import folders_of
from wangen.runtime.needs import listing


def pack(place: Path) -> int:
    """Move the entries of cache folders into packs; 1 when a damaged one had to stay.

    Args:
        place: a cache folder, or a dataset's TOML or manifest for all of its folders.

    Raises:
        WangenError: there is no such folder, another process packs it, or the disk refused.
    """
    return _moved(place, "packed", pack_folder)


def unpack(place: Path) -> int:
    """Make every packed entry a file of its own; 1 when a damaged one had to stay.

    Args:
        place: as for `pack`.

    Raises:
        WangenError: as `pack`.
    """
    return _moved(place, "unpacked", unpack_folder)


def verify(place: Path) -> int:
    """Read every entry of cache folders, also in packs, and compare its payload; 1 when one is damaged.

    Args:
        place: as for `pack`.

    Raises:
        WangenError: there is no such folder, or it cannot be listed.
    """
    num_damaged = 0
    for folder in (Folder(each.path, deep=True) for each in folders_of(place)):
        packs = folder.packs
        whole = f"{many(len(folder.files), 'entry', 'entries')} in files of their own"
        if packs.packs:
            whole += f", {many(len(packs), 'entry', 'entries')} in {many(len(packs.packs), 'pack')}"
        click.echo(f"{folder.path}: whole are {whole}")
        num_damaged += _told({name: error.found for name, error in folder.damaged.items()})
    if num_damaged:
        click.echo("check_cache --deep --repair removes what is damaged; the caching step then encodes it again")
    return int(num_damaged > 0)


def _moved(place: Path, what: str, move: Callable[[Path], Moved]) -> int:
    num_damaged = 0
    for folder in folders_of(place):
        moved = move(folder.path)
        click.echo(f"{folder.path}: {what} {many(moved.num_entries, 'entry', 'entries')}, "
                   f"{bytes_text(moved.num_bytes)}")  # fmt: skip
        num_damaged += _told({name: error.found for name, error in moved.damaged.items()})
    return int(num_damaged > 0)


def _told(damaged: dict[str, str]) -> int:
    """Say what is damaged; returns how many that are."""
    for line in listing([f"damaged: {name}: {found}" for name, found in damaged.items()]):
        click.echo(line)
    return len(damaged)
