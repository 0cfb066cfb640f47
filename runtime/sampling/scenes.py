"""Prompts and first frames made ready for sampling, before a transformer loads; the encoders are gone afterwards.

Letters in shapes: C channels, F h w the latent's frames, height and width, L tokens of text.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from wangen.generator.kinds import expect
from wangen.generator.sample_prompts import SamplePrompt, edited_size
from wangen.generator.steps import Evaluate, Generate, Train
from wangen.profiles import Model
from wangen.runtime.denoising import Given
from wangen.runtime.devices import (
    DTYPES,
    choose_clip_dtype,
    choose_dtype,
    choose_vae_dtype,
    enough_memory,
    exact,
    within_range,
)
from wangen.runtime.loader import first_frame_condition
from wangen.runtime.media import load_image, open_image
from wangen.runtime.models import Family, LatentEncoder, expect_vae
from wangen.runtime.prompts import text_of

log = logging.getLogger("wangen")

SMALLER = "make a smaller or a shorter video"


@dataclass(frozen=True, kw_only=True)
class Encoders:
    """The weights around a transformer, and how they work.

    Attributes:
        vae: of the VAE.
        t5: of the text encoder; None where only a VAE is asked.
        clip: of the image encoder, for models that look through it.
        tokenizer: None looks for it near and inside the text encoder.
        t5_dtype: precision of the text encoder; None takes the device's best.
        fp8_t5: it is held in 8 bits.
        vae_dtype: precision of the VAE; None takes the device's best.
        vae_cache_cpu: what the VAE remembers of earlier frames waits in host memory.
        vae_tile: side in pixels of the squares that it works in; 0 takes the picture whole.
        plain: encode with the libraries' own modules.
    """

    vae: Path
    t5: Path | None = None
    clip: Path | None = None
    tokenizer: Path | None = None
    t5_dtype: str | None = None
    fp8_t5: bool = False
    vae_dtype: str | None = None
    vae_cache_cpu: bool = False
    vae_tile: int = 0
    plain: bool = False

    @classmethod
    def of(cls, options: Train | Generate | Evaluate, *, plain: bool = False) -> "Encoders":
        """Those that a step's flags name, and how these say they work; `--vae` is given.

        Args:
            options: flags that are not given, or that the step lacks, stand at the defaults above.
            plain: encode with the libraries' own modules.
        """
        names = [one.name for one in fields(cls) if one.name != "plain"]
        given = {name: value for name in names if (value := getattr(options, name, None)) is not None}
        return cls(**given, plain=plain)

    @property
    def vae_memory(self) -> Mapping[str, Any]:
        """How the VAE saves memory, as `LatentEncoder.encode` takes it."""
        return {"cache_cpu": self.vae_cache_cpu, "tile_px": self.vae_tile}

    def require(self, model: Model) -> None:
        """See that the files are what the model takes, from their headers.

        Raises:
            WangenError: one is of another kind.
        """
        assert self.t5 is not None, "prompts are encoded"
        expect(self.t5, model.kind_of("t5"), "--t5", model.name)
        expect_vae(self.vae, model)
        if self.clip is not None and model.has_clip:
            expect(self.clip, model.kind_of("clip"), "--clip", model.name)


@dataclass(frozen=True)
class Scene:
    """A prompt made ready, on the CPU.

    Attributes:
        prompt: with the sampler's settings.
        texts: its embedding (L, dim), and with guidance the negative prompt's.
        given: its first frame or its control images, as the model takes them.
    """

    prompt: SamplePrompt
    texts: list[torch.Tensor]
    given: Given = field(default_factory=Given)


def make_scenes(
    kind: Family, model: Model, prompts: Sequence[SamplePrompt], encoders: Encoders, device: torch.device, what: str
) -> list[Scene]:
    """Encode prompts and first frames; call it before the transformer loads. The encoders are gone when it returns.

    Texts and pictures that stand in several prompts are encoded once.

    Args:
        kind: the model's family.
        model: its profile.
        prompts: from `sample_prompts.read_prompts`.
        encoders: their weights, which `Encoders.require` has looked at.
        device: where to encode.
        what: the prompts are called in messages.

    Raises:
        WangenError: a first frame cannot be decoded, or the memory is full.
    """
    frames = {key: _first_frame(key) for key in dict.fromkeys(map(_frame_key, prompts)) if key.image}
    controls = _controls(kind, model, prompts, encoders, device)
    texts = _embeddings(kind, model, prompts, encoders, device, what)
    given: dict[_FrameKey, Given] = {}
    if frames:
        views = _views(kind, model, frames, encoders, device)
        given = _conditions(kind, model, frames, encoders, device)
        given = {key: replace(one, image_tokens=views.get(key)) for key, one in given.items()}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return [
        Scene(
            prompt,
            [texts[asked] for asked in _asked(prompt, model)],
            replace(given.get(_frame_key(prompt), Given()), controls=tuple(controls[one] for one in _shown(prompt))),
        )
        for prompt in prompts
    ]


Shown = tuple[Path, str]
"""A control image, and the colour behind what is transparent in it."""

Asked = tuple[str, tuple[Shown, ...]]
"""A text as the text encoder gets it, and the control images that it is shown."""


def _shown(prompt: SamplePrompt) -> tuple[Shown, ...]:
    return tuple((path, prompt.background) for path in prompt.controls)


def _asked(prompt: SamplePrompt, model: Model) -> list[Asked]:
    """The prompt, and the negative prompt where it is asked."""
    words = [prompt.prompt, *([prompt.negative_prompt] if prompt.guided else [])]
    shown = _shown(prompt) if model.prompt and model.prompt.picture else ()
    return [(text_of(word, template=model.prompt is not None), shown) for word in words]


class _FrameKey(NamedTuple):
    """What the latents of a first frame depend on."""

    image: Path | None
    width: int
    height: int
    frames: int
    background: str


def _frame_key(prompt: SamplePrompt) -> _FrameKey:
    return _FrameKey(prompt.image, prompt.width, prompt.height, prompt.frames, prompt.background)


def _embeddings(
    kind: Family, model: Model, prompts: Sequence[SamplePrompt], encoders: Encoders, device: torch.device, what: str
) -> dict[Asked, torch.Tensor]:
    """The embedding of every distinct text with what it is shown, as the caching step encodes it."""
    distinct = list(dict.fromkeys(asked for prompt in prompts for asked in _asked(prompt, model)))
    pictures = [[open_image(*one) for one in shown] for _, shown in distinct]
    assert encoders.t5 is not None, "prompts are encoded"
    dtype = choose_dtype(encoders.t5_dtype, device)
    with enough_memory(f"encoding {what}", "use --fp8_t5"), exact(dtype):
        encoder = kind.load_prompt_encoder(
            encoders.t5, encoders.tokenizer, dtype=DTYPES[dtype], device=device, fp8=encoders.fp8_t5,
            plain=encoders.plain, model=model,
        )  # fmt: skip
        words = [word for word, _ in distinct]
        return dict(zip(distinct, encoder.encode(words, lambda _done, _total: None, pictures=pictures), strict=True))


def _first_frame(key: _FrameKey) -> torch.Tensor:
    """(1, 3, 1, H, W) uint8, cut to the size that is sampled."""
    assert key.image is not None
    return torch.from_numpy(load_image(key.image, (key.width, key.height), key.background).copy())[None]


def _vae_in(kind: Family, encoders: Encoders, device: torch.device) -> Callable[[str], LatentEncoder]:
    """The VAE in a precision, which is loaded when it is asked for."""
    return cache(
        lambda dtype: kind.load_latent_encoder(encoders.vae, dtype=DTYPES[dtype], device=device, plain=encoders.plain)
    )


def _controls(
    kind: Family, model: Model, prompts: Sequence[SamplePrompt], encoders: Encoders, device: torch.device
) -> dict[Shown, torch.Tensor]:
    """The latents (C, 1, h, w) of every control image, whole and at the model's area, as in the pipelines."""
    pictures = list(dict.fromkeys(one for prompt in prompts for one in _shown(prompt)))
    if not pictures:
        return {}
    dtype, vae = choose_vae_dtype(encoders.vae_dtype, device), _vae_in(kind, encoders, device)

    def encoded(path: Path, background: str) -> torch.Tensor:
        frames = torch.from_numpy(load_image(path, edited_size(path, model), background, whole=True).copy())[None]
        latents = within_range(lambda each: vae(each).encode(frames, **encoders.vae_memory), dtype, path.name)
        return latents[0].cpu()

    with enough_memory("encoding control images", SMALLER), exact(dtype):
        return {one: encoded(*one) for one in pictures}


def _views(
    kind: Family, model: Model, frames: Mapping[_FrameKey, torch.Tensor], encoders: Encoders, device: torch.device
) -> dict[_FrameKey, torch.Tensor]:
    """CLIP's view of every first frame, for models that look through it when its weights are given."""
    if not model.has_clip:
        return {}
    if encoders.clip is None:
        log.warning("  no --clip: samples of %s are made without its image branch", model.name)
        return {}
    dtype = choose_clip_dtype(device)
    with enough_memory("encoding first frames with CLIP", SMALLER), exact(dtype):
        encoder = kind.load_image_encoder(encoders.clip, dtype=DTYPES[dtype], device=device)
        return {
            key: kind.encode_images(encoder, frame[:, :, 0].float() / 127.5 - 1).cpu() for key, frame in frames.items()
        }


def _conditions(
    kind: Family, model: Model, frames: Mapping[_FrameKey, torch.Tensor], encoders: Encoders, device: torch.device
) -> dict[_FrameKey, Given]:
    """Every first frame as latents: as the condition of image-to-video, or as the clean frame of the 5B."""
    dtype, vae = choose_vae_dtype(encoders.vae_dtype, device), _vae_in(kind, encoders, device)

    def given(key: _FrameKey, frame: torch.Tensor) -> Given:
        assert key.image is not None
        if model.condition == "text_or_image":
            latents = within_range(lambda each: vae(each).encode(frame, **encoders.vae_memory), dtype, key.image.name)
            return Given(clean=latents.cpu())
        latents = within_range(
            lambda each: vae(each).encode_condition(frame, key.frames, **encoders.vae_memory), dtype, key.image.name
        )
        return Given(condition=first_frame_condition(latents.cpu()))

    with enough_memory("encoding first frames", SMALLER), exact(dtype):
        return {key: given(key, frame) for key, frame in frames.items()}
