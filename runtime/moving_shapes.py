"""Drawn clips of one coloured shape that moves over a plain background, their captions, and what a clip shows.

The tiny Wan of `examples/tiny-wan` was trained on nothing else. The demo draws its dataset here, and the tests and
benchmarks measure here whether generated clips show what their captions say.

Letters in shapes: B batch, T frames of video, H and W pixels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from wangen.runtime.sampling.output import read_frames, write_media

Colour = tuple[int, int, int]

SHAPES = ("circle", "square", "triangle")
COLOURS: dict[str, Colour] = {
    "red": (215, 40, 40),
    "green": (40, 165, 60),
    "blue": (45, 75, 220),
    "yellow": (235, 215, 50),
    "orange": (240, 135, 25),
    "cyan": (40, 205, 215),
}
"""The colours of shapes that the tiny Wan knows; purple and pink are none of them."""
BACKGROUNDS: dict[str, Colour] = {"grey": (128, 128, 128), "black": (16, 16, 16), "white": (236, 236, 236)}
MOTIONS: dict[str, tuple[int, int]] = {
    "moves to the right": (1, 0),
    "moves to the left": (-1, 0),
    "moves down": (0, 1),
    "moves up": (0, -1),
    "stands still": (0, 0),
}
"""Direction of a motion in the picture, (right, down)."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One clip.

    Attributes:
        shape: one of `SHAPES`.
        colour: of the shape, in sRGB.
        background: in sRGB.
        centre: of the shape in the middle of the clip, (x, y) in shares of the picture's sides.
        radius: of the circle around the shape, in shares of the picture's height.
        travel: from the first frame to the last, (x, y) in shares of the picture's sides.
    """

    shape: str
    colour: Colour
    background: Colour
    centre: tuple[float, float]
    radius: float
    travel: tuple[float, float]


def caption_of(shape: str, colour: str, background: str, motion: str) -> str:
    """The sentence that the tiny Wan was trained with.

    >>> caption_of("circle", "red", "grey", "moves up")
    'a red circle moves up on a grey background'
    """
    article = "an" if colour[0] in "aeiou" else "a"
    return f"{article} {colour} {shape} {motion} on a {background} background"


def random_scene(shape: str, colour: Colour, background: Colour, motion: str, generator: torch.Generator) -> Scene:
    """A scene of a random size and speed; half-way the shape is near the middle, and it never leaves the picture.

    Args:
        shape: one of `SHAPES`.
        colour: of the shape.
        background: its colour.
        motion: one of `MOTIONS`.
        generator: of the numbers.
    """
    x, y, size, speed = torch.rand(4, generator=generator).tolist()
    radius = 0.17 + 0.07 * size
    distance = 0.3 + 0.1 * speed
    travel = (MOTIONS[motion][0] * distance, MOTIONS[motion][1] * distance)
    room = [min(0.06, 0.48 - radius - abs(way) / 2) for way in travel]  # on either side of the middle
    centre = (0.5 + room[0] * (2 * x - 1), 0.5 + room[1] * (2 * y - 1))
    return Scene(shape=shape, colour=colour, background=background, centre=centre, radius=radius, travel=travel)


def draw(scenes: Sequence[Scene], num_frames: int, size_px: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw clips with smooth edges.

    Args:
        scenes: B of them.
        num_frames: T.
        size_px: (H, W).

    Returns:
        Videos (B, 3, T, H, W) in uint8, and how much of each pixel the shape covers, (B, 1, T, H, W) in [0, 1].
    """
    height, width = size_px
    time = torch.linspace(-0.5, 0.5, num_frames) if num_frames > 1 else torch.zeros(1)
    coverage = torch.empty(len(scenes), 1, num_frames, height, width)
    colours = torch.empty(2, len(scenes), 3, 1, 1, 1)
    for number, scene in enumerate(scenes):
        x = (scene.centre[0] + scene.travel[0] * time) * width
        y = (scene.centre[1] + scene.travel[1] * time) * height
        right = torch.arange(width) + 0.5 - x[:, None, None]  # (T, 1, W)
        down = torch.arange(height)[:, None] + 0.5 - y[:, None, None]  # (T, H, 1)
        distance = _distance(scene.shape, right, down, scene.radius * height)
        coverage[number, 0] = (0.5 - distance).clamp(0, 1)
        colours[0, number, :, 0, 0, 0] = torch.tensor(scene.colour, dtype=torch.float32)
        colours[1, number, :, 0, 0, 0] = torch.tensor(scene.background, dtype=torch.float32)
    video = colours[1] + coverage * (colours[0] - colours[1])
    return video.round().to(torch.uint8), coverage


def _distance(shape: str, right: torch.Tensor, down: torch.Tensor, radius_px: float) -> torch.Tensor:
    """Signed distance in pixels from the shape's edge (near it), negative inside; the triangle points up."""
    if shape == "circle":
        return torch.sqrt(right**2 + down**2) - radius_px
    if shape == "square":
        return torch.maximum(right.abs(), down.abs()) - 0.85 * radius_px
    if shape == "triangle":
        inner = 0.6 * radius_px
        return torch.maximum(down, math.sqrt(0.75) * right.abs() - 0.5 * down) - inner
    raise ValueError(f"no shape {shape!r}")


def write_clips(folder: Path, scenes: Mapping[str, tuple[str, Scene]], num_frames: int, size_px: int) -> None:
    """Draw clips into a folder, each with its caption in a `.txt` beside it; what is there already stays.

    Args:
        folder: where; it exists.
        scenes: by file name without ending: the caption and what is drawn.
        num_frames: of each clip, at 16 frames per second; 1 makes a `.png`.
        size_px: height and width.

    Raises:
        WangenError: the disk refused.
    """
    for name, (caption, scene) in scenes.items():
        path = folder / f"{name}.{'mp4' if num_frames > 1 else 'png'}"
        if path.exists():
            continue
        (video,), _ = draw([scene], num_frames, (size_px, size_px))
        path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
        write_media(path, video.float() / 127.5 - 1, 16, {})


def read_clip(path: Path) -> torch.Tensor:
    """The frames of an mp4, (3, T, H, W) in uint8.

    Raises:
        WangenError: it cannot be decoded.
    """
    return torch.from_numpy(read_frames(path)).permute(3, 0, 1, 2)


@dataclass(frozen=True)
class Seen:
    """What `look` finds in a clip.

    Attributes:
        colour: mean sRGB colour of the shape's inside, (0, 0, 0) where there is no shape.
        background: mean sRGB colour of the border of the picture.
        share: of the pixels that belong to the shape.
        path: the shape's centre in each frame, (T, 2) as (x, y) in shares of the sides; NaN in a frame without.
    """

    colour: tuple[float, float, float]
    background: tuple[float, float, float]
    share: float
    path: torch.Tensor


def look(video: torch.Tensor, *, contrast: float = 60.0) -> Seen:
    """Find the shape: the pixels whose colour is far from that of the frame's border.

    Args:
        video: (3, T, H, W) in uint8.
        contrast: how far, as the distance between two sRGB colours in steps of 1/255.
    """
    pixels = video.float()
    border = torch.cat([pixels[:, :, 0], pixels[:, :, -1], pixels[:, :, :, 0], pixels[:, :, :, -1]], dim=2)
    background = border.median(dim=2).values  # (3, T): a shape that touches the border does not move the median
    inside = (pixels - background[:, :, None, None]).norm(dim=0) > contrast  # (T, H, W)
    share = inside.float().mean().item()
    count = inside.sum(dim=(1, 2)).float()
    x = (inside.sum(dim=1) * (torch.arange(video.shape[3]) + 0.5)).sum(dim=1) / count / video.shape[3]
    y = (inside.sum(dim=2) * (torch.arange(video.shape[2]) + 0.5)).sum(dim=1) / count / video.shape[2]
    colour = pixels[:, inside].mean(dim=1) if share else torch.zeros(3)
    return Seen(_triple(colour), _triple(background.mean(dim=1)), share, torch.stack([x, y], dim=1))


def _triple(values: torch.Tensor) -> tuple[float, float, float]:
    red, green, blue = values.tolist()
    return red, green, blue
