"""Prompts and first frames made ready for sampling, before a transformer loads; the encoders are gone afterwards.

Letters in shapes: C channels, F h w the latent's frames, height and width, L tokens of text.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch

from wangen.generator.kinds import expect
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
)
from wangen.runtime.loader import first_frame_condition
from wangen.runtime.media import load_image, open_image
from wangen.runtime.models import Family, expect_vae
from wangen.runtime.prompts import text_of
from wangen.runtime.sampling.prompts import SamplePrompt, edited_size

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

    Texts that stand in several prompts, and prompts that differ in their seed alone, are encoded once.

    Args:
        kind: the model's family.
        model: its profile.
        prompts: from `prompts.read_prompts`.
        encoders: their weights, which `Encoders.require` has looked at.
        device: where to encode.
        what: the prompts are called in messages.

    Raises:
        WangenError: a first frame cannot be decoded, or the memory is full.
    """
    frames = {key: _first_frame(key) for key in dict.fromkeys(map(_frame_key, prompts)) if key.image}
    controls = _controls(kind, model, prompts, encoders, device)
    texts = _embeddings(kind, model, prompts, encoders, device, what)
    given: dict[SamplePrompt, Given] = {}
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


def _frame_key(prompt: SamplePrompt) -> SamplePrompt:
    """The prompt without what its first frame does not depend on."""
    return replace(prompt, prompt="", negative_prompt="", seed=0, controls=())


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


def _first_frame(prompt: SamplePrompt) -> torch.Tensor:
    """(1, 3, 1, H, W) uint8, cut to the size that is sampled."""
    assert prompt.image is not None
    return torch.from_numpy(load_image(prompt.image, (prompt.width, prompt.height), prompt.background).copy())[None]


def _controls(
    kind: Family, model: Model, prompts: Sequence[SamplePrompt], encoders: Encoders, device: torch.device
) -> dict[Shown, torch.Tensor]:
    """The latents (C, 1, h, w) of every control image, whole and at the model's area, as in the pipelines."""
    pictures = list(dict.fromkeys(one for prompt in prompts for one in _shown(prompt)))
    if not pictures:
        return {}
    dtype = choose_vae_dtype(encoders.vae_dtype, device)
    found = {}
    with enough_memory("encoding control images", SMALLER), exact(dtype):
        encoder = kind.load_latent_encoder(encoders.vae, dtype=DTYPES[dtype], device=device, plain=encoders.plain)
        for path, background in pictures:
            frames = torch.from_numpy(load_image(path, edited_size(path, model), background, whole=True).copy())[None]
            (latent,) = encoder.encode(frames, cache_cpu=encoders.vae_cache_cpu, tile_px=encoders.vae_tile).cpu()
            found[path, background] = latent
    return found


def _views(
    kind: Family, model: Model, frames: Mapping[SamplePrompt, torch.Tensor], encoders: Encoders, device: torch.device
) -> dict[SamplePrompt, torch.Tensor]:
    """CLIP's view of every first frame, for models that look through it when its weights are given."""
    if not model.has_clip:
        return {}
    if encoders.clip is None:
        log.warning("  no --clip: samples of %s are made without its image branch", model.name)
        return {}
    dtype = choose_clip_dtype(None, device)
    with enough_memory("encoding first frames with CLIP", SMALLER), exact(dtype):
        encoder = kind.load_image_encoder(encoders.clip, dtype=DTYPES[dtype], device=device)
        return {
            prompt: kind.encode_images(encoder, frame[:, :, 0].float() / 127.5 - 1).cpu()
            for prompt, frame in frames.items()
        }


def _conditions(
    kind: Family, model: Model, frames: Mapping[SamplePrompt, torch.Tensor], encoders: Encoders, device: torch.device
) -> dict[SamplePrompt, Given]:
    """Every first frame as latents: as the condition of image-to-video, or as the clean frame of the 5B."""
    dtype = choose_vae_dtype(encoders.vae_dtype, device)
    cache_cpu, tile_px = encoders.vae_cache_cpu, encoders.vae_tile
    found = {}
    with enough_memory("encoding first frames", SMALLER), exact(dtype):
        encoder = kind.load_latent_encoder(encoders.vae, dtype=DTYPES[dtype], device=device, plain=encoders.plain)
        for prompt, frame in frames.items():
            if model.condition == "text_or_image":
                found[prompt] = Given(clean=encoder.encode(frame, cache_cpu=cache_cpu, tile_px=tile_px).cpu())
                continue
            latents = encoder.encode_condition(frame, prompt.frames, cache_cpu=cache_cpu, tile_px=tile_px).cpu()
            found[prompt] = Given(condition=first_frame_condition(latents))
    return found
