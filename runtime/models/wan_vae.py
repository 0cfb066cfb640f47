"""Wan's VAEs at work, 2.1 and 2.2: videos -> normalised latents and back, in bounded memory.

Time is streamed as in the official code: one frame, then four at a time, each chunk one latent frame; what the
convolutions must remember of the frames before stands in their feature cache. So the device holds one chunk, however
long the video is. Tiles bound the memory in space too, but unlike streaming they change the numbers a little.

Letters in shapes: B batch, C channels, T frames of video, H and W pixels, F frames of latents, h and w latents.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify, unpatchify

from wangen.generator.errors import WangenError
from wangen.generator.sampling_refusals import require_tile
from wangen.runtime.models.vae_video import check_image, check_video, latent_statistics, tiles, to_floats
from wangen.runtime.weights.vae import load_vae


class PlainVaeEncoder:
    """The encoder of a Wan VAE through diffusers: slower than `wangen.runtime.fast.vae`, the same numbers."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self.vae = vae

    def encode(self, video: torch.Tensor, *, cache_cpu: bool = False, tile_px: int = 0) -> torch.Tensor:
        """The normalised latents of a video: see `encode_video`."""
        return encode_video(self.vae, video, cache_cpu=cache_cpu, tile_px=tile_px)

    def encode_condition(
        self, images: torch.Tensor, num_frames: int, *, cache_cpu: bool = False, tile_px: int = 0
    ) -> torch.Tensor:
        """What image-to-video models are conditioned on: the latents of the image, then mid grey.

        Args:
            images: (B, 3, 1, H, W), as for `encode`.
            num_frames: of the clip, 4k + 1.
            cache_cpu: as for `encode`.
            tile_px: as for `encode`.

        Returns:
            (B, 16, F, h, w) in float32.

        Raises:
            WangenError: as `encode`.
        """
        check_image(images, num_frames)
        image = to_floats(images, images.device, torch.float32)
        grey = image.new_zeros(()).expand(*images.shape[:2], num_frames - 1, *images.shape[3:])
        return self.encode(torch.cat([image, grey], dim=2), cache_cpu=cache_cpu, tile_px=tile_px)


def load_plain_vae_encoder(path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> PlainVaeEncoder:
    """The encoder of a Wan VAE through diffusers.

    Raises:
        WangenError: as `load_vae`.
    """
    return PlainVaeEncoder(load_vae(path, dtype=dtype, device=device))


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
    check_video(video, vae.config.scale_factor_spatial)
    require_tile(tile_px)
    stride, patch, z_dim = vae.config.scale_factor_spatial, vae.config.patch_size or 1, vae.config.z_dim
    batch, _, num_frames, height_px, width_px = video.shape
    shape = (batch, z_dim, (num_frames + 3) // 4, height_px // stride, width_px // stride)
    mode = torch.zeros(shape, dtype=torch.float32, device=vae.device)
    for area, weight in tiles(shape[3], shape[4], tile_px // stride):
        area_px = [slice(side.start * stride, side.stop * stride) for side in area]
        weight = weight.to(vae.device)
        cache = _feature_cache(vae.encoder, vae.device, cache_cpu)
        for index in range(shape[2]):
            chunk = to_floats(video[:, :, _frames(index), *area_px], vae.device, vae.dtype).contiguous()
            hidden = vae.encoder(patchify(chunk, patch), feat_cache=cache, feat_idx=[0])
            moments = vae.quant_conv(hidden)  # (B, 2 * z_dim, 1, h, w): means, then log variances
            mode[:, :, index : index + 1, *area] += moments[:, :z_dim].float() * weight
    mean, std = _statistics(vae)
    return mode.sub_(mean).div_(std)


@torch.no_grad()
def decode_latents(
    vae: AutoencoderKLWan,
    latents: torch.Tensor,
    *,
    cache_cpu: bool = False,
    tile_px: int = 0,
    on_chunk: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """The video of normalised latents, the inverse of `encode_video`.

    Args:
        vae: a Wan 2.1 or 2.2 VAE.
        latents: (B, 16, F, h, w), normalised, on any device (2.2: 48 channels).
        cache_cpu: as for `encode_video`.
        tile_px: as for `encode_video`, in pixels of the video.
        on_chunk: called before each latent frame of each tile; it may raise.

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
    for area_px, weight in tiles(shape[3], shape[4], tile_px):
        area = [slice(side.start // stride, side.stop // stride) for side in area_px]
        weight = weight.to(vae.device)
        cache = _feature_cache(vae.decoder, vae.device, cache_cpu)
        for index in range(num_frames):
            on_chunk()
            chunk = latents[:, :, index : index + 1, *area].to(vae.device, torch.float32) * std + mean
            hidden = vae.post_quant_conv(chunk.to(vae.dtype))
            pixels = vae.decoder(hidden, feat_cache=cache, feat_idx=[0], first_chunk=index == 0)
            frames = unpatchify(pixels, patch).float() * weight
            video[:, :, _frames(index), *area_px] += frames.to(video.device)
    return video.clamp_(-1.0, 1.0)


def _frames(index: int) -> slice:
    """The frames of video that belong to one latent frame."""
    return slice(max(0, 4 * index - 3), 4 * index + 1)


def _statistics(vae: AutoencoderKLWan) -> tuple[torch.Tensor, ...]:
    return latent_statistics(vae.config.latents_mean, vae.config.latents_std, vae.device)


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
