"""From scenes to frames: the one loop of everything that samples, and the VAE behind it.

Letters in shapes: C channels, F h w the latent's frames, height and width, T H W those of the video in pixels.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from wangen.generator.errors import WangenError
from wangen.generator.sample_prompts import SamplePrompt
from wangen.profiles import Model
from wangen.runtime.denoising import Stage, Velocity, denoise, flow_scheduler, initial_noise
from wangen.runtime.devices import DTYPES, choose_decoder_dtype, enough_memory, exact
from wangen.runtime.models import Family
from wangen.runtime.sampling.scenes import Encoders, Scene

log = logging.getLogger("wangen")


@dataclass(frozen=True)
class Expert:
    """A transformer that is loaded: the only one, or one of two.

    Attributes:
        velocity: predicts with it.
        high_noise: it is the expert for high noise.
        enter: called before its first step of a video, for example to bring it onto the device.
    """

    velocity: Velocity
    high_noise: bool = False
    enter: Callable[[], object] = lambda: None


def sample_latents(
    kind: Family,
    model: Model,
    experts: Sequence[Expert],
    scene: Scene,
    device: torch.device,
    *,
    boundary: float = 0.0,
    cure: str,
    on_step: Callable[[int], None] = lambda _number: None,
) -> torch.Tensor:
    """Sample one scene.

    Args:
        kind: the model's family.
        model: its profile.
        experts: the transformers; one alone goes the whole way, whichever it is.
        scene: what to make.
        device: where to compute.
        boundary: of two experts, the sigma from which on, upwards, the high-noise one works.
        cure: what to do when the memory is full.
        on_step: called after each step with how many are done.

    Returns:
        (1, C, F, h, w) in float32 on the CPU, normalised.

    Raises:
        WangenError: the memory is full, or the latents are not finite.
    """
    prompt = scene.prompt
    cells = model.latent_size((prompt.width, prompt.height), prompt.frames)
    noise = initial_noise((1, model.latent_channels, *cells), prompt.seed)
    with enough_memory(f"sampling {prompt.frames} frames of {prompt.width}x{prompt.height}", cure):
        latents = denoise(
            _stages(experts, prompt, boundary),
            noise.to(device),
            flow_scheduler(prompt.sampler, prompt.shift, model.shift.terminal if model.shift else None),
            prompt.steps,
            [text.to(device) for text in scene.texts],
            given=scene.given.to(device),
            per_token=kind.timesteps_per_token if scene.given.clean is not None else None,
            guide=kind.guided,
            on_step=on_step,
        ).cpu()
    if not latents.isfinite().all():
        raise WangenError("the sampled latents are not finite",
                          cure="a weight or a LoRA is damaged or too strong, or the precision too low")  # fmt: skip
    return latents


def _stages(experts: Sequence[Expert], prompt: SamplePrompt, boundary: float) -> list[Stage]:
    """The transformers in the order of their work."""
    stages = []
    for expert in experts:
        lowest = 1000 * boundary if expert.high_noise and len(experts) > 1 else 0.0
        guidance = prompt.guidance_high_noise if expert.high_noise else prompt.guidance
        stages.append(Stage(expert.velocity, guidance, lowest, expert.enter))
    return sorted(stages, key=lambda stage: -stage.lowest_timestep)


class Decoder:
    """The decoding half of the VAE, loaded with the first video.

    Args:
        kind: the model's family.
        encoders: the VAE's weights, and how it works.
        device: where to decode.
        cure: what to do when the memory is full.

    Attributes:
        dtype: the name of its precision.
    """

    def __init__(self, kind: Family, encoders: Encoders, device: torch.device, cure: str) -> None:
        self._kind, self._encoders, self._device, self._cure = kind, encoders, device, cure
        self.dtype = choose_decoder_dtype(encoders.vae_dtype, device)

    @cached_property
    def _vae(self) -> Any:
        with enough_memory("loading the VAE", self._cure):
            return self._kind.load_vae(self._encoders.vae, dtype=DTYPES[self.dtype], device=self._device)

    def decode(self, latents: torch.Tensor, on_chunk: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Latents (1, C, F, h, w) -> frames (3, T, H, W) in [-1, 1], on the CPU.

        Where the memory is full it is tried once more as with `vae_cache_cpu`, which gives the same frames. `on_chunk`
        is called before each chunk; it may raise.

        Raises:
            WangenError: the memory is full, or the frames are not finite.
        """
        with exact(self.dtype):
            video = self._within_memory(latents, on_chunk)
        if not video.isfinite().all():
            raise WangenError(f"the decoded frames are not finite in {self.dtype}",
                              cure="give another --vae_dtype: float16 ends at 65504, bfloat16 does not")  # fmt: skip
        return video

    def _within_memory(self, latents: torch.Tensor, on_chunk: Callable[[], None]) -> torch.Tensor:
        vae = self._vae
        if not self._encoders.vae_cache_cpu:
            try:
                return self._decoded(vae, latents, on_chunk, cache_cpu=False)
            except WangenError as error:
                log.warning("  %s: trying again as with --vae_cache_cpu", error.found)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return self._decoded(vae, latents, on_chunk, cache_cpu=True)

    def _decoded(
        self, vae: Any, latents: torch.Tensor, on_chunk: Callable[[], None], *, cache_cpu: bool
    ) -> torch.Tensor:
        tile_px = self._encoders.vae_tile
        with enough_memory("decoding a video", self._cure):
            (video,) = self._kind.decode_latents(vae, latents, cache_cpu=cache_cpu, tile_px=tile_px, on_chunk=on_chunk)
        return torch.as_tensor(video)
