"""What clips are to be like, and the names of what is written: from the flags, checked before anything starts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wangen import profiles
from wangen.generator.errors import UsageError
from wangen.generator.footage import CLIPS, MANIFEST, RECORDS, SETTINGS, VAL_MANIFEST, WRITTEN
from wangen.generator.geometry import nearest_size
from wangen.generator.prepare_steps import ClipFormat, Preprocess
from wangen.generator.resolutions import parse_resolution, resolution_name
from wangen.runtime.clips import NPZ_BYTES, write_mp4, write_npz

if TYPE_CHECKING:
    from wangen.runtime.clips import Frame

MAX_FPS = 240
_MAX_CRF = 51
MAX_WORKERS = 8
"""By default: each holds the frames of a clip or two, 100 to 200 MB."""


@dataclass(frozen=True)
class Form:
    """What every clip is like.

    Attributes:
        width: pixels.
        height: pixels.
        fps: frames per second.
        frames: of a clip.
        stride: frames from the start of a clip to that of the next.
        format: of the files.
        crf: quality of mp4.
    """

    width: int
    height: int
    fps: int
    frames: int
    stride: int
    format: ClipFormat
    crf: int

    @property
    def npz_bytes(self) -> int:
        """Size of a clip of plain pixels."""
        return self.frames * self.height * self.width * 3 + NPZ_BYTES

    def words(self) -> str:
        """For people, such as `81 frames of 832x480 at 16 fps`."""
        return f"{self.frames} frames of {self.width}x{self.height} at {self.fps} fps"


@dataclass(frozen=True)
class Place:
    """Where things stand in the output folder."""

    folder: Path

    @property
    def clips(self) -> Path:
        """The clips."""
        return self.folder / CLIPS

    @property
    def records(self) -> Path:
        """What is known of videos and clips, so that a run goes on where the last one stopped."""
        return self.folder / RECORDS

    @property
    def settings(self) -> Path:
        """The flags of the last run."""
        return self.records / SETTINGS

    @property
    def written(self) -> Path:
        """What the manifests of the last run are known by."""
        return self.records / WRITTEN

    @property
    def manifests(self) -> tuple[Path, Path]:
        """What names the clips, to train on and to validate."""
        return self.folder / MANIFEST, self.folder / VAL_MANIFEST

    def make(self) -> None:
        """Make the folders. Raises OSError where the disk refuses."""
        for folder in (self.clips, self.records / "clips", self.records / "videos"):
            folder.mkdir(parents=True, exist_ok=True)

    def clip(self, name: str) -> Path:
        """A clip by its file name."""
        return self.clips / name

    def record(self, name: str) -> Path:
        """What a clip was made of, by its file name."""
        return self.records / "clips" / f"{name}.json"

    def analysis(self, digest: str, fps: int) -> Path:
        """What was found out about a video with this digest."""
        return self.records / "videos" / f"{digest[:32]}-{fps}.npz"


def write_clip(path: Path, frames: "Sequence[Frame]", form: Form) -> None:
    """Write a clip; raises as `write_mp4` and `write_npz`."""
    if form.format == "mp4":
        write_mp4(path, frames, form.fps, form.crf)
    else:
        write_npz(path, frames, form.fps)


def num_workers(options: Preprocess) -> int:
    """How many videos or clips are worked on at a time."""
    return options.num_workers or min(MAX_WORKERS, os.cpu_count() or 1)


def read_form(options: Preprocess) -> Form:
    """The form of the clips: what the flags say, and for the rest the model's profile.

    Raises:
        UsageError: a flag has a value that cannot be.
    """
    _check_numbers(options)
    model = profiles.model(options.task)
    width, height = parse_resolution(options.resolution, "--resolution") if options.resolution else model.resolution
    nearest = nearest_size((width, height), model.bucket_step)
    if nearest != (width, height):
        raise UsageError(f"--resolution {resolution_name((width, height))}: {model.title} takes multiples of "
                         f"{model.bucket_step}", cure=f"--resolution {resolution_name(nearest)}")  # fmt: skip
    if model.num_frames == 1:
        raise UsageError(f"--task {options.task}: {model.title} makes pictures, and this step cuts clips",
                         cure="give the --task of a model that makes videos")  # fmt: skip
    frames = options.frames if options.frames is not None else model.num_frames
    stride = model.temporal_stride
    if frames == 1:
        raise UsageError("--frames 1 is a picture, and this step cuts clips", cure=f"--frames {1 + stride} or more")
    if frames < 1 or (frames - 1) % stride:
        below = max(1, (frames - 1) // stride) * stride + 1
        raise UsageError(f"--frames {frames}: {model.title} takes {stride}n+1 frames",
                         cure=f"--frames {below} or {below + stride}")  # fmt: skip
    fps = options.fps if options.fps is not None else model.fps
    return Form(width, height, fps, frames, options.stride or frames, options.format, options.crf)


def _check_numbers(options: Preprocess) -> None:
    """Refuse numbers out of their range.

    Raises:
        UsageError: one of them is.
    """
    inf = float("inf")
    ranges: dict[str, tuple[float, float]] = {
        "fps": (1, MAX_FPS), "stride": (1, inf), "num_workers": (1, 256), "crf": (0, _MAX_CRF), "val_share": (0, 0.9),
        "cut_threshold": (0.1, 100), "max_freeze": (0, inf), "max_black": (0, 1), "max_blur": (0, inf),
        "min_motion": (0, 100), "min_difference": (0, 255),
    }  # fmt: skip
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            allowed = f"from {least:g} to {most:g}" if most < inf else f"at least {least:g}"
            raise UsageError(f"--{name} is {value:g}", cure=f"give a number {allowed}")
