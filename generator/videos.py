"""Videos of anybody's: what they say of themselves may be in any encoding, and how they are to be shown."""

import struct
from pathlib import Path
from typing import Any

from wangen.generator.install import require_library


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
