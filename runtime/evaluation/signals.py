"""What can be told of generated clips without any model: collapse, flicker, motion, and how far two clips are apart.

All are computed on the decoded frames, (T, H, W, 3) uint8; brightness is Rec. 601 luma in [0, 255].
"""

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Frames = np.ndarray[Any, np.dtype[np.uint8]]
    Numbers = np.ndarray[Any, np.dtype[np.float32]]

LUMA = (0.299, 0.587, 0.114)
FROZEN = 0.5
"""A mean change of brightness below this, from one frame to the next, is none: h264 alone makes about 0.2."""
BLACK = 16.0
"""A frame whose 98th percentile of brightness is below this is black."""
PEAK = 255.0
MOST_DB = 99.0
"""Stands for the infinite ratio of equal clips, which JSON cannot hold."""
WINDOW, SIGMA = 11, 1.5
"""Of SSIM's Gaussian window, in pixels."""


@dataclass(frozen=True)
class Signals:
    """Of one clip.

    Attributes:
        frozen: share of the frames, in [0, 1], that are like the one before; 1 of a picture that stands still.
        black: share of the frames that are black, in [0, 1].
        blown: share of the pixels at either end of the range, in [0, 1].
        sharpness: variance of the Laplacian of brightness, mean over frames; the lower the blurrier.
        motion: mean change of brightness from frame to frame.
        flicker: mean change of a frame's mean brightness from frame to frame, less the trend over the clip.
    """

    frozen: float
    black: float
    blown: float
    sharpness: float
    motion: float
    flicker: float

    def as_record(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def signals(frames: "Frames") -> Signals:
    """The signals of a clip (T, H, W, 3) uint8; of a single frame those that need two are 0.

    >>> import numpy as np
    >>> signals(np.zeros((5, 16, 16, 3), np.uint8)).black
    1.0
    """
    import numpy as np

    luma = brightness(frames)
    changes = np.abs(np.diff(luma, axis=0)).mean(axis=(1, 2))
    means = luma.mean(axis=(1, 2))
    steps = np.diff(means)
    blown = np.logical_or(luma <= 1, luma >= PEAK - 1).mean()
    return Signals(
        frozen=float((changes < FROZEN).mean()) if len(changes) else 0.0,
        black=float((np.percentile(luma, 98, axis=(1, 2)) < BLACK).mean()),
        blown=float(blown),
        sharpness=float(np.mean([_laplacian(frame).var() for frame in luma])),
        motion=float(changes.mean()) if len(changes) else 0.0,
        flicker=float(np.abs(steps - steps.mean()).mean()) if len(steps) else 0.0,
    )


def brightness(frames: "Frames") -> "Numbers":
    """(T, H, W, 3) uint8 -> (T, H, W) in [0, 255]."""
    import numpy as np

    found: Numbers = frames.astype(np.float32) @ np.asarray(LUMA, np.float32)
    return found


def psnr(first: "Frames", second: "Frames") -> float:
    """Peak signal-to-noise ratio of two clips of one shape in decibel; infinite of equal ones."""
    import numpy as np

    error = np.square(first.astype(np.float32) - second.astype(np.float32)).mean()
    return math.inf if error == 0 else float(10 * math.log10(PEAK**2 / error))


def ssim(first: "Frames", second: "Frames") -> float:
    """Structural similarity of two clips' brightness, mean over frames, in [-1, 1].

    Wang, Bovik, Sheikh and Simoncelli 2004, https://doi.org/10.1109/TIP.2003.819861: a Gaussian window of 11 pixels
    with a deviation of 1.5, C1 = (0.01 L)^2, C2 = (0.03 L)^2, without the borders that the window does not cover.
    """
    one, other = brightness(first), brightness(second)
    small, contrast = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2
    mean_one, mean_other = _blurred(one), _blurred(other)
    variance_one = _blurred(one * one) - mean_one**2
    variance_other = _blurred(other * other) - mean_other**2
    covariance = _blurred(one * other) - mean_one * mean_other
    likeness = (2 * mean_one * mean_other + small) * (2 * covariance + contrast)
    scale = (mean_one**2 + mean_other**2 + small) * (variance_one + variance_other + contrast)
    return float((likeness / scale).mean())


def _blurred(frames: "Numbers") -> "Numbers":
    """(T, H, W) -> (T, H - 10, W - 10), each the window's mean."""
    import numpy as np

    places = np.arange(WINDOW, dtype=np.float32) - WINDOW // 2
    weights = np.exp(-(places**2) / (2 * SIGMA**2))
    weights /= weights.sum()
    for axis in (1, 2):
        windows = np.lib.stride_tricks.sliding_window_view(frames, WINDOW, axis=axis)
        frames = windows @ weights
    return frames


def _laplacian(frame: "Numbers") -> "Numbers":
    """(H, W) -> (H - 2, W - 2), the sum of the four neighbours less four times the pixel."""
    around = frame[:-2, 1:-1] + frame[2:, 1:-1] + frame[1:-1, :-2] + frame[1:-1, 2:]
    return around - 4 * frame[1:-1, 1:-1]
