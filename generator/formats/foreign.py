"""What people give where weights belong, told by its first bytes; and downloads that have not ended."""

import re
from pathlib import Path

from wangen.generator.errors import WangenError
from wangen.generator.formats import DOWNLOAD_AGAIN, quoted

START_BYTES = 512  # as many as `foreign` wants to see
MAX_MESSAGE_BYTES = 4096  # what a server says instead of a file is no longer

UNPACK = "unpack it, and give the weight file inside"
SAFETENSORS = "get the weights as .safetensors"
PULL = f"run `git lfs pull`, or {DOWNLOAD_AGAIN}"

# How a file begins (white space and byte order mark aside) -> what it is, what to do. The first that fits counts.
STARTS = (
    (rb"version https://git-lfs", "a Git LFS pointer, not the weights", PULL),
    (rb"(?i:<!doctype html|<html|<head|<body)", "a web page, not weights", DOWNLOAD_AGAIN),
    (rb"<\?xml", "an XML text, as servers answer with when they refuse, not weights", DOWNLOAD_AGAIN),
    (rb"\{", "a JSON text, not weights", "give the weight file that it belongs to"),
    (rb"\x80\x02\x8a\nl\xfc\x9cF", "a bare pickle (PyTorch before 1.6), which is not read", SAFETENSORS),
    (rb"\x80[\x02-\x05]", "a bare pickle, which is not read: pickles can run code", SAFETENSORS),
    (rb"\x93NUMPY", "a NumPy array, which is not read", SAFETENSORS),
    (rb"\x89HDF\r\n", "an HDF5 file (Keras), which is not read", SAFETENSORS),
    (rb"\x08[\x01-\x14]\x12.[\x20-\x7e]{2}", "an ONNX file, which is not read", SAFETENSORS),
    (rb"....TFL3", "a TensorFlow Lite file, which is not read", SAFETENSORS),
    (rb"([\x81-\x8f]|\xde..)[\xa1-\xbf\xd9][\x20-\x7e]", "a msgpack file (Flax), which is not read", SAFETENSORS),
    (rb"lmgg|fmgg|tjgg|algg", "a GGML file of before GGUF, which is not read", "get the weights as .gguf"),
    (rb"7z\xbc\xaf|Rar!|\x1f\x8b\x08|\xfd7zXZ|\x28\xb5\x2f\xfd|BZh[1-9]", "a packed archive, not weights", UNPACK),
    (rb".{257}ustar", "a tar archive, not weights", UNPACK),
    (rb"\x89PNG|\xff\xd8\xff|RIFF|GIF8|....ftyp|\x1aE\xdf", "an image or a video, not weights", "give a weight file"),
)  # fmt: skip
PATTERNS = tuple((re.compile(start, re.DOTALL), found, cure) for start, found, cure in STARTS)
BLANK = b"\xef\xbb\xbf \t\r\n"

ARIA2 = ".aria2"
UNFINISHED = (ARIA2, ".part", ".partial", ".crdownload", ".incomplete", ".download")
"""What downloaders add to the name of a file that is not complete, or put beside it under that name."""


def foreign(path: Path, start: bytes) -> WangenError | None:
    """The error of a file that is no weight file of a known format, by its first `START_BYTES`; else None."""
    if start[8:9] == b"{":  # the first byte of a safetensors header, after eight that may be anything
        return None
    if start and not any(start):
        return WangenError(
            "the file begins with zeros: a downloader has reserved its room and not written it yet",
            where=str(path),
            cure=f"let the download finish, or {DOWNLOAD_AGAIN}",
        )
    for pattern, found, cure in PATTERNS:
        if pattern.match(start) or pattern.match(start.lstrip(BLANK)):
            return WangenError(f"this is {found}", where=str(path), cure=cure)
    text = start.decode("utf-8", "replace").strip()
    if path.stat().st_size <= MAX_MESSAGE_BYTES and text and _is_plain(text):
        return WangenError(f"this is a text, not weights: {quoted(text)}", where=str(path), cure=DOWNLOAD_AGAIN)
    return None


def _is_plain(text: str) -> bool:
    return "\N{REPLACEMENT CHARACTER}" not in text and all(c.isprintable() or c in "\r\n\t" for c in text)


def unfinished(path: Path) -> Path | None:
    """The companion of a file that says that its download has not ended: `model.safetensors.part`; else None."""
    return next((file for suffix in UNFINISHED if (file := _beside(path, suffix))), None)


def preallocated(path: Path) -> bool:
    """Whether a file may have its full length before its content.

    Only aria2 says so. The holes that other programs leave in a file look like weights that are zero.
    """
    return _beside(path, ARIA2) is not None


def _beside(path: Path, suffix: str) -> Path | None:
    file = path.with_name(path.name + suffix)
    try:
        return file if file.exists() else None
    except OSError:  # the name with the suffix is longer than names may be
        return None
