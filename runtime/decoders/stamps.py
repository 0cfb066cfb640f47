"""When each frame of a video is shown, read from its packets: nothing is decoded.

A frame's number counts from 0 in the order in which frames are shown. In mp4, mov, mkv and webm packets have stamps
that say which is which. Other containers (AVI, MPEG program streams) have no stamps or index to rely on.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from wangen.generator.errors import WangenError
from wangen.generator.pace import Beat, beat_of_packets, pace_of, slack
from wangen.generator.videos import open_video, packet_times
from wangen.runtime.sources import FileState, state_of

_INDEXED = {"mov", "matroska"}
"""First names, as ffmpeg gives them, of the containers whose stamps and index say where each frame is."""
_OF_DECODING = {"avi", "asf"}
"""Those that say when a packet is decoded, not when its frame is shown."""
_KNOWN = 16
"""Videos whose stamps are remembered: an hour at 30 frames per second takes 4 MB."""


UNKNOWN = Beat()


@dataclass(frozen=True)
class Stamps:
    """Presentation times of a video's frames.

    Attributes:
        frames: in ticks, of all frames, ascending; none where the stamps do not count.
        keys: of the keyframes.
        tick: of the stamps, in seconds.
        last_ticks: how long the last frame is shown; 0 where it is not said.
        rate: average frames per second.
        stream: number of the video stream among all of the file.
        beat: as `beat_of_packets` says.
    """

    frames: Sequence[int] = ()
    keys: Sequence[int] = ()
    tick: Fraction = Fraction(0)
    last_ticks: int = 0
    rate: float = 25.0
    stream: int = 0
    beat: Beat = UNKNOWN

    def shown(self, span: range, fps: float, source_fps: float | None) -> list[int]:
        """The numbers of the frames on screen at k / fps seconds for each k of `span`; fewer where the video ends.

        By the rules of `pyav.shown_frames`, which decodes.
        """
        slack_s = slack(0.0 if source_fps else float(self.tick))
        if source_fps:
            times_s = [number / source_fps for number in range(len(self.frames) + 1)]
        else:
            tick = self.tick
            times_s = [float(stamp) * tick.numerator / tick.denominator for stamp in self.frames]
            times_s.append(times_s[-1] + (self.last_ticks * float(tick) or 1 / self.rate))
        first_s, end_s = times_s[0], times_s.pop()
        starts_s = [max(0.0, time_s - first_s - slack_s) for time_s in times_s]
        pace = pace_of(fps, source_fps or self.beat.rate)
        last_s = (end_s - first_s if not pace.within_s else times_s[-1] - first_s + 2 * pace.within_s) - slack_s
        return [bisect_right(starts_s, k / pace.fps + pace.within_s) - 1 for k in span if k / pace.fps < last_s]


def beat(path: Path) -> Beat:
    """How the frames of a video follow each other.

    Raises:
        av.FFmpegError, OSError: it cannot be read.
    """
    return _beat(path, state_of(path))


@lru_cache(maxsize=1024)
def _beat(path: Path, _state: FileState | None) -> Beat:
    """That of a file in this state."""
    times, tick_s, rate = packet_times(path)
    return beat_of_packets([time for time, _ in times], tick_s, rate)


def stamps_of(path: Path) -> Stamps:
    """The stamps of a video.

    Raises:
        WangenError: it has no video stream.
        av.FFmpegError, OSError: it cannot be read.
    """
    return _stamps(path, state_of(path))


def ticks_as_shown(path: Path, container: Any) -> Sequence[int]:
    """When each frame is shown, in ticks, of a video whose frames come with the times at which others are decoded.

    So H.264 with B-frames lies in an AVI. The times are right, and only in another order: the next frame has the next.

    Args:
        path: of the video.
        container: it, opened by PyAV; it stays where it is.

    Returns:
        The times, ascending; none where each frame comes with its own.

    Raises:
        av.FFmpegError, OSError: it cannot be read.
    """
    reorders = container.format.name in _OF_DECODING and container.streams.video[0].codec_context.has_b_frames
    return _sorted_ticks(path, state_of(path)) if reorders else ()


@lru_cache(maxsize=_KNOWN)
def _sorted_ticks(path: Path, _state: FileState | None) -> Sequence[int]:
    """The times of all packets of a file in this state, ascending."""
    with open_video(path) as container:
        packets = container.demux(container.streams.video[0])
        return sorted(packet.pts for packet in packets if packet.size and packet.pts is not None)


@lru_cache(maxsize=_KNOWN)
def _stamps(path: Path, _state: FileState | None) -> Stamps:
    """The stamps of a file in this state."""
    with open_video(path) as container:
        if container.format.name.partition(",")[0] not in _INDEXED:
            return Stamps()
        if not container.streams.video:
            raise WangenError("has no video stream", where=str(path), cure="replace it or take it out")
        stream = container.streams.video[0]
        # The last packet is the flush; packets to be discarded lie before an edit list's start.
        packets = [(packet.pts, packet.is_keyframe, packet.duration or 0)
                   for packet in container.demux(stream) if packet.size and not packet.is_discard]  # fmt: skip
        if not packets or any(pts is None for pts, *_ in packets):
            return Stamps()
        packets.sort()
        frames = [pts for pts, *_ in packets]
        if any(one == other for one, other in pairwise(frames)):
            return Stamps()
        keys = [pts for pts, is_key, _ in packets if is_key]
        rate = float(stream.average_rate or 25)
        tick, last_ticks = Fraction(stream.time_base), packets[-1][2]
        return Stamps(frames, keys, tick, last_ticks, rate, stream.index, beat_of_packets(frames, float(tick), rate))
