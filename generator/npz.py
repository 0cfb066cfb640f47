"""Clips as `.npz`: `frames`, uint8 [F, H, W, 3] in RGB, and `fps`, a number; what `numpy.savez` writes.

Nothing is unpickled: an array of objects is refused by its header. Facts are read from headers, without the pixels.
"""

import math
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from wangen.generator.errors import WangenError
from wangen.generator.install import require_library

if TYPE_CHECKING:
    import numpy as np

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]

SUFFIX = ".npz"
DEFAULT_FPS = 16.0
"""Frames per second of a clip that says none: those of Wan 2.1."""
FORM = "save numpy.savez(path, frames=uint8 [F, H, W, 3], fps=16)"

HEADERS: AbstractContextManager[Any] = Lock() if sys.version_info < (3, 12, 2) else nullcontext()
"""Held while numpy reads a header, which it hands to `ast`: two threads that do so at once may get a SystemError from
Python before 3.11.8 and 3.12.2 (cpython issue 106905).
"""

_FRAMES, _FPS = "frames.npy", "fps.npy"


@dataclass(frozen=True)
class NpzFacts:
    """What the headers of a clip say; `fps` is `DEFAULT_FPS` where it says none."""

    num_frames: int
    height: int
    width: int
    fps: float


def is_npz(path: Path) -> bool:
    """Whether a path names a `.npz`; letter case does not matter."""
    return path.suffix.lower() == SUFFIX


def is_other_archive(path: "Path | os.DirEntry[str]") -> bool:
    """Whether a file is a `.npz` that holds no `frames`: other trainers keep their caches beside the media."""
    if not path.name.lower().endswith(SUFFIX):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return _FRAMES not in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def read_npz_facts(path: Path) -> NpzFacts:
    """Sizes and frame rate of a clip, from its headers.

    Raises:
        WangenError: it is no such clip, or is cut short.
    """
    with _opened(path) as archive:
        return _facts(path, archive)


def read_npz(path: Path) -> "tuple[Pixels, NpzFacts]":
    """The frames of a clip, uint8 [F, H, W, 3], and its facts.

    Raises:
        WangenError: it is no such clip, is cut short or damaged.
        MemoryError: it does not fit into memory.
    """
    numpy = require_library("numpy")
    with _opened(path) as archive:
        facts = _facts(path, archive)
        with archive.open(_FRAMES) as member, HEADERS:
            return numpy.lib.format.read_array(member, allow_pickle=False), facts


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive, with what zip and numpy find wrong with it in words."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        # RuntimeError: encrypted, or packed in a way that is not known.
        raise WangenError(f"cannot be read as a clip in .npz ({error})", where=str(path), cure=FORM) from None


def _facts(path: Path, archive: zipfile.ZipFile) -> NpzFacts:
    names = archive.namelist()
    if _FRAMES not in names:
        held = ", ".join(name.removesuffix(".npy") for name in names[:4]) or "nothing"
        raise WangenError(f"holds no array called frames (but {held})", where=str(path), cure=FORM)
    shape, dtype, num_bytes = _header(archive, _FRAMES)
    if dtype == "uint8" and len(shape) == 4 and not shape[0]:
        raise WangenError("has no frames", where=str(path), cure=FORM)
    if dtype != "uint8" or len(shape) != 4 or shape[3] != 3 or not all(shape):
        raise WangenError(f"frames is {dtype} {list(shape)}, not uint8 [F, H, W, 3]", where=str(path), cure=FORM)
    if num_bytes < math.prod(shape):
        raise WangenError(f"is cut short: {math.prod(shape)} bytes of frames expected, {num_bytes} found",
                          where=str(path), cure="copy or make it again")  # fmt: skip
    return NpzFacts(*shape[:3], _fps(path, archive) if _FPS in names else DEFAULT_FPS)


def _header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], str, int]:
    """Shape and dtype of an array, and how many bytes of it are there."""
    header = require_library("numpy").lib.format
    with archive.open(name) as member, HEADERS:
        version = header.read_magic(member)
        read = header.read_array_header_1_0 if version == (1, 0) else header.read_array_header_2_0
        shape, _, dtype = read(member)
        return shape, dtype.name, archive.getinfo(name).file_size - member.tell()


def _fps(path: Path, archive: zipfile.ZipFile) -> float:
    shape, dtype, _ = _header(archive, _FPS)
    if shape == () and dtype.startswith(("int", "uint", "float")):
        with archive.open(_FPS) as member, HEADERS:
            fps = float(require_library("numpy").lib.format.read_array(member, allow_pickle=False))
        if 0.01 <= fps <= 1000:
            return fps
        dtype = f"{fps:g}"
    raise WangenError(f"fps is {dtype}{list(shape) or ''}, not one number from 0.01 to 1000", where=str(path),
                      cure=FORM)  # fmt: skip
