"""Pictures of anybody's: only decoders that read pixels open them, whatever the file is called.

Pillow takes the decoder by content. One of them hands PostScript to Ghostscript, a program that executes it.
"""

import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from wangen.generator.errors import WangenError, read_cure

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "DIB", "AVIF", "GIF", "TIFF")
"""How a picture can be stored, with what people misname; Pillow passes over those that it lacks."""

DECODING_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, ArithmeticError, RuntimeError, struct.error,
    zlib.error, MemoryError,
)  # fmt: skip
"""What Pillow's decoders raise for malformed files."""

_OTHERS = (
    ("HEIC", 4, b"ftyphe"), ("JPEG XL", 0, b"\xff\x0a"), ("JPEG XL", 4, b"JXL "), ("JPEG 2000", 4, b"jP  "),
    ("a file of Photoshop", 0, b"8BPS"),
)  # fmt: skip
"""What people and programs call .jpg or .png all the same: its name, and where near its start stand which bytes."""


def fault_of(path: Path) -> str:
    """What is wrong with a file that is in none of the formats."""
    with suppress(OSError), path.open("rb") as file:
        if not (start := file.read(16)):
            return "is empty (0 bytes)"
        for name, at, known in _OTHERS:
            if start[at:].startswith(known):
                return f"cannot be read as an image (it is {name}: save it as PNG or JPEG)"
    return "cannot be read as an image"


class _Once:
    """What is known of pictures while `decoding_once` is open."""

    whole: set[tuple[int, ...]] | None = None


@contextmanager
def decoding_once() -> Iterator[None]:
    """While it is open, a picture is decoded once, whatever its names: the bundles of several platforms link to one."""
    _Once.whole = set()
    try:
        yield
    finally:
        _Once.whole = None


def decode(path: Path) -> None:
    """Decode the pixels: a picture that was cut short has a good header.

    Raises:
        WangenError: it cannot be read to its end.
    """
    try:
        status = path.stat()
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if _Once.whole is not None and state in _Once.whole:
            return
        with open_picture(path) as image:
            image.load()
    except DECODING_ERRORS as error:
        raise no_image(path, error) from None
    if _Once.whole is not None:
        _Once.whole.add(state)


def no_image(path: Path, error: BaseException) -> WangenError:
    """What Pillow says of a file; where the system could not read it, the picture may be good."""
    cure = read_cure(error) if isinstance(error, OSError) and error.errno else ""
    return WangenError(f"cannot be read as an image ({short(error)})", where=str(path), cure=cure)


def short(error: BaseException) -> str:
    """What a library says of a file, without its path and further lines.

    >>> short(OSError("cannot identify it: 'a.jpg'"))
    'cannot identify it'
    """
    return (str(error).splitlines() or [type(error).__name__])[0].split(": '")[0]


def open_picture(path: Path) -> "Image.Image":
    """A picture whose header has been read, to be closed by the caller.

    Raises:
        UnidentifiedImageError: it is in none of the formats.
        OSError: it cannot be read.
        DecompressionBombError: it has more than 179 million pixels.
    """
    from PIL import Image

    _prepare()
    return Image.open(path, formats=[name for name in FORMATS if name in Image.OPEN])


@cache
def _prepare() -> None:
    """Register Pillow's decoders once: its own lazy registration is not safe between threads."""
    from PIL import Image

    Image.init()
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # what is too large is an error
