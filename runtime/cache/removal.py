"""Removing entries, whether they are files of their own or lie in packs."""

import errno
import tarfile
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from wangen.generator.files import remove
from wangen.runtime.cache.entries import Entry
from wangen.runtime.cache.packs import Pack, index_path, pack_at, padded


def remove_entries(entries: Iterable[Entry]) -> dict[Entry, OSError]:
    """Remove entries that are there; a packed one leaves its pack's index, and the last one takes the pack with it.

    Whoever removes what another process may need holds `claims.alone` meanwhile.

    Returns:
        Those that cannot be removed now, with the reason: on Windows a file may be open in another program.
    """
    stuck: dict[Entry, OSError] = {}
    packed: defaultdict[tuple[Path, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.pack:
            packed[entry.folder, entry.pack].append(entry)
            continue
        try:
            remove(entry.path)
        except OSError as error:
            stuck[entry] = error
    for (folder, name), members in packed.items():
        try:
            pack = pack_at(folder, name)
            if pack:
                take_out(pack, {entry.key for entry in members})
        except OSError as error:
            stuck |= dict.fromkeys(members, error)
    return stuck


def take_out(pack: Pack, keys: Collection[str]) -> None:
    """Let the entries with these keys count no more; a pack of which nothing is left is removed.

    Raises:
        OSError: the index cannot be written or the pack not removed; or a part of it cannot be read, and may be good.
    """
    if not pack.is_whole:
        raise OSError(errno.EIO, "a part of its pack is damaged: run check_cache --deep --repair first")
    from wangen.runtime.cache.pack_index import PackIndex

    left = [entry for entry in pack if entry.key not in keys]
    gone = [entry for entry in pack if entry.key in keys]
    if not left:
        remove_pack(pack.path)
    elif gone:
        removed_bytes = sum(tarfile.BLOCKSIZE + padded(entry.num_bytes) for entry in gone)
        index = PackIndex.of(left, pack.index.pack_bytes, pack.index.removed_bytes + removed_bytes)
        index.write(index_path(pack.path))


def remove_pack(path: Path) -> None:
    """Remove a pack and its index.

    Raises:
        OSError: still refused after 1.5 seconds.
    """
    remove(path)
    remove(index_path(path))
