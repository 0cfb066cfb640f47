"""The encoders of Wan's VAEs, 2.1 and 2.2, without diffusers: the same latents, sooner and in less memory.

    vae_weights  which layers there are; their tensors, read from any checkpoint when they are needed
    vae_layers   what the layers do to a frame
    vae_stream   what they do over time: chunks of a clip, and the steady end of an image followed by grey

Against the same file in diffusers' `AutoencoderKLWan` latents differ by rounding alone (`tests/test_fast_vae.py`).
Letters in shapes: B batch, C channels, T frames of video, H and W pixels, F frames of latents, h and w latents.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from wangen.generator.errors import WangenError
from wangen.generator.sampling_refusals import require_tile
from wangen.runtime.fast.vae_layers import Layers
from wangen.runtime.fast.vae_stream import CHANNELS_LAST, Settling, Stream
from wangen.runtime.fast.vae_weights import EncoderWeights
from wangen.runtime.models.vae_video import check_image, check_video, latent_statistics, tiles, to_floats

MEANS = "means"
"""The key of the steady means among the steady frames of layers."""


def load_vae_encoder(path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> "VaeEncoder":
    """The encoder of a Wan 2.1 or 2.2 VAE; which one is read from its tensors.

    Args:
        path: a file or folder, as for `wangen.runtime.weights.vae.load_vae`. Tensors are read when they are needed.
        dtype: to compute in. In float16 values may overflow: the caller judges what comes.
        device: where.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors.
    """
    return VaeEncoder(EncoderWeights(path, dtype, device))


class VaeEncoder:
    """Videos -> normalised latents.

    Attributes:
        dtype: that is computed in.
        device: where.
        stride_px: pixels per latent, in each direction.
        z_dim: channels of the latents.
    """

    def __init__(self, weights: EncoderWeights) -> None:
        config = weights.layout.config
        self.dtype, self.device = weights.dtype, weights.device
        self.stride_px: int = config["scale_factor_spatial"]
        self.z_dim: int = config["z_dim"]
        self._weights, self._layers = weights, Layers(weights)
        self._statistics = latent_statistics(config["latents_mean"], config["latents_std"], self.device)
        self._steady: tuple[tuple[int, int, bool], dict[str, torch.Tensor]] | None = None

    @torch.no_grad()
    def encode(self, video: torch.Tensor, *, cache_cpu: bool = False, tile_px: int = 0) -> torch.Tensor:
        """The normalised latents of a video, as the official wrapper computes them: (mode - mean) / std.

        On a CPU the items of a batch are encoded one by one, which is faster, and no item's bits depend on the others.

        Args:
            video: (B, 3, T, H, W), floating point in [-1, 1] or uint8, on any device: it goes to the encoder's chunk
                by chunk. T = 4k + 1, H and W multiples of 8 (2.2: of 16). An image is T = 1.
            cache_cpu: what the convolutions remember rests in host memory: the same numbers in less device memory,
                but slower.
            tile_px: encode squares of this size, which overlap by a quarter and are blended linearly; a multiple of
                64. 0 takes the picture whole. The VAE's middle looks at all that it is given, so tiles are not exact.

        Returns:
            (B, 16, F, h, w) in float32 on the encoder's device, where F = (T + 3) / 4, h = H / 8, w = W / 8
            (2.2: 48 channels, and 16 for 8).

        Raises:
            WangenError: the shape is another, or `tile_px` is no size of tiles.
        """
        check_video(video, self.stride_px)
        require_tile(tile_px)
        return self._encode(video, video.shape[2], cache_cpu, tile_px)

    @torch.no_grad()
    def encode_condition(
        self, images: torch.Tensor, num_frames: int, *, cache_cpu: bool = False, tile_px: int = 0
    ) -> torch.Tensor:
        """What image-to-video models are conditioned on: the latents of the image, then mid grey.

        The frames behind the image's reach are not computed: 81 frames take a fifth of the work. What grey alone
        becomes is kept for the last size of picture, so give pictures of one size one after the other.

        Args:
            images: (B, 3, 1, H, W), as for `encode`.
            num_frames: of the clip, 4k + 1.
            cache_cpu: as for `encode`.
            tile_px: as for `encode`.

        Returns:
            (B, 16, F, h, w) in float32, F = (num_frames + 3) / 4: equal to encoding all frames, up to rounding.

        Raises:
            WangenError: as `encode`, or the VAE is that of 2.2, whose models take no such condition.
        """
        check_image(images, num_frames)
        check_video(images, self.stride_px)
        require_tile(tile_px)
        if self._weights.layout.config["is_residual"]:
            raise WangenError("the VAE of Wan 2.2 has no image-to-video condition",
                              cure="give the VAE of Wan 2.1: all models with such a condition use it")  # fmt: skip
        return self._encode(images, num_frames, cache_cpu, tile_px)

    def _encode(self, video: torch.Tensor, num_frames: int, cache_cpu: bool, tile_px: int) -> torch.Tensor:
        """Latents of `num_frames` frames: those of the video, then grey."""
        stride, batch = self.stride_px, len(video)
        shape = (batch, self.z_dim, (num_frames + 3) // 4, video.shape[3] // stride, video.shape[4] // stride)
        latents = torch.zeros(shape, dtype=torch.float32, device=self.device)
        together = 1 if self.device.type == "cpu" else batch
        for item in range(0, batch, together):
            items = slice(item, item + together)
            for area, weight in tiles(shape[3], shape[4], tile_px // stride):
                area_px = [slice(side.start * stride, side.stop * stride) for side in area]
                begin, weight = 0, weight.to(self.device)
                for means in self._means(video[items, :, :, *area_px], num_frames, cache_cpu):
                    end = begin + means.shape[2]
                    latents[items, :, begin:end, *area] += means.float() * weight
                    begin = end
        mean, std = self._statistics
        return latents.sub_(mean).div_(std)

    def _means(self, video: torch.Tensor, num_frames: int, cache_cpu: bool) -> Iterator[torch.Tensor]:
        """Means (B, z_dim, frames, h, w) in the order of time, F frames in all."""
        batch, _, given, height_px, width_px = video.shape
        steady = self._settle(height_px, width_px, cache_cpu) if num_frames > given else None
        stream = Stream(self._weights, cache_cpu=cache_cpu, steady=steady)
        stream.last = num_frames == 1
        yield self._layers.rest(stream, self._layers.front(stream, self._enter(video[:, :, :1])))
        stream.first = False
        full_rate, below = self._chunk_sizes(batch * height_px * width_px // self._weights.layout.patch**2)
        waiting: list[torch.Tensor] = []
        for begin in range(1, num_frames, full_rate):
            end = min(begin + full_rate, num_frames)
            stream.length, stream.last = end - begin, end == num_frames
            waiting.append(self._layers.front(stream, self._enter(video[:, :, begin:end])))
            if not stream.last and (end - 1) % below:
                continue
            stream.length = ((end - 2) % below + 1) // 2
            chunk = torch.cat(waiting, dim=2).contiguous(memory_format=CHANNELS_LAST)
            waiting.clear()
            means = self._layers.rest(stream, chunk)
            yield means
            if steady is not None and means.shape[2] < stream.length:
                num_more = (num_frames - end) // 4 + stream.length - means.shape[2]
                yield steady[MEANS].to(self.device).expand(batch, -1, num_more, -1, -1)
                return

    def _settle(self, height_px: int, width_px: int, cache_cpu: bool) -> dict[str, torch.Tensor]:
        """The steady frame of each layer in pictures of this size, and the steady means."""
        key = (height_px, width_px, cache_cpu)
        if self._steady is None or self._steady[0] != key:
            self._steady = None  # frees what another size needed before this one takes as much
            time = Settling(self._weights, cache_cpu=cache_cpu)
            grey = torch.zeros(1, 3, 1, height_px, width_px, dtype=self.dtype, device=self.device)
            time.noted[MEANS] = self._layers.rest(time, self._layers.front(time, self._enter(grey)))
            self._steady = (key, time.noted)
        return self._steady[1]

    def _chunk_sizes(self, num_pixels: int) -> tuple[int, int]:
        """Frames of video per chunk, at the full frame rate and below it; the second is a multiple of the first.

        Larger chunks outgrow a CPU's caches. A GPU wants them where pictures are small, and for the deep layers, which
        see few pixels; at the full rate they cost memory.

        Args:
            num_pixels: of all frames at one time, as the first convolution sees them.
        """
        if self.device.type == "cpu":
            return (4, 16) if num_pixels <= 2**15 else (2, 8)
        return (8 if num_pixels <= 2**18 else 4 if num_pixels <= 2**19 else 2), 16

    def _enter(self, chunk: torch.Tensor) -> torch.Tensor:
        """A part of a video as the first convolution takes it: (B, 3 patch², T, H / patch, W / patch)."""
        chunk, patch = to_floats(chunk, self.device, self.dtype), self._weights.layout.patch
        if patch > 1:
            height, width = chunk.shape[3] // patch, chunk.shape[4] // patch
            chunk = chunk.reshape(*chunk.shape[:3], height, patch, width, patch)
            chunk = chunk.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)
        return chunk.contiguous(memory_format=CHANNELS_LAST)
