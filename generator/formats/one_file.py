"""One weight file, whatever its format: told by its first bytes, never by its name."""

from collections.abc import Iterator
from pathlib import Path

from wangen.generator.errors import WangenError, unreadable
from wangen.generator.files import spread
from wangen.generator.formats import DOWNLOAD_AGAIN, Header
from wangen.generator.formats.foreign import START_BYTES, foreign, preallocated, unfinished
from wangen.generator.formats.gguf import MAGIC as GGUF_MAGIC
from wangen.generator.formats.gguf import read_gguf
from wangen.generator.formats.pth import directory_lines, read_pth
from wangen.generator.formats.safetensors import read_safetensors
from wangen.generator.formats.zip_records import MAGIC as ZIP_MAGIC

MIN_BYTES = 8  # before them, no format has begun
MIB = 2**20
NUM_SPREAD_MIB = 64  # how many mebibytes of a file `fingerprint` reads


def read_file(path: Path) -> Header:
    """The header of one file (a shard stands for itself).

    Raises:
        WangenError: unreadable, still being downloaded, cut short, malformed, no weights, or a pickle that holds more
            than tensors.
    """
    try:
        return _read(path)
    except OSError as error:
        raise unreadable(path, error) from error
    except WangenError as error:
        if companion := unfinished(path):
            raise WangenError(
                f"{error.found}; {companion.name} beside it says that its download has not ended",
                where=error.where,
                cure=f"let the download finish, or delete {companion.name} if it is an older one's",
            ) from error
        raise


def fingerprint(path: Path, header: Header) -> Iterator[bytes]:
    """The bytes that tell one file from another of its length: all that is not weights, and 64 MiB spread evenly.

    A `.pth` has checksums of all its records in its zip directory; they serve instead.

    Raises:
        WangenError: the file can no longer be read.
    """
    try:
        yield from directory_lines(path) if header.format == "pth" else _spread(path, header)
    except OSError as error:
        raise unreadable(path, error) from error


def _read(path: Path) -> Header:
    with path.open("rb") as file:
        start = file.read(START_BYTES)
    if len(start) < MIN_BYTES:
        found = f"it is cut short: {len(start)} bytes are no header" if start else "the file is empty"
        raise WangenError(found, where=str(path), cure=DOWNLOAD_AGAIN)
    if error := foreign(path, start):
        raise error
    if preallocated(path):
        raise WangenError("this file has its full length and not yet its content", where=str(path))
    if start.startswith(ZIP_MAGIC):
        return read_pth(path)
    return read_gguf(path) if start.startswith(GGUF_MAGIC) else read_safetensors(path)


def _spread(path: Path, header: Header) -> Iterator[bytes]:
    """The header and 64 mebibytes at even distances; the whole file when it is no longer than that."""
    offsets = (info.place.offset for info in header.tensors.values() if info.place)
    header_bytes = min(offsets, default=path.stat().st_size)
    with path.open("rb") as file:
        yield file.read(header_bytes)
        yield from spread(file, NUM_SPREAD_MIB, MIB)
