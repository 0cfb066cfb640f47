"""The encoder half of a Wan VAE file: its layers by name, and its tensors in the forms that are computed with.

A tensor is read when a path first needs it: pictures need a third of the convolutions' weights, clips need all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from wangen.generator.errors import WangenError, unreadable
from wangen.generator.kinds import expect
from wangen.runtime.weights.filling import Checkpoint, compare, open_checkpoint
from wangen.runtime.weights.quantized import read_weight
from wangen.runtime.weights.vae_names import VAES, vae_config, vae_names

Shapes = dict[str, tuple[int, ...]]
Convolution = tuple[torch.Tensor, torch.Tensor]
"""Weight and bias."""

Form = Literal["", "frame", "clip", "first", "sum", "difference", "total"]

MIDDLE = ("mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1")


@dataclass(frozen=True)
class Stage:
    """What the encoder does at one resolution.

    Attributes:
        blocks: residual blocks, by the names of diffusers without `encoder.`.
        channels: that enter, and that leave.
        sampler: what halves the sides at the end; none in the last stage.
        halves_time: the sampler halves the number of frames too.
    """

    blocks: tuple[str, ...]
    channels: tuple[int, int]
    sampler: str | None
    halves_time: bool


@dataclass(frozen=True)
class Layout:
    """The layers of an encoder and its sizes.

    Attributes:
        config: of diffusers' `AutoencoderKLWan`.
        stages: from the picture's resolution to that of the latents.
    """

    config: Mapping[str, Any]
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Layout":
        """The layers that `AutoencoderKLWan` would have: those of 2.1 stand in one row, those of 2.2 in blocks."""
        widths = [config["base_dim"] * factor for factor in (1, *config["dim_mult"])]
        halves_time, num_blocks = [*config["temperal_downsample"], False], config["num_res_blocks"]
        stages = []
        for number, channels in enumerate(pairwise(widths)):
            first = number * (num_blocks + 1)
            prefix = f"down_blocks.{number}.resnets." if config["is_residual"] else "down_blocks."
            blocks = range(num_blocks) if config["is_residual"] else range(first, first + num_blocks)
            sampler = f"down_blocks.{number}.downsampler" if config["is_residual"] else f"{prefix}{blocks.stop}"
            last = number == len(config["dim_mult"]) - 1
            names = tuple(f"{prefix}{block}" for block in blocks)
            stages.append(Stage(names, channels, None if last else sampler, halves_time[number]))
        return cls(config, tuple(stages))

    @property
    def patch(self) -> int:
        """Side of the squares of pixels that become channels before the first convolution."""
        return self.config["patch_size"] or 1

    def shapes(self) -> Shapes:
        """The tensors that an encoder has, by the names of diffusers."""
        z_dim, width = self.config["z_dim"], self.stages[-1].channels[1]
        shapes = _conv("encoder.conv_in", self.config["in_channels"], self.stages[0].channels[0])
        for stage in self.stages:
            entering, leaving = stage.channels
            for block in stage.blocks:
                shapes |= _residual(f"encoder.{block}", entering, leaving)
                entering = leaving
            if stage.sampler:
                shapes |= _conv(f"encoder.{stage.sampler}.resample.1", leaving, leaving, (3, 3))
            if stage.halves_time:
                shapes |= _conv(f"encoder.{stage.sampler}.time_conv", leaving, leaving, (3, 1, 1))
        first, attention, second = (f"encoder.{name}" for name in MIDDLE)
        shapes |= _residual(first, width, width) | _residual(second, width, width)
        shapes |= {f"{attention}.norm.gamma": (width, 1, 1), "encoder.norm_out.gamma": (width, 1, 1, 1)}
        shapes |= _conv(f"{attention}.to_qkv", width, 3 * width, (1, 1))
        shapes |= _conv(f"{attention}.proj", width, width, (1, 1)) | _conv("encoder.conv_out", width, 2 * z_dim)
        return shapes | _conv("quant_conv", 2 * z_dim, 2 * z_dim, (1, 1, 1))


def _conv(name: str, entering: int, leaving: int, kernel: tuple[int, ...] = (3, 3, 3)) -> Shapes:
    return {f"{name}.weight": (leaving, entering, *kernel), f"{name}.bias": (leaving,)}


def _residual(name: str, entering: int, leaving: int) -> Shapes:
    shapes: Shapes = {f"{name}.norm1.gamma": (entering, 1, 1, 1), f"{name}.norm2.gamma": (leaving, 1, 1, 1)}
    shapes |= _conv(f"{name}.conv1", entering, leaving) | _conv(f"{name}.conv2", leaving, leaving)
    return shapes | (_conv(f"{name}.conv_shortcut", entering, leaving, (1, 1, 1)) if entering != leaving else {})


class EncoderWeights:
    """The tensors of an encoder on a device in a dtype, each read from its file when it is first asked for.

    Attributes:
        layout: the layers.
        dtype: of the tensors.
        device: where they are.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device | str) -> None:
        """Judge a file by its header; no tensor is read.

        Raises:
            WangenError: another kind of file, missing, surplus or misshapen tensors of the encoder.
        """
        checkpoint = open_checkpoint(path, expect(path, VAES, "--vae"), vae_names)
        self.layout = Layout.of(vae_config(checkpoint.shapes, where=str(path)))
        names = {new: old for new, old in checkpoint.names.items() if new.startswith(("encoder.", "quant_conv."))}
        self._checkpoint: Checkpoint = replace(checkpoint, names=names)
        compare(self._checkpoint, self.layout.shapes())
        self.dtype, self.device = dtype, torch.device(device)
        self._files = {file: _version(file) for file, _ in map(self._checkpoint.position, names.items())}
        self._ready: dict[tuple[str, str], torch.Tensor] = {}

    def has(self, layer: str) -> bool:
        """Whether there is a layer of this name (without `encoder.`)."""
        return f"encoder.{layer}.weight" in self._checkpoint.names

    def frame(self, layer: str) -> Convolution:
        """A convolution as it acts on a frame with nothing before it: its last tap in time, (out, in, 3, 3)."""
        return self._tensor(layer, "weight", "frame"), self._tensor(layer, "bias")

    def clip(self, layer: str) -> Convolution:
        """A convolution over time, (out, in, 3, 3, 3), or (out, in, 3, 1, 1)."""
        return self._tensor(layer, "weight", "clip"), self._tensor(layer, "bias")

    def pairs(self, layer: str) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """A convolution over time as four over space, (out, in, 3, 3) each, for `convolve_pairs`; and its bias."""
        numbers: tuple[Form, ...] = ("first", "sum", "difference")
        weights = tuple(self._tensor(layer, "weight", number) for number in numbers)
        return (*weights, self._tensor(layer, "weight", "frame")), self._tensor(layer, "bias")

    def total(self, layer: str) -> Convolution:
        """A convolution over time as it acts on frames that are all alike: the sum of its taps, which is not kept."""
        return self._formed(self._read(f"encoder.{layer}.weight"), "weight", "total"), self._tensor(layer, "bias")

    def num_outputs(self, layer: str) -> int:
        """The channels that leave a convolution."""
        return self._checkpoint.size(f"encoder.{layer}.bias", 0)

    def gamma(self, layer: str) -> torch.Tensor:
        """A norm's factors by channel, (channels,), times the square root of their number."""
        return self._tensor(layer, "gamma")

    def means(self) -> Convolution:
        """The half of the last 1x1 convolution that makes the means: (z_dim, 2 * z_dim, 1, 1)."""
        weight, bias = self.frame("quant_conv")
        z_dim = self.layout.config["z_dim"]
        return weight[:z_dim], bias[:z_dim]

    def _tensor(self, layer: str, end: str, form: Form = "") -> torch.Tensor:
        name = f"{layer}.{end}" if layer == "quant_conv" else f"encoder.{layer}.{end}"
        if (name, form) not in self._ready:
            self._ready[name, form] = self._formed(self._read(name), end, form)
        return self._ready[name, form]

    def _formed(self, tensor: torch.Tensor, end: str, form: Form) -> torch.Tensor:
        if end == "gamma":
            tensor = tensor.flatten() * math.sqrt(tensor.numel())
        if end != "weight":
            return tensor.to(self.device, self.dtype)
        if form == "clip":
            return tensor.to(self.device, self.dtype).contiguous(memory_format=torch.channels_last_3d)
        if tensor.ndim == 5:
            tensor = _flattened(tensor, form)
        return tensor.to(self.device, self.dtype).contiguous(memory_format=torch.channels_last)

    def _read(self, name: str) -> torch.Tensor:
        """A tensor in float32 on the CPU.

        Raises:
            WangenError: the file is another one than when it was opened, or cannot be read.
        """
        old = self._checkpoint.names[name]
        file, _ = self._checkpoint.position((name, old))
        if _version(file) != self._files[file]:
            raise WangenError("this file changed while it was in use", where=str(file), cure="run the step again")
        scale = self._checkpoint.contents.companions.get(old, {}).get("scale")
        return read_weight(self._checkpoint.contents.weights[old], scale, torch.float32)


def _flattened(weight: torch.Tensor, form: Form) -> torch.Tensor:
    """A kernel over time (out, in, taps, height, width) -> one over space, computed in float32."""
    if form == "frame":
        return weight[:, :, -1]
    if form == "first":
        return weight[:, :, 0]
    total = weight.sum(2)
    if form == "total":
        return total
    return total / 2 if form == "sum" else total / 2 - weight[:, :, 1]


def _version(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError as error:
        raise unreadable(file, error) from error
    return status.st_size, status.st_mtime_ns
