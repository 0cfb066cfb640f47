"""The layers of Wan's VAE encoder, whatever is done about time: pictures, clips and conditions walk the same way.

Tensors are (B, C, k, H, W) with the channels innermost in memory (`channels_last_3d`). What a layer does to one frame
stands here; what crosses frames belongs to a `Timeline`. The pieces follow the official `wan/modules/vae.py` (2.1)
and `vae2_2.py` (2.2).
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from wangen.runtime.fast.vae_weights import MIDDLE, EncoderWeights, Stage


class Timeline(Protocol):
    """How frames depend on those before them. Names are those of layers."""

    def convolve(self, name: str, norm: str | None, x: torch.Tensor) -> torch.Tensor:
        """A causal 3x3x3 convolution of x, or with a norm's name of SiLU(norm(x))."""

    def halve(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The convolution that makes one frame of two."""

    def add(self, name: str, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """The sum at the end of a residual block, in the place of x."""


class Layers:
    """An encoder in two parts: the front works at the full frame rate, the rest below it."""

    def __init__(self, weights: EncoderWeights) -> None:
        self.weights = weights
        stages = weights.layout.stages
        num_front = 1 + next(number for number, stage in enumerate(stages) if stage.halves_time)
        self._front, self._rest = stages[:num_front], stages[num_front:]

    def front(self, time: Timeline, x: torch.Tensor) -> torch.Tensor:
        """(B, 3 patch², k, H, W) -> what enters the first stage of half the frame rate."""
        x = time.convolve("conv_in", None, x)
        for stage in self._front:
            x = self._stage(time, stage, x)
        return x

    def rest(self, time: Timeline, x: torch.Tensor) -> torch.Tensor:
        """What `front` returns -> means (B, z_dim, k, h, w), before they are normalised."""
        for stage in self._rest:
            x = self._stage(time, stage, x)
        first, attention, second = MIDDLE
        x = self._residual(time, first, x)
        x = each_frame(x, lambda frames: self._attend(attention, frames))
        x = self._residual(time, second, x)
        x = time.convolve("conv_out", "norm_out", x)
        return each_frame(x, lambda frames: functional.conv2d(frames, *self.weights.means()))

    def _stage(self, time: Timeline, stage: Stage, x: torch.Tensor) -> torch.Tensor:
        averaged = x if self.weights.layout.config["is_residual"] else None
        for block in stage.blocks:
            x = self._residual(time, block, x)
        if stage.sampler:
            x = self._halve_sides(f"{stage.sampler}.resample.1", x)
        if stage.halves_time:
            x = time.halve(f"{stage.sampler}.time_conv", x)
        if averaged is None:
            return x
        # Not in place: a timeline may remember x.
        return x + average_down(averaged, x.shape[1], 2 if stage.halves_time else 1, 2 if stage.sampler else 1)

    def _residual(self, time: Timeline, block: str, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        if self.weights.has(f"{block}.conv_shortcut"):
            weight, bias = self.weights.frame(f"{block}.conv_shortcut")
            shortcut = each_frame(x, lambda frames: functional.conv2d(frames, weight, bias))
        # Nested, so that nobody but the second convolution holds what the first returns: it is freed early.
        x = time.convolve(f"{block}.conv2", f"{block}.norm2", time.convolve(f"{block}.conv1", f"{block}.norm1", x))
        return time.add(block, x, shortcut)

    def _halve_sides(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Halve H and W; as in the official code zeros stand to the right and below, nowhere else."""
        weight, bias = self.weights.frame(name)
        batch, channels, num_frames, height, width = x.shape
        shape = (batch, channels, num_frames, height + 1, width + 1)
        padded = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)
        padded[:, :, :, :height, :width].copy_(x)  # `pad` would turn the channels outward
        padded[:, :, :, height].zero_()
        padded[:, :, :, :, width].zero_()
        return each_frame(padded, lambda frames: functional.conv2d(frames, weight, bias, stride=2))

    def _attend(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Attention of one head within each frame (N, C, H, W)."""
        if not len(x):
            return x
        inputs = normalise(x, self.weights.gamma(f"{name}.norm"), torch.empty_like(x))
        qkv = functional.conv2d(inputs, *self.weights.frame(f"{name}.to_qkv"))
        query, key, value = qkv.flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)  # (N, 1, H * W, C)
        seen = functional.scaled_dot_product_attention(query, key, value)
        seen = torch.unflatten(seen.squeeze(1).transpose(1, 2), 2, x.shape[2:])
        return x + functional.conv2d(seen, *self.weights.frame(f"{name}.proj"))


def each_frame(x: torch.Tensor, operation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply to all frames at once, as (B * k, C, H, W), what does not look beyond a frame."""
    frames = operation(x.transpose(1, 2).flatten(0, 1))
    return torch.unflatten(frames, 0, (x.shape[0], x.shape[2])).transpose(1, 2)


def normalise(x: torch.Tensor, gamma: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write to `out` x divided by its length over the channels (axis 1), times gamma (C,) that holds sqrt(C).

    The length is computed in float32 at least. That is `normalize` with its eps of 1e-12, not a root mean square with
    an eps inside the root.
    """
    precise = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=precise).clamp_min_(1e-12)
    factor = length.reciprocal_()
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        factor = factor.to(x.dtype)  # a CPU multiplies two dtypes seven times slower; float16 could not hold it
    torch.mul(x, factor, out=out)
    return out.mul_(gamma.view(-1, *[1] * (x.ndim - 2)))


def average_down(x: torch.Tensor, channels: int, frames: int, side: int) -> torch.Tensor:
    """The shortcut of 2.2 around a stage (`AvgDown3D`): blocks of `frames` x `side` x `side` become channels, and
    neighbouring channels are averaged until there are `channels`.

    An odd number of frames gets a black one in front: it halves the shortcut of a single frame, and belongs there.

    >>> average_down(torch.ones(1, 2, 1, 4, 4), 4, 2, 2).flatten(1).unique(dim=1).tolist()
    [[0.0, 1.0]]
    """
    if x.shape[2] % frames:
        x = functional.pad(x, (0, 0, 0, 0, 1, 0))
    batch, entering, num_frames, height, width = x.shape
    x = x.reshape(batch, entering, num_frames // frames, frames, height // side, side, width // side, side)
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(batch, channels, -1, num_frames // frames, height // side, width // side).mean(2)
