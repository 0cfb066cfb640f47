"""What the tests of packs ask of a folder with a pack."""

from pathlib import Path

from wangen.runtime.cache import Folder, packs


def tar_of(folder: Path) -> Path:
    (path,) = (folder / packs.FOLDER).glob("*.tar")
    return path


def keys(folder: Path, *, deep: bool = False) -> set[str]:
    return {entry.key for entry in Folder(folder, deep=deep).all_entries}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
