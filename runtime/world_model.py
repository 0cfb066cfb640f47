"""`wangen world_model`: the raw 1X World Model data -> a manifest of clips that are read out of the shards themselves.

Nothing is decoded or written but the manifest: a line names its shard and which of its frames the clip is.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.excerpts import Excerpt
from wangen.generator.files import write_text
from wangen.generator.prepare_steps import WorldModel
from wangen.generator.session import Report
from wangen.generator.toml_values import is_clip_length
from wangen.runtime.raw_world_model import RawData, Shard, read_raw_data, require_readers, segments_of
from wangen.runtime.sources import relative_names

log = logging.getLogger("wangen")


@dataclass(frozen=True)
class Cutting:
    """How clips are cut.

    Attributes:
        frames: of a clip, 4n+1.
        step: from one frame of a clip to the next, in frames of the shard.
        stride: from the start of a clip to that of the next, in frames of the shard.
    """

    frames: int
    step: int
    stride: int

    @property
    def span(self) -> int:
        """Frames of the shard from a clip's first one to its last one.

        >>> Cutting(frames=17, step=2, stride=16).span
        33
        """
        return (self.frames - 1) * self.step + 1

    def clips(self, first: int, end: int) -> list[Excerpt]:
        """The clips of a segment, `end` being the frame after its last one.

        >>> [clip.first for clip in Cutting(frames=5, step=2, stride=4).clips(100, 113)]
        [100, 104]
        """
        return [Excerpt(start, self.step, self.frames) for start in range(first, end - self.span + 1, self.stride)]


def run(options: WorldModel) -> Report:
    """Write the manifest of one split.

    Raises:
        UsageError: a flag is wrong, or a manifest of other content is there.
        WangenError: the data is not whole, or has no segment as long as a clip.
    """
    cutting = read_cutting(options)
    require_readers()
    data = read_raw_data(options.source, options.split)
    segments = {shard: segments_of(shard) for shard in data.shards}
    rows = [row for shard in data.shards for row in _rows(shard, segments[shard], cutting, data, options)]
    lengths = [end - first for found in segments.values() for first, end in found]
    if not rows:
        raise WangenError(f"no segment has the {cutting.span} frames that a clip spans, the longest has {max(lengths)}",
                          where=str(data.folder), cure="lower --frames or --temporal_downsample")  # fmt: skip
    short = sum(length < cutting.span for length in lengths)
    if short:
        log.info("  left out, shorter than the %d frames that a clip spans: %s", cutting.span, many(short, "segment"))
    path = options.output / f"{options.split}.jsonl"
    _write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), overwrite=options.overwrite)
    counts = {"shards": len(data.shards), "segments": len(lengths), "short": short, "clips": len(rows)}
    return Report(
        folder=options.output,
        summary=f"{many(len(rows), 'clip')} of {many(cutting.frames, 'frame')} from {many(len(lengths), 'segment')} of "
        f"{many(len(data.shards), 'shard')}",
        inputs={"source": data.folder},
        counts=counts | {"frames": sum(lengths)},
        result={"manifest": path},
    )


def read_cutting(options: WorldModel) -> Cutting:
    """How clips are cut, from the flags.

    Raises:
        UsageError: a number is too small, or the length is not 4n+1.
    """
    frames, step = options.frames, options.temporal_downsample
    for name, number in (("frames", frames), ("temporal_downsample", step), ("stride", options.stride)):
        if number is not None and number < 1:
            raise UsageError(f"--{name} must be at least 1, got {number}")
    if not is_clip_length(frames):
        raise UsageError(f"--frames must be 4n+1, got {frames}", cure=f"--frames {frames // 4 * 4 + 1}")
    return Cutting(frames, step, options.stride or (frames - 1) * step + 1)


def _rows(
    shard: Shard, segments: list[tuple[int, int]], cutting: Cutting, data: RawData, options: WorldModel
) -> Iterator[dict[str, Any]]:
    """The lines of a shard; paths are as seen from the manifest's folder."""
    facts = shard.facts
    hz = data.hz or (facts.num_frames / facts.duration_s if facts.duration_s else None)
    seen_from = relative_names(options.output.resolve())
    # A file may itself be a link to another name, as in the cache of Hugging Face: only its folder is resolved.
    video, states = (seen_from(path.parent.resolve() / path.name) for path in (shard.video, shard.states))
    for number, (first, end) in enumerate(segments):
        for clip in cutting.clips(first, end):
            yield {
                "file": video,
                "prompt": options.caption,
                "first_frame": clip.first,
                "frame_step": clip.step,
                "frames": clip.count,
                "fps": hz and round(hz / cutting.step, 3),
                "width": facts.width,
                "height": facts.height,
                "shard": shard.number,
                "segment": number,
                "robot_states": states,
            }


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    """Write the manifest; the same content is no change.

    Raises:
        UsageError: one of other content is there, and `overwrite` does not allow it.
    """
    if path.exists() and path.read_bytes() != text.encode() and not overwrite:
        raise UsageError(f"{path.name} is there already, with other lines", where=str(path),
                         cure="give another --output, or --overwrite")  # fmt: skip
    write_text(path, text)
