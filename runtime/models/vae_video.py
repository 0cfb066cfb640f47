"""What every encoder of videos needs, whichever code computes it: checks, floats from bytes, tiles and their blending.

This module imports torch and nothing heavier. Letters in shapes: B batch, T frames, H and W pixels.
"""

from collections.abc import Iterator, Sequence

import torch

from wangen.generator.errors import WangenError
from wangen.generator.toml_values import is_clip_length


def check_video(video: torch.Tensor, stride_px: int) -> None:
    """Refuse what a Wan VAE would cut without a word, or cannot read.

    Args:
        video: should be (B, 3, T, H, W), floating point or uint8, where T = 4k + 1.
        stride_px: H and W are multiples of it.

    Raises:
        WangenError: it is not.
    """
    if video.ndim != 5 or video.shape[1] != 3 or not len(video):
        raise WangenError(f"a video of shape {tuple(video.shape)}, where (batch, 3, frames, height, width) belongs")
    check_num_frames(video.shape[2])
    height_px, width_px = video.shape[3:]
    if not height_px or height_px % stride_px or not width_px or width_px % stride_px:
        raise WangenError(f"a video of {width_px}x{height_px} pixels; both sides must be multiples of {stride_px}")
    if not video.is_floating_point() and video.dtype != torch.uint8:
        raise WangenError(f"a video in {video.dtype}, where floating point in [-1, 1] or uint8 belongs")


def check_num_frames(num_frames: int) -> None:
    """Refuse a number of frames that is not 4k + 1: the VAE would drop the rest.

    Raises:
        WangenError: it is another number.
    """
    if not is_clip_length(num_frames):
        raise WangenError(f"a video of {num_frames} frames; the Wan VAE takes 4k + 1 (1, 5, 9, …, 81)")


def check_image(images: torch.Tensor, num_frames: int) -> None:
    """Refuse what a condition cannot be made of: images (B, 3, 1, H, W) followed by grey, `num_frames` in all.

    Raises:
        WangenError: more than one frame is given, or the length is not 4k + 1.
    """
    if images.ndim != 5 or images.shape[2] != 1:
        raise WangenError(f"images of shape {tuple(images.shape)}, where (batch, 3, 1, height, width) belongs")
    check_num_frames(num_frames)


def to_floats(chunk: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A part of a video on a device in a dtype, bytes as [-1, 1]; they travel as bytes.

    >>> to_floats(torch.tensor([0, 255], dtype=torch.uint8), torch.device("cpu"), torch.float32).tolist()
    [-1.0, 1.0]
    """
    chunk = chunk.to(device)
    if not chunk.is_floating_point():
        chunk = chunk.to(torch.float32) / 127.5 - 1
    return chunk.to(dtype)


def latent_statistics(mean: Sequence[float], std: Sequence[float], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Mean and standard deviation of the latents by channel, each (1, channels, 1, 1, 1) in float32."""
    return tuple(torch.tensor(values, device=device).reshape(1, -1, 1, 1, 1) for values in (mean, std))


def tiles(height: int, width: int, tile: int) -> Iterator[tuple[tuple[slice, slice], torch.Tensor]]:
    """The tiles of a picture, each with how much its values count there (rows, columns); 0 is one tile for all.

    >>> total = torch.zeros(40, 30)
    >>> for area, weight in tiles(40, 30, 16):
    ...     total[area] += weight
    >>> torch.allclose(total, torch.ones(40, 30))
    True
    """
    for rows, row_weights in _spans(height, tile or height):
        for columns, column_weights in _spans(width, tile or width):
            yield (rows, columns), row_weights[:, None] * column_weights


def _spans(size: int, tile: int) -> list[tuple[slice, torch.Tensor]]:
    """An axis cut into overlapping spans of one length, each with its weights (length,).

    Within the first quarter of a span the weight goes linearly from the spans before over to it, as in diffusers. The
    last span is moved back to end with the axis: the thin one that would be left over has next to no context.

    >>> [(span.start, span.stop) for span, _ in _spans(30, 16)], _spans(28, 16)[1][1].tolist()[:6]
    ([(0, 16), (12, 28), (14, 30)], [0.0, 0.25, 0.5, 0.75, 1.0, 1.0])
    """
    if size <= tile:
        return [(slice(0, size), torch.ones(size))]
    overlap = tile // 4
    starts = [*range(0, size - tile, tile - overlap), size - tile]
    weights = torch.zeros(len(starts), size)
    weights[0, :tile] = 1.0
    for number, start in enumerate(starts[1:], 1):
        ramp = ((torch.arange(size) - start) / overlap).clamp(0.0, 1.0)
        weights[:number] *= 1 - ramp
        weights[number, start : start + tile] = ramp[start : start + tile]
    return [(slice(start, start + tile), row[start : start + tile]) for start, row in zip(starts, weights, strict=True)]
