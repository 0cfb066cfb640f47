"""A ball that flies straight on and is thrown back by the walls of the picture: the world of `world_model.py`.

It flies across the picture or up and down, with constant speed, and turns round at the walls: a triangle wave gives
its place at any time. So what comes is a function of place and velocity, and both can be seen in a few frames.

Letters in shapes: B batch, T frames of video, H and W pixels.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch

SIDE_PX, RADIUS_PX = 96, 12.0
SLOWEST_PX, FASTEST_PX = 2.0, 4.0
"""The speed, in pixels a frame."""
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1))
"""(right, down). Balls that fly aslant take a tiny model longer to learn: see RESULTS.md."""
BALL, BACKGROUND = (240, 215, 60), (24, 28, 44)
"""In sRGB."""
HZ = 30
STATE_SIZE = 25
"""Numbers that the raw 1X layout has for the state of a robot; here all zero but the ball's place and velocity."""


@dataclass(frozen=True)
class Flight:
    """How a ball flies.

    Attributes:
        centre: of the ball in the first frame, (x, y) in pixels.
        velocity: (x, y) in pixels a frame.
    """

    centre: tuple[float, float]
    velocity: tuple[float, float]

    def path(self, num_frames: int) -> torch.Tensor:
        """The centre in each frame, (T, 2) as (x, y) in pixels.

        >>> Flight((80.0, 40.0), (3.0, -1.0)).path(4).tolist()
        [[80.0, 40.0], [83.0, 39.0], [82.0, 38.0], [79.0, 37.0]]
        """
        time = torch.arange(num_frames)[:, None]
        room = SIDE_PX - 2 * RADIUS_PX
        way = (torch.tensor(self.centre) - RADIUS_PX + time * torch.tensor(self.velocity)) % (2 * room)
        return RADIUS_PX + torch.minimum(way, 2 * room - way)


def random_flight(generator: torch.Generator) -> Flight:
    """A ball anywhere in the picture that flies to the right, to the left, down or up, at any of the speeds."""
    x, y, direction, speed = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
    room = SIDE_PX - 2 * RADIUS_PX
    speed_px = SLOWEST_PX + (FASTEST_PX - SLOWEST_PX) * speed
    across, down = DIRECTIONS[int(direction * len(DIRECTIONS))]
    return Flight((RADIUS_PX + room * x, RADIUS_PX + room * y), (across * speed_px, down * speed_px))


def draw(paths: torch.Tensor, side_px: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw clips with smooth edges, which show parts of a pixel's motion.

    Args:
        paths: (B, T, 2), the ball's centre as (x, y) in pixels.
        side_px: H and W.

    Returns:
        Videos (B, 3, T, H, W) in uint8, and how much of each pixel the ball covers, (B, 1, T, H, W) in [0, 1].
    """
    place = torch.arange(side_px) + 0.5
    right = place - paths[:, :, 0, None, None]  # (B, T, 1, W)
    down = place[:, None] - paths[:, :, 1, None, None]  # (B, T, H, 1)
    coverage = (RADIUS_PX + 0.5 - torch.sqrt(right**2 + down**2)).clamp(0, 1)[:, None]
    ball, background = (torch.tensor(colour).view(1, 3, 1, 1, 1) for colour in (BALL, BACKGROUND))
    return (background + coverage * (ball - background)).round().to(torch.uint8), coverage


def write_split(folder: Path, shards: Sequence[Sequence[Flight]], num_frames: int) -> Path:
    """Write flights in the layout of the raw 1X World Model data, each a segment of its shard, and return the folder.

    Args:
        folder: of the split; made if missing.
        shards: the flights of each.
        num_frames: of each flight.
    """
    for below in ("videos", "segment_indices", "robot_states", "metadata"):
        (folder / below).mkdir(parents=True, exist_ok=True)
    for number, flights in enumerate(shards):
        paths = torch.stack([flight.path(num_frames) for flight in flights])
        frames = draw(paths, SIDE_PX)[0].permute(0, 2, 3, 4, 1).flatten(0, 1).numpy()
        _write_video(folder / "videos" / f"video_{number}.mp4", frames, num_frames)
        indices = np.repeat(np.arange(len(flights), dtype="<i4"), num_frames)
        indices.tofile(folder / "segment_indices" / f"segment_idx_{number}.bin")
        states = np.zeros((len(indices), STATE_SIZE), "<f4")
        states[:, :2] = paths.flatten(0, 1).numpy()
        states[:, 2:4] = np.repeat([flight.velocity for flight in flights], num_frames, axis=0)
        states.tofile(folder / "robot_states" / f"states_{number}.bin")
        about = json.dumps({"shard_num_frames": len(indices)})
        (folder / "metadata" / f"metadata_{number}.json").write_text(about, encoding="utf-8")
    total = num_frames * sum(map(len, shards))
    whole = json.dumps({"num_shards": len(shards), "hz": HZ, "num_images": total})
    (folder / "metadata.json").write_text(whole, encoding="utf-8")
    return folder


def _write_video(path: Path, frames: np.ndarray, keyframe_every: int) -> None:
    """H.264 of (T, H, W, 3) in uint8, fine enough that the loss of it is none to speak of."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(HZ))
        stream.width, stream.height = frames.shape[2], frames.shape[1]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "8", "preset": "veryfast", "threads": "1"}
        stream.options |= {"g": str(keyframe_every), "sc_threshold": "0"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
