"""Synthetic shards in the layout of the raw 1X World Model data, whose frames tell their numbers."""

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from footage import counter

from wangen.runtime.raw_world_model import STATE_SIZE

SIZE = (64, 64)
HZ = 30
SHARD = 100
"""Frame i of shard n shows the number 100 n + i."""
_SQUARE = 8
"""Pixels of the square that moves 2 px a frame along the upper border, to the right and round again."""


def picture(number: int) -> np.ndarray:
    """(H, W, 3) uint8: the number as bars, and above them a square at 2 · number px."""
    pixels = counter(number, SIZE)
    pixels[:_SQUARE] = 16
    pixels[:_SQUARE, (np.arange(_SQUARE) + 2 * number) % SIZE[0]] = 240
    return pixels


def state(number: int) -> np.ndarray:
    """float32 [25]: joint j of the frame that shows `number` is number + j / 32, exact in float32."""
    return (number + np.arange(STATE_SIZE) / 32).astype(np.float32)


def write_split(folder: Path, shards: Sequence[Sequence[tuple[int, int]]], *, flat: bool = False) -> Path:
    """Write a split and return its folder.

    Args:
        folder: to make.
        shards: for each shard its segments as (index, number of frames), fewer than 100 frames together.
        flat: all files in one folder, as in the validation split.
    """
    total = 0
    for number, segments in enumerate(shards):
        indices = np.concatenate([np.full(count, index, "<i4") for index, count in segments])
        shown = range(number * SHARD, number * SHARD + len(indices))
        total += len(indices)
        write_shard(_place(folder, "videos", f"video_{number}.mp4", flat=flat), shown)
        indices.tofile(_place(folder, "segment_indices", f"segment_idx_{number}.bin", flat=flat))
        states = np.stack([state(frame) for frame in shown])
        states.tofile(_place(folder, "robot_states", f"states_{number}.bin", flat=flat))
        about = _place(folder, "metadata", f"metadata_{number}.json", flat=flat)
        about.write_text(json.dumps({"shard_num_frames": len(indices)}))
    (folder / "metadata.json").write_text(json.dumps({"num_shards": len(shards), "hz": HZ, "num_images": total}))
    return folder


def _place(folder: Path, below: str, name: str, *, flat: bool) -> Path:
    place = folder if flat else folder / below
    place.mkdir(parents=True, exist_ok=True)
    return place / name


def write_shard(path: Path, shown: range, codec: str = "libx264") -> Path:
    """A video of these numbers, of the kind that its ending says.

    It has B frames, so that frames are stored in another order than they are shown, and a keyframe every 12 frames.
    """
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(HZ))
        stream.width, stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        stream.options = {"g": "12", "bf": "2", "threads": "1", "sc_threshold": "0"}
        if codec == "libx264":
            stream.options |= {"crf": "10", "preset": "veryfast"}
        else:
            stream.bit_rate = 4_000_000
        for number in shown:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")))
        container.mux(stream.encode())
    return path
