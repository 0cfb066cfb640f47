"""What killed writers and bad disks leave in a cache folder: temporary files, claims, and entries that are damaged."""

import os
import re
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from wangen.generator.files import is_left, remove, whose
from wangen.generator.session import report_name
from wangen.runtime.cache.claims import sweep_claims
from wangen.runtime.cache.entries import CorruptEntryError, UnreadableEntryError, read_entry
from wangen.runtime.cache.folder import Folder
from wangen.runtime.cache.index import INDEX, look
from wangen.runtime.cache.packs import FOLDER as PACKS
from wangen.runtime.cache.packs import PACK_NAME, Packs, Problems, index_path
from wangen.runtime.cache.recipes import ENTRY_NAME, Kind
from wangen.runtime.cache.removal import remove_pack

_TEMPORARY = re.compile(
    r"\.([0-9a-f]{20}(\.index\.safetensors)?|\.wangen-[^/]*|\.claim-[0-9a-f-]{20,37}"
    rf"|{report_name('cache_(latents|text)')})-[0-9a-f]{{16}}([0-9a-f]{{8}})?\.tmp"
)
"""Of entries, of notes and claims beside them and of reports."""


def temporary_name(key: str) -> str:
    """A new name for the temporary file of an entry, which says whose it is."""
    return f".{key}-{whose()}.tmp"


def sweep(folder: Path) -> int:
    """Remove what writers that are dead by now have left in a folder: halves of entries, notes, reports, and claims.

    A writer of this machine is dead when there is no such process, or when it has not written for an hour.

    Returns:
        How many files were removed.
    """
    try:
        with os.scandir(folder) as files:
            names = [file.name for file in files if file.name.startswith(".")]
    except OSError:
        return 0
    removed = 0
    for name in names:
        with suppress(OSError):  # open elsewhere on Windows, or a read-only folder: the next run tries again
            if _TEMPORARY.fullmatch(name) and is_left(folder / name):
                (folder / name).unlink()
                removed += 1
    return removed + sweep_claims(folder, names)


def repair(folder: Folder) -> tuple[int, int]:
    """Remove damaged entries and what dead writers left, and make the index anew.

    A file that the system does not let us read may be good and stays.

    Args:
        folder: judged as deeply as entries are to be looked at; afterwards it knows what is left.

    Returns:
        How many entries were removed, and how many other files.

    Raises:
        WangenError: the folder cannot be listed.
    """
    removed = remove_damaged(folder)
    left = sweep(folder.path) + sweep(folder.path / PACKS)
    with suppress(OSError):
        remove(folder.path / INDEX)
    look(folder.path)
    return removed, left


def remove_damaged(folder: Folder, kind: Kind | None = None) -> int:
    """Remove damaged entries; what the system does not let us read may be good and stays.

    Args:
        folder: judged as deeply as entries are to be looked at; afterwards it knows what is left.
        kind: only files of this kind, and nothing in packs.

    Returns:
        How many were removed.

    Raises:
        WangenError: the folder cannot be listed.
    """
    removed = [] if kind else _mend_packs(folder.packs)
    for name in folder.damaged.keys() - folder.packs.damaged.keys():
        if not is_of_kind(name, kind):
            continue
        try:
            read_entry(folder.path / name, deep=folder.deep)  # another process may have written it again meanwhile
        except UnreadableEntryError:
            continue
        except CorruptEntryError:
            with suppress(OSError):
                remove(folder.path / name)
                removed.append(name)
    folder.forget(removed)
    return len(removed)


def is_of_kind(name: str, kind: Kind | None) -> bool:
    """Whether a damaged thing may be of a kind by its name; of a whole pack nobody knows."""
    match = ENTRY_NAME.fullmatch(name.rpartition("/")[2])
    return kind is None or match is None or match["kind"] == kind


def _mend_packs(packs: Packs) -> list[str]:
    """Let what is damaged in packs count no more; returns its names.

    A pack of which a part cannot be read now stays as it is, and so does a file that is no pack of ours.
    """
    mended: list[str] = []
    good = {pack.name: pack for pack in packs.packs}
    problems: defaultdict[str, Problems] = defaultdict(dict)
    for name, error in packs.damaged.items():
        problems["/".join(name.split("/")[:2])][name] = error
    for name, found in problems.items():
        if any(isinstance(error, UnreadableEntryError) for error in found.values()):
            continue
        with suppress(OSError):
            path = packs.folder / name
            if name in good:
                good[name].index.write(index_path(path))
            elif PACK_NAME.fullmatch(path.name):
                remove_pack(path)
            else:
                continue
            mended += found
    return mended
