"""What several tests share: file trees as a dict, and real images and clips made on the spot."""

import hashlib
import io
import math
import os
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image


def write_tree(folder: Path, tree: Mapping[str, bytes | str]) -> Path:
    """Write files given as `{"sub/name": content}`, text as UTF-8; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return folder


def read_tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder: relative name with forward slashes -> bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def nearest_colour(colour: Sequence[float], names: Mapping[str, tuple[int, int, int]]) -> str:
    """The name of the colour that is nearest in sRGB."""
    return min(names, key=lambda name: math.dist(names[name], colour))


def digest(path: Path) -> str:
    """The SHA-256 of a file, by which bytes are compared."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_script(bundle: Path, name: str) -> str:
    """Run a bundle's .sh script with this interpreter, on the CPU, to its end; what it has logged."""
    environment = os.environ | {"WANGEN_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", name], cwd=bundle, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def tool(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, script: str) -> None:
    """Put a program of that name before all others."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (tools / name).chmod(0o755)
    if not os.environ["PATH"].startswith(f"{tools}:"):
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")


def require_rights(folder: Path) -> None:
    """Skip the test where a folder's rights bind nobody: for the superuser, and on Windows."""
    closed = folder / "closed"
    closed.mkdir(mode=0o500)
    binding = not os.access(closed, os.W_OK)
    closed.rmdir()
    if not binding:
        pytest.skip("rights of folders do not bind this user")


def every(step: int, values: Iterable[object], *marks: pytest.MarkDecorator) -> list[object]:
    """Parameters of a test: each `step`-th as it is, the others with these marks, so that they run where all do."""
    return [
        value if index % step == 0 else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for index, value in enumerate(values)
    ]


def image_bytes(
    size: tuple[int, int] = (64, 48), *, format: str = "JPEG", orientation: int = 1, seed: int = 0
) -> bytes:
    """A smooth coloured picture of (width, height) pixels, encoded; `orientation` is the EXIF tag."""
    image = Image.fromarray(_picture(size, seed))
    exif = Image.Exif()
    if orientation != 1:
        exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, format, **({"exif": exif} if orientation != 1 else {}))
    return buffer.getvalue()


def make_image(path: Path, size: tuple[int, int] = (64, 48), *, orientation: int = 1, seed: int = 0) -> Path:
    """Write a picture in the format that the file name says; the seed defaults to the name's."""
    format = Image.registered_extensions()[path.suffix.lower()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        image_bytes(size, format=format, orientation=orientation, seed=seed or zlib.crc32(path.name.encode()))
    )
    return path


def make_clip(
    path: Path, num_frames: int = 24, fps: int = 16, size: tuple[int, int] = (64, 48), *, seed: int = 0
) -> Path:
    """Write an H.264 clip in which the picture moves one pixel per frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = _picture(size, seed)
    # The format is named, so that any file name can hold a clip; mov is what ffmpeg writes mp4 with.
    with av.open(str(path), "w", format="matroska" if path.suffix.lower() == ".mkv" else "mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.options = {"preset": "ultrafast", "threads": "1"}
        for number in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(picture, number, axis=1), format="rgb24")))
        container.mux(stream.encode())
    return path


def clip_bytes(folder: Path, num_frames: int = 24, fps: int = 16, size: tuple[int, int] = (64, 48)) -> bytes:
    """The bytes of a clip, for a tree; the file itself passes through `folder` and is gone again."""
    path = make_clip(folder / "passing.mp4", num_frames, fps, size)
    content = path.read_bytes()
    path.unlink()
    return content


@cache
def _picture(size: tuple[int, int], seed: int) -> np.ndarray:
    """(H, W, 3) uint8, not to be written to: waves whose phases come from the seed."""
    width, height = size
    phases = np.random.default_rng(seed).uniform(0, 6.28, 3)
    x, y = np.meshgrid(np.arange(width) / width, np.arange(height) / height)
    waves = [np.sin(6.28 * (x * (1 + channel) + y * (3 - channel)) + phase) for channel, phase in enumerate(phases)]
    picture = ((np.stack(waves, axis=-1) + 1) * 127.5).astype(np.uint8)
    picture.setflags(write=False)
    return picture
