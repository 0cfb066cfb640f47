"""Held-out clips whose first frames are given, continued by a model, and how near that comes to what was filmed.

Two stand beside a model: the VAE alone, which decodes the clip's own latents and is the most to hope for, and the last
given frame, repeated: whoever stays below has learned nothing of the motion. The way of somebody who compares models:

    clips = make_clips(held_out, model, given_frames=5, count=4, seed=42)    # from the cache: no encoder is asked
    references = [reference_of(clip, decoder) for clip in clips]
    for clip, reference in zip(clips, references):
        latents = sample_latents(kind, model, [Expert(velocity)], clip.scene, device, cure=cure)
        quality = quality_of(clip.source, pixels_of(decoder.decode(latents)), clip.given_frames)

Noise depends on the seed and the clip's content alone: it is the same on every machine and for every model.
Letters in shapes: C channels, F h w the latent's frames, height and width, T H W those of the video in pixels.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from wangen.generator.errors import WangenError, many
from wangen.generator.sample_prompts import SamplePrompt, defaults_of
from wangen.profiles import Model
from wangen.runtime.denoising import Given
from wangen.runtime.evaluation.signals import MOST_DB, psnr, ssim
from wangen.runtime.loader import CachedSample, Draw, read_batch
from wangen.runtime.media import target_frames
from wangen.runtime.randomness import seed_for
from wangen.runtime.sampling.output import pixels_of
from wangen.runtime.sampling.scenes import Scene
from wangen.runtime.sampling.videos import Decoder

if TYPE_CHECKING:
    import torch

    Frames = np.ndarray[Any, np.dtype[np.uint8]]

log = logging.getLogger("wangen")

DIGITS = 4
"""Of what is written down, behind the point."""


@dataclass(frozen=True)
class Clip:
    """A clip to continue.

    Attributes:
        name: of its sample.
        given_frames: so many first frames are given, 4n+1.
        latents: (1, C, F, h, w) of all of it in float32, on the CPU.
        source: (T, H, W, 3) uint8, what was encoded.
        scene: its first latent frames with its caption, its own noise and the sampler's settings.
    """

    name: str
    given_frames: int
    latents: "torch.Tensor"
    source: "Frames"
    scene: Scene


@dataclass(frozen=True)
class Quality:
    """How near frames come to the source, for each one after the given frames.

    Attributes:
        psnr: peak signal-to-noise ratio in dB, over all three colours; at most 99, which stands for equal frames.
        ssim: structural similarity of brightness, in [-1, 1].
    """

    psnr: tuple[float, ...]
    ssim: tuple[float, ...]

    @property
    def means(self) -> dict[str, float]:
        """`psnr` and `ssim`, the means over the frames."""
        return {"psnr": fmean(self.psnr), "ssim": fmean(self.ssim)}


@dataclass(frozen=True)
class Reference:
    """What the continuation of a clip stands beside.

    Attributes:
        reconstruction: (T, H, W, 3) uint8, the clip's own latents decoded.
        vae: its quality, which is the upper bound.
        copy: that of the last given frame, repeated.
    """

    reconstruction: "Frames"
    vae: Quality
    copy: Quality


@dataclass(frozen=True)
class Measured:
    """A continuation that was measured.

    Attributes:
        number: of its clip, counted from 1.
        name: of its clip.
        given_frames: so many were given.
        model: the quality of the continuation.
        vae: of the VAE's own reconstruction.
        copy: of the last given frame, repeated.
    """

    number: int
    name: str
    given_frames: int
    model: Quality
    vae: Quality
    copy: Quality

    def as_record(self) -> dict[str, Any]:
        """As plain JSON: lists have a number for each frame after the given ones."""
        lists = {name: {"psnr": _rounded(one.psnr), "ssim": _rounded(one.ssim)} for name, one in _columns(self)}
        return {"number": self.number, "name": self.name, "given_frames": self.given_frames, **lists}


@dataclass(frozen=True)
class Continuations:
    """What a model makes of all clips; at least one."""

    clips: Sequence[Measured]

    def numbers(self) -> dict[str, dict[str, float]]:
        """Of `model`, `vae` and `copy` the mean `psnr` and `ssim`: over the frames of a clip, then over the clips."""
        means = [{name: quality.means for name, quality in _columns(clip)} for clip in self.clips]
        return {
            name: {unit: fmean(clip[name][unit] for clip in means) for unit in ("psnr", "ssim")} for name in means[0]
        }

    def as_record(self) -> dict[str, Any]:
        """As a line of `metrics.jsonl`."""
        means = {
            name: dict(zip(found, _rounded(found.values()), strict=True)) for name, found in self.numbers().items()
        }
        return {"continuations": {"means": means, "clips": [clip.as_record() for clip in self.clips]}}

    def line(self) -> str:
        """For the log."""
        model, vae, copy = (f"{one['psnr']:.1f} dB, {one['ssim']:.2f}" for one in self.numbers().values())
        return f"continuations {model} (copying the last frame {copy}; the VAE itself {vae})"


def _columns(clip: Measured) -> list[tuple[str, Quality]]:
    return [("model", clip.model), ("vae", clip.vae), ("copy", clip.copy)]


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]


def make_clips(
    samples: Sequence[CachedSample],
    model: Model,
    *,
    given_frames: int,
    count: int,
    seed: int,
    steps: int | None = None,
    guidance: float = 1.0,
    frames_guide: bool = False,
) -> list[Clip]:
    """Those clips that are continued, read from the cache and from their files.

    Of the samples that go on after the given frames the ones with the lowest digests of (seed, content): their order
    and names do not matter.

    Args:
        samples: held-out items; with guidance their empty prompt is read, too.
        model: the profile of a model that takes first frames clean; the sampler's settings are its own.
        given_frames: so many first frames are given, 4n+1.
        count: clips; fewer, with a warning, where there are not so many.
        seed: of the choice and of the noise.
        steps: of the sampler; None takes the model's own.
        guidance: classifier-free guidance against the empty prompt; 1 is none.
        frames_guide: and against first frames that are not given, which the model was trained on.

    Raises:
        WangenError: no sample goes on after the given frames, or a file cannot be decoded.
    """
    longer = [cached for cached in samples if cached.sample.count > given_frames]
    if not longer:
        raise WangenError(
            f"none of {many(len(samples), 'held-out clip')} goes on after the {given_frames} frames that are given",
            cure="cut longer clips, or give fewer --condition_frames",
        )
    if len(longer) < count:
        log.warning("  %d of %d clips are continued: only so many held-out ones go on after the %d given frames",
                    len(longer), count, given_frames)  # fmt: skip
    chosen = sorted(longer, key=lambda cached: seed_for(seed, "continued", cached.latent.content_key))[:count]
    return [_clip(cached, model, given_frames, seed, steps, guidance, frames_guide) for cached in chosen]


def _clip(
    cached: CachedSample,
    model: Model,
    given_frames: int,
    seed: int,
    steps: int | None,
    guidance: float,
    frames_guide: bool,
) -> Clip:
    batch, usual = read_batch([cached], [Draw(0, 0)]), defaults_of(model)
    texts = batch.texts if guidance <= 1 else [*batch.texts, *read_batch([cached], [Draw(0, 0, -1)]).texts]
    sample = cached.sample
    prompt = SamplePrompt(
        prompt=sample.item.captions[0], negative_prompt="", width=sample.size[0], height=sample.size[1],
        frames=sample.count, fps=_fps(cached), seed=seed_for(seed, "continuation", cached.latent.content_key),
        steps=steps or usual["infer_steps"], shift=usual["flow_shift"], guidance=guidance,
        guidance_high_noise=guidance, sampler=usual["sample_solver"],
    )  # fmt: skip
    num_latent = 1 + (given_frames - 1) // model.temporal_stride
    given = Given(clean=batch.latents[:, :, :num_latent].clone(), guides=frames_guide)
    source = np.ascontiguousarray(target_frames(sample).transpose(1, 2, 3, 0))
    scene = Scene(prompt, texts, given)
    return Clip(sample.name, given_frames, batch.latents, source, scene)


def _fps(cached: CachedSample) -> int:
    """At which a clip's frames are shown: those that a line of a manifest names are not resampled to the model's."""
    sample, facts = cached.sample, cached.sample.source.facts
    if excerpt := sample.item.excerpt:
        return max(1, round(facts.num_frames / facts.duration_s / excerpt.step))
    return sample.fps


def quality_of(source: "Frames", shown: "Frames", given_frames: int) -> Quality:
    """The quality of each frame after the given ones.

    Args:
        source: (T, H, W, 3) uint8.
        shown: as many frames.
        given_frames: so many first ones are left out.

    Raises:
        ValueError: the shapes differ, or no frame is left.
    """
    if source.shape != shown.shape or not 0 <= given_frames < len(source):
        raise ValueError(f"{shown.shape} cannot be judged by {source.shape} after {given_frames} frames")
    pairs = [(source[at : at + 1], shown[at : at + 1]) for at in range(given_frames, len(source))]
    return Quality(
        tuple(min(psnr(one, other), MOST_DB) for one, other in pairs), tuple(ssim(one, other) for one, other in pairs)
    )


def reference_of(clip: Clip, decoder: Decoder, on_chunk: Callable[[], None] = lambda: None) -> Reference:
    """What the VAE alone and a copy of the last given frame come to; it is the same for every model.

    `on_chunk` is called before each chunk that is decoded; it may raise.

    Raises:
        WangenError: the memory is full, or the decoded frames are not finite.
    """
    reconstruction = pixels_of(decoder.decode(clip.latents, on_chunk))
    last = clip.source[clip.given_frames - 1]
    copied = np.broadcast_to(last, clip.source.shape)
    return Reference(
        reconstruction,
        vae=quality_of(clip.source, reconstruction, clip.given_frames),
        copy=quality_of(clip.source, copied, clip.given_frames),
    )


def side_by_side(clip: Clip, reference: Reference, continuation: "Frames") -> "Frames":
    """(T, H, 3 W, 3) uint8: the source, the VAE's reconstruction, and the continuation (T, H, W, 3)."""
    return np.concatenate([clip.source, reference.reconstruction, continuation], axis=2)
