"""A folder that many tests begin with: made once, and put back for each where it was, since its files name paths."""

import os
import shutil
from pathlib import Path


def keep(folder: Path) -> Path:
    """Copy a folder to one beside it, from which `put_back` makes it again."""
    kept = folder.with_name(f"{folder.name}-kept")
    _copy(folder, kept)
    return kept


def put_back(kept: Path) -> Path:
    """The folder as it was when it was kept: with its times, and with several names of one file."""
    folder = kept.with_name(kept.name.removesuffix("-kept"))
    shutil.rmtree(folder, ignore_errors=True)
    _copy(kept, folder)
    return folder


def _copy(source: Path, folder: Path) -> None:
    copies: dict[int, str] = {}

    def copy(one: str, other: str) -> str:
        number = Path(one).stat(follow_symlinks=False).st_ino
        if number in copies:
            os.link(copies[number], other)
        else:
            copies[number] = shutil.copy2(one, other, follow_symlinks=False)
        return other

    shutil.copytree(source, folder, symlinks=True, copy_function=copy)
