"""Wan's VAEs at work, 2.1 and 2.2: videos -> normalised latents and back, in bounded memory.

Time is streamed as in the official code: one frame, then four at a time, each chunk one latent frame; what the
convolutions must remember of the frames before stands in their feature cache. So the device holds one chunk, however
long the video is. Tiles bound the memory in space too, but unlike streaming they change the numbers a little.

Letters in shapes: B batch, C channels, T frames of video, H and W pixels, F frames of latents, h and w latents.
"""

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify, unpatchify

from wangen.generator.errors import WangenError
from wangen.runtime.models import require_tile


@torch.no_grad()
def encode_video(
    vae: AutoencoderKLWan, video: torch.Tensor, *, cache_cpu: bool = False, tile_px: int = 0
) -> torch.Tensor:
    """The normalised latents of a video, as the official wrapper computes them: (mode - mean) / std.

    Args:
        vae: a Wan 2.1 or 2.2 VAE.
        video: (B, 3, T, H, W), floating point in [-1, 1] or uint8, on any device: it goes to the VAE's chunk by
            chunk. T = 4k + 1, H and W multiples of 8 (2.2: of 16). An image is T = 1.
        cache_cpu: keep the feature cache in host memory: the same numbers in less device memory, but slower.
        tile_px: encode squares of this size, which overlap by a quarter and are blended linearly; a multiple of 64.
            0 takes the picture whole. The VAE's middle looks at all that it is given, so tiles are not exact.

    Returns:
        (B, 16, F, h, w) in float32 on the VAE's device, where F = (T + 3) / 4, h = H / 8, w = W / 8 (2.2: 48
        channels, and 16 for 8).

    Raises:
        WangenError: the shape is another (the VAE itself would drop trailing frames or pixels without a word), or
            `tile_px` is no size of tiles.
    """
    _check_video(vae, video)
    require_tile(tile_px)
    stride, patch, z_dim = vae.config.scale_factor_spatial, vae.config.patch_size or 1, vae.config.z_dim
    batch, _, num_frames, height_px, width_px = video.shape
    shape = (batch, z_dim, (num_frames + 3) // 4, height_px // stride, width_px // stride)
    mode = torch.zeros(shape, dtype=torch.float32, device=vae.device)
    for area, weight in _tiles(shape[3], shape[4], tile_px // stride):
        area_px = [slice(side.start * stride, side.stop * stride) for side in area]
        weight = weight.to(vae.device)
        cache = _feature_cache(vae.encoder, vae.device, cache_cpu)
        for index in range(shape[2]):
            chunk = _to_vae(vae, video[:, :, _frames(index), *area_px])
            hidden = vae.encoder(patchify(chunk, patch), feat_cache=cache, feat_idx=[0])
            moments = vae.quant_conv(hidden)  # (B, 2 * z_dim, 1, h, w): means, then log variances
            mode[:, :, index : index + 1, *area] += moments[:, :z_dim].float() * weight
    mean, std = _statistics(vae)
    return mode.sub_(mean).div_(std)


@torch.no_grad()
def decode_latents(
    vae: AutoencoderKLWan, latents: torch.Tensor, *, cache_cpu: bool = False, tile_px: int = 0
) -> torch.Tensor:
    """The video of normalised latents, the inverse of `encode_video`.

    Args:
        vae: a Wan 2.1 or 2.2 VAE.
        latents: (B, 16, F, h, w), normalised, on any device (2.2: 48 channels).
        cache_cpu: as for `encode_video`.
        tile_px: as for `encode_video`, in pixels of the video.

    Returns:
        (B, 3, 4F - 3, 8h, 8w) in float32 on the CPU, clamped to [-1, 1] (2.2: 16 for 8).

    Raises:
        WangenError: the shape is another, or `tile_px` is no size of tiles.
    """
    stride, patch, z_dim = vae.config.scale_factor_spatial, vae.config.patch_size or 1, vae.config.z_dim
    if latents.ndim != 5 or latents.shape[1] != z_dim or 0 in latents.shape:
        raise WangenError(
            f"latents of shape {tuple(latents.shape)}, where (batch, {z_dim}, frames, height, width) belongs"
        )
    require_tile(tile_px)
    batch, _, num_frames, height, width = latents.shape
    shape = (batch, vae.config.out_channels // patch**2, 4 * num_frames - 3, height * stride, width * stride)
    video = torch.zeros(shape, dtype=torch.float32)
    mean, std = _statistics(vae)
    for area_px, weight in _tiles(shape[3], shape[4], tile_px):
        area = [slice(side.start // stride, side.stop // stride) for side in area_px]
        weight = weight.to(vae.device)
        cache = _feature_cache(vae.decoder, vae.device, cache_cpu)
        for index in range(num_frames):
            chunk = latents[:, :, index : index + 1, *area].to(vae.device, torch.float32) * std + mean
            hidden = vae.post_quant_conv(chunk.to(vae.dtype))
            pixels = vae.decoder(hidden, feat_cache=cache, feat_idx=[0], first_chunk=index == 0)
            frames = unpatchify(pixels, patch).float() * weight
            video[:, :, _frames(index), *area_px] += frames.to(video.device)
    return video.clamp_(-1.0, 1.0)


def _check_video(vae: AutoencoderKLWan, video: torch.Tensor) -> None:
    channels = vae.config.in_channels // (vae.config.patch_size or 1) ** 2
    if video.ndim != 5 or video.shape[1] != channels or not len(video):
        raise WangenError(
            f"a video of shape {tuple(video.shape)}, where (batch, {channels}, frames, height, width) belongs"
        )
    num_frames, height_px, width_px = video.shape[2:]
    if num_frames % 4 != 1:
        raise WangenError(f"a video of {num_frames} frames; the Wan VAE takes 4k + 1 (1, 5, 9, …, 81)")
    stride = vae.config.scale_factor_spatial
    if not height_px or height_px % stride or not width_px or width_px % stride:
        raise WangenError(f"a video of {width_px}x{height_px} pixels; both sides must be multiples of {stride}")
    if not video.is_floating_point() and video.dtype != torch.uint8:
        raise WangenError(f"a video in {video.dtype}, where floating point in [-1, 1] or uint8 belongs")


def _frames(index: int) -> slice:
    """The frames of video that belong to one latent frame."""
    return slice(max(0, 4 * index - 3), 4 * index + 1)


def _to_vae(vae: AutoencoderKLWan, chunk: torch.Tensor) -> torch.Tensor:
    """A chunk of video on the VAE's device in its dtype; bytes travel as bytes."""
    chunk = chunk.to(vae.device)
    if not chunk.is_floating_point():
        chunk = chunk.to(torch.float32) / 127.5 - 1
    return chunk.to(vae.dtype).contiguous()


def _statistics(vae: AutoencoderKLWan) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the latents by channel, each (1, z_dim, 1, 1, 1)."""
    values = torch.tensor([vae.config.latents_mean, vae.config.latents_std], dtype=torch.float32, device=vae.device)
    mean, std = values.reshape(2, 1, -1, 1, 1, 1)
    return mean, std


class _HostCache(list[Any]):
    """A feature cache whose tensors rest in host memory; what is read from it is a copy on the device.

    Besides tensors diffusers puts None and a word in.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        super().__init__([None] * length)
        self.device = device

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value.to("cpu") if isinstance(value, torch.Tensor) else value)


def _feature_cache(half: torch.nn.Module, device: torch.device, cache_cpu: bool) -> list[Any]:
    """An empty feature cache for the encoder or the decoder: one entry for each causal convolution."""
    length = sum(isinstance(module, WanCausalConv3d) for module in half.modules())
    return _HostCache(length, device) if cache_cpu else [None] * length


def _tiles(height: int, width: int, tile: int) -> Iterator[tuple[tuple[slice, slice], torch.Tensor]]:
    """The tiles of a picture, each with how much its values count there (rows, columns).

    >>> total = torch.zeros(40, 30)
    >>> for area, weight in _tiles(40, 30, 16):
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
