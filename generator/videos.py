"""Videos of anybody's: what they say of themselves may be in any encoding, and how they are to be shown."""

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from wangen.generator.install import require_library

HDR = (16, 18)
"""Of a high dynamic range, as ITU-T H.273 counts transfer characteristics: PQ of HDR10, and HLG of many telephones."""
NEARLY_SQUARE = 0.01
"""Pixels whose sides differ by less are square."""


def open_video(path: Path) -> Any:
    """PyAV's container of a video to be read, to be closed by the caller; metadata that is not UTF-8 is replaced.

    Raises:
        WangenError: PyAV is not installed.
        av.FFmpegError, OSError: it cannot be read.
    """
    av = require_library("av")
    # From 19 on it has no such word, and takes whatever metadata holds.
    words = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    return av.open(str(path), **words)


def fault_of(path: Path, error: str) -> str:
    """What is wrong with a file that cannot be read as a video.

    Args:
        path: the file.
        error: what ffmpeg says of it.
    """
    with suppress(OSError):
        if not path.stat().st_size:
            return "is empty (0 bytes)"
        if _lacks_index(path):
            return "cannot be read as a video (its end, where an mp4 has its index, is missing)"
    return error


def _lacks_index(path: Path) -> bool:
    """Whether a file begins as an mp4 or mov and ends before its index, as a recording or a copy that broke off."""
    end, at, kinds = path.stat().st_size, 0, list[bytes]()
    with path.open("rb") as file:
        while at < end:
            file.seek(at)
            head = file.read(16).ljust(16, b"\0")
            size = int.from_bytes(head[8:] if head[:4] == b"\0\0\0\1" else head[:4])
            kinds.append(head[4:8])
            if size < 8 or at + size > end:
                break
            at += size
    whole = kinds[:-1] if at < end else kinds
    return kinds[0] == b"ftyp" and b"moov" not in whole


def packet_times(path: Path) -> tuple[list[tuple[int | None, int]], float, float]:
    """When each frame comes and how long it stays, in ticks; a tick in seconds; frames per second on average, or 0.

    Raises:
        av.FFmpegError, OSError: it cannot be read.
    """
    with open_video(path) as container:
        stream = container.streams.video[0]
        # AVI and raw streams have decoding times only; the last packet is the flush and holds no data; packets
        # to be discarded lie before an edit list's start, as in clips that were cut without encoding again.
        times = [
            (packet.pts if packet.pts is not None else packet.dts, packet.duration or 0)
            for packet in container.demux(stream)
            if packet.size and not packet.is_discard
        ]
        return times, float(stream.time_base or 0), float(stream.average_rate or 0)


def aspect_of(stream: Any) -> float:
    """Width of a stored pixel as a part of its height; 1 where the file says nothing, or nearly that."""
    said = float(stream.sample_aspect_ratio or 1)
    return round(said, 6) if abs(said - 1) > NEARLY_SQUARE else 1.0


def square_size(size: tuple[int, int], rotation: int, aspect: float) -> tuple[int, int]:
    """The (width, height) of a picture once its pixels are square.

    Args:
        size: of the picture turned upright.
        rotation: degrees by which it was turned.
        aspect: width of a stored pixel as a part of its height.

    >>> square_size((720, 576), 0, 16 / 15), square_size((576, 720), 90, 16 / 15)
    ((768, 576), (576, 768))
    """
    across, down = (1.0, aspect) if rotation % 180 else (aspect, 1.0)
    return max(1, round(size[0] * across)), max(1, round(size[1] * down))


def flip_of(frame: Any) -> str:
    """How the file says that a frame be mirrored, as Pillow calls it; empty where it is turned at most.

    As ffmpeg shows it: mirrored frames are turned by quarters or not at all, and by other angles only turned.
    """
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return ""
    a, b, _, c, d = struct.unpack("=9i", bytes(data))[:5]
    if a * d - b * c >= 0:
        return ""
    quarters, rest = divmod(frame.rotation + 1, 90)
    if rest > 2:
        return ""
    if quarters % 2:
        return "TRANSPOSE" if c > 0 else "TRANSVERSE"
    return "FLIP_LEFT_RIGHT" if a < 0 else "FLIP_TOP_BOTTOM"


def is_transparent(stream: Any, frame: Any) -> bool:
    """Whether a video's first frame is transparent somewhere; a channel that says nowhere counts for nothing.

    ffmpeg's own decoders leave out that of a webm, which says only that there is one.
    """
    if stream.metadata.get("alpha_mode") == "1":
        return True
    if not any(component.is_alpha for component in frame.format.components):
        return False
    return bool(frame.reformat(format="rgba").to_ndarray()[..., 3].min() < 255)
