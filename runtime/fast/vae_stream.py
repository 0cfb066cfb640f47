"""What crosses frames in Wan's VAE encoder: clips in chunks, and what becomes of endless grey.

A causal convolution sees a frame and the two before it. A clip is streamed as in the official code: its first frame
alone, then chunks. The first frame has nothing but zeros before it, so a third of each kernel, the last tap, is all
that counts: a convolution in two dimensions. Later chunks are written straight behind the two frames that a
convolution remembers, normalised on the way: nothing is concatenated, padded or cloned.

A condition is an image followed by grey. Grey alone ends, layer by layer, in one steady frame, and how far an image
reaches is known: two frames more per convolution. So only the frames that still feel the image are explicit, and the
steady frame stands for all behind them. Tensors hold the explicit frames of a chunk only: k of `length`, even none.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from wangen.runtime.fast.vae_layers import each_frame, normalise
from wangen.runtime.fast.vae_weights import EncoderWeights

CHANNELS_LAST = torch.channels_last_3d


class Stream:
    """The timeline of one batch of clips, chunk by chunk.

    Attributes:
        length: how many frames the chunk has where it is now; whoever feeds it sets it, halving halves it.
        first: the chunk is the first frame.
        last: no chunk follows, so that nothing needs to be remembered.
    """

    def __init__(
        self, weights: EncoderWeights, *, cache_cpu: bool = False, steady: "dict[str, torch.Tensor] | None" = None
    ) -> None:
        """Begin.

        Args:
            weights: of the encoder.
            cache_cpu: what is remembered rests in host memory.
            steady: the steady frame of every layer, where chunks may have fewer explicit frames than their length.
        """
        self.length, self.first, self.last = 1, True, False
        self._weights, self._steady = weights, steady or {}
        self._parking = torch.device("cpu") if cache_cpu else weights.device
        # A CPU's time goes into multiplications; half precision would lose by the subtractions.
        self._in_pairs = weights.device.type == "cpu" and weights.dtype == torch.float32
        self._remembered: dict[str, torch.Tensor] = {}
        self._num_settled: dict[str, int] = {}

    def convolve(self, name: str, norm: str | None, x: torch.Tensor) -> torch.Tensor:
        """A causal 3x3x3 convolution of x, or with a norm's name of SiLU(norm(x))."""
        if self.first:
            weight, bias = self._weights.frame(name)
            inputs = self._write(x, norm, torch.empty_like(x)) if norm else x
            self._remember(name, inputs)
            del x
            return functional.conv2d(inputs.squeeze(2), weight, bias, padding=1).unsqueeze(2)
        wanted = min(self.length, x.shape[2] + 2 - self._num_settled.get(name, 0))
        if not wanted:
            return x.new_empty(x.shape[0], self._weights.num_outputs(name), 0, *x.shape[3:])
        inputs = self._behind(name, norm, x, length=self.length, past=2, wanted=wanted)
        del x  # the caller holds it no longer either: its memory is free for the result
        if self._in_pairs:
            return convolve_pairs(inputs, *self._weights.pairs(name))
        weight, bias = self._weights.clip(name)
        return functional.conv3d(inputs, weight, bias, padding=(0, 1, 1))

    def halve(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The convolution that makes one frame of two; the first frame of a clip passes as it is."""
        if self.first:
            self._remember(name, x)
            return x
        length, self.length = self.length, self.length // 2
        if self._num_settled.get(name):
            return x
        weight, bias = self._weights.clip(name)
        wanted = min(self.length, x.shape[2] // 2 + 1)
        inputs = self._behind(name, None, x, length=length, past=1, wanted=2 * wanted)
        del x
        return functional.conv3d(inputs, weight, bias, stride=(2, 1, 1))

    def add(self, name: str, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """The sum at the end of a residual block, in the place of x, which may have more explicit frames."""
        num_frames = shortcut.shape[2]
        x[:, :, :num_frames].add_(shortcut)
        if x.shape[2] > num_frames:
            x[:, :, num_frames:].add_(self._steady[name].to(x.device))
        return x

    def _behind(
        self, name: str, norm: str | None, x: torch.Tensor, *, length: int, past: int, wanted: int
    ) -> torch.Tensor:
        """A convolution's input (B, C, past + wanted, H, W): remembered frames, the explicit ones, steady ones."""
        batch, channels, explicit, height, width = x.shape
        shape = (batch, channels, past + wanted, height, width)
        inputs = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=CHANNELS_LAST)
        remembered = self._remembered.pop(name)
        start = past - remembered.shape[2]  # only the first frame lies behind: before it there are zeros
        inputs[:, :, :start].zero_()
        inputs[:, :, start:past].copy_(remembered)
        self._write(x, norm, inputs[:, :, past : past + explicit])
        if wanted > explicit:
            inputs[:, :, past + explicit :].copy_(self._steady[name])
        settled = min(past, self._num_settled.get(name, 0) + length - explicit)
        self._num_settled[name] = settled
        if settled < past:
            self._remember(name, inputs[:, :, -past:].clone())
        return inputs

    def _write(self, x: torch.Tensor, norm: str | None, out: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return out.copy_(x)
        return functional.silu(normalise(x, self._weights.gamma(norm), out), inplace=True)

    def _remember(self, name: str, frames: torch.Tensor) -> None:
        if not self.last:
            self._remembered[name] = frames.to(self._parking)


class Settling:
    """The timeline of one frame of endless grey, which notes what the convolutions and sums meet on the way.

    Every frame looks like its neighbours, so that a convolution over time is one with the sum of its taps.

    Attributes:
        noted: the inputs of the convolutions over time, and what residual blocks add, (1, C, 1, H, W) by layer.
    """

    def __init__(self, weights: EncoderWeights, *, cache_cpu: bool) -> None:
        self.noted: dict[str, torch.Tensor] = {}
        self._weights = weights
        self._parking = torch.device("cpu") if cache_cpu else weights.device

    def convolve(self, name: str, norm: str | None, x: torch.Tensor) -> torch.Tensor:
        """A causal 3x3x3 convolution of x, or with a norm's name of SiLU(norm(x))."""
        if norm is not None:
            x = functional.silu(normalise(x, self._weights.gamma(norm), torch.empty_like(x)), inplace=True)
        return self._convolve(name, x, padding=1)

    def halve(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The convolution that makes one frame of two."""
        return self._convolve(name, x, padding=0)

    def add(self, name: str, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """The sum at the end of a residual block, in the place of x."""
        self.noted[name] = shortcut.to(self._parking)
        return x.add_(shortcut)

    def _convolve(self, name: str, x: torch.Tensor, padding: int) -> torch.Tensor:
        self.noted[name] = x.to(self._parking)
        weight, bias = self._weights.total(name)
        return functional.conv2d(x.squeeze(2), weight, bias, padding=padding).unsqueeze(2)


def convolve_pairs(inputs: torch.Tensor, weights: Sequence[torch.Tensor], bias: torch.Tensor) -> torch.Tensor:
    """A 3x3x3 convolution, padded with zeros in space alone, with four 2-D ones for each two frames instead of six.

    That is Winograd's F(2, 3) along time: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015.

    Args:
        inputs: (B, C, T + 2, H, W).
        weights: four of (C', C, 3, 3), from `EncoderWeights.pairs`.
        bias: (C',).

    Returns:
        (B, C', T, H, W), which differs from the plain sum by rounding.
    """
    num_frames = inputs.shape[2] - 2
    if num_frames % 2:
        inputs = torch.cat([inputs, inputs[:, :, -1:]], dim=2)  # makes a frame that is not returned
    first, second, third, fourth = (inputs[:, :, start : inputs.shape[2] - 3 + start : 2] for start in range(4))

    def convolve(frames: torch.Tensor, number: int, bias: torch.Tensor | None = None) -> torch.Tensor:
        return each_frame(frames, lambda x: functional.conv2d(x, weights[number], bias, padding=1))

    total, difference = convolve(second + third, 1, bias), convolve(third - second, 2)
    shape = (*total.shape[:2], inputs.shape[2] - 2, *total.shape[3:])
    outputs = torch.empty(shape, dtype=total.dtype, device=total.device, memory_format=CHANNELS_LAST)
    torch.add(total, difference, out=outputs[:, :, ::2])
    torch.sub(total, difference, out=outputs[:, :, 1::2])
    del total, difference
    outputs[:, :, ::2].add_(convolve(first - third, 0))
    outputs[:, :, 1::2].sub_(convolve(second - fourth, 3))
    return outputs[:, :, :num_frames]
