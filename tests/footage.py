"""Videos whose frames tell their number, and a decoder that is not ours: the ffmpeg of imageio-ffmpeg."""

import json
import subprocess
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import imageio_ffmpeg
import numpy as np

from wangen.generator.prepare_steps import Preprocess
from wangen.generator.session import Report
from wangen.runtime.preprocess import run

SIZE = (64, 48)
NUM_BITS = 8
EXAMPLE = Path(__file__).parent.parent / "examples" / "dataset"
BUNNY = EXAMPLE / "big-buck-bunny.mp4"


def counter(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """(H, W, 3) uint8: the number in binary as bars from left to right, the lowest bit first."""
    width, height = size
    bits = [number >> bit & 1 for bit in range(NUM_BITS)]
    row = np.repeat(np.array(bits, np.uint8) * 200 + 25, width // NUM_BITS)
    return np.broadcast_to(row[None, :, None], (height, width, 3)).copy()


def numbers(frames: np.ndarray) -> list[int]:
    """(T, H, W, 3) of `counter` -> the numbers; each bar must be clear."""
    bars = frames.reshape(len(frames), frames.shape[1], NUM_BITS, -1, 3)[:, 8:-8, :, 2:-2].mean(axis=(1, 3, 4))
    assert (np.abs(bars - 125) > 60).all()
    return [int(sum(int(bar > 125) << bit for bit, bar in enumerate(frame))) for frame in bars]


def write_video(
    path: Path, frames: Sequence[np.ndarray], rate: Fraction | int = 25, *, times_ms: Sequence[float] | None = None,
    codec: str = "libx264", format: str = "mp4", crf: int = 12, aspect: Fraction | None = None, bframes: int = 0,
) -> Path:  # fmt: skip
    """A video of frames (H, W, 3) uint8, at a rate or at these times; x264 sets few keyframes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format=format) as container:
        stream = container.add_stream(codec, rate=Fraction(rate))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.sample_aspect_ratio = aspect or Fraction(1)
        if codec == "libx264":
            stream.options = {"crf": str(crf), "preset": "ultrafast", "threads": "1", "g": "60", "bf": str(bframes)}
        else:
            stream.bit_rate = 4_000_000
        if times_ms:
            stream.codec_context.time_base = Fraction(1, 90000)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times_ms:
                frame.pts, frame.time_base = round(times_ms[number] * 90), Fraction(1, 90000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def waves(count: int, size: tuple[int, int] = SIZE, *, seed: int = 0, step: int = 1) -> list[np.ndarray]:
    """`count` frames of a sharp coloured pattern that moves `step` pixels from frame to frame; 0 stands still."""
    rng = np.random.default_rng(seed)
    cells = rng.integers(40, 215, (size[1] // 8, size[0] // 8, 3)).astype(np.uint8)
    picture = cells.repeat(8, axis=0).repeat(8, axis=1)
    return [np.roll(picture, number * step, axis=1) for number in range(count)]


def decoded(path: Path, size: tuple[int, int] = SIZE) -> np.ndarray:
    """Every frame of a file as ffmpeg decodes it, none added and none left out: (T, H, W, 3) uint8."""
    words = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(path), "-fps_mode", "passthrough",
             "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]  # fmt: skip
    pixels = subprocess.run(words, capture_output=True, check=True).stdout
    return np.frombuffer(pixels, np.uint8).reshape(-1, size[1], size[0], 3)


def rows(path: Path) -> list[dict]:
    """The lines of a manifest."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def clips(output: Path) -> list[dict]:
    """The lines of both manifests."""
    return rows(output / "train.jsonl") + rows(output / "val.jsonl")


def prepare(videos: Path, output: Path, **flags: object) -> Report:
    """Run the step on small clips; what is not said has the table's default."""
    small = {"resolution": "64x48", "frames": 9, "num_workers": 2, "default_prompt": "a thing"}
    return run(Preprocess(videos=videos, output=output, **(small | flags)))


def moving(folder: Path, *names: str) -> Path:
    """Short videos of different things."""
    for seed, name in enumerate(names):
        write_video(folder / name, waves(32, seed=seed), 16)
    return folder


def reasons(output: Path) -> dict[str, list[str]]:
    """Video -> the kinds of reasons for which parts of it were left out."""
    found: dict[str, list[str]] = {}
    for row in rows(output / "dropped.jsonl"):
        found.setdefault(row["source"], []).extend(reason.partition(":")[0] for reason in row["reasons"])
    return found
