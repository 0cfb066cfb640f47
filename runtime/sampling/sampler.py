"""The transformers of a model, loaded once, with LoRAs that can be switched between two videos.

The way of somebody who compares:

    encoders = Encoders(t5=..., vae=...)
    scenes = make_scenes(kind, model, prompts, encoders, device, "the prompts")     # before the transformer loads
    sampler = Sampler(kind, model, [ExpertWeights(dit, (Lora("step 100", path),))], Settings(dtype="bfloat16"), device)
    requests = [Request(scene, strengths) for scene in scenes for strengths in ({}, {"step 100": 1.0})]
    for video in make_videos(requests, sampler, Decoder(kind, encoders, device, cure)):
        ...                                                                       # each as soon as it is decoded

Noise depends on a prompt's seed, size and length alone, so that `{}`, the base, and a LoRA are a pair.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from wangen.generator import headers
from wangen.generator.errors import UsageError, many
from wangen.profiles import Model
from wangen.runtime.adapter_layers import apply_adapter
from wangen.runtime.adapters import Adapter, is_dora, read_adapter
from wangen.runtime.denoising import Velocity
from wangen.runtime.devices import DTYPES, enough_memory, set_attention
from wangen.runtime.fast.dit_blocks import lay_resident_groups
from wangen.runtime.lora import adapter_layers
from wangen.runtime.memory.quantize import Mode
from wangen.runtime.memory.swap import BlockSwap
from wangen.runtime.models import Family
from wangen.runtime.models.compute import Compute
from wangen.runtime.sampling.scenes import Scene
from wangen.runtime.sampling.videos import Decoder, Expert, sample_latents

log = logging.getLogger("wangen")


@dataclass(frozen=True)
class Lora:
    """An adapter to load.

    Attributes:
        name: what `Request.strengths` calls it; unique among those of a transformer, without dots. The LoRAs of both
            experts may share one, and are then switched together.
        path: its file or folder.
        strength: 1 is as trained.
    """

    name: str
    path: Path
    strength: float = 1.0


@dataclass(frozen=True)
class ExpertWeights:
    """A transformer to load.

    Attributes:
        dit: its weights.
        loras: adapters to put on it.
        high_noise: it is the expert for high noise.
    """

    dit: Path
    loras: tuple[Lora, ...] = ()
    high_noise: bool = False

    @property
    def flag(self) -> str:
        """The flag that such weights are given to."""
        return "--dit_high_noise" if self.high_noise else "--dit"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How transformers are loaded, and compute.

    Attributes:
        dtype: name of the precision that they compute in.
        attention: a value of `--attention`.
        quantize: the form of the linear layers of their blocks.
        blocks_to_swap: so many blocks of each wait in host memory.
        offload_inactive: of two experts the idle one waits in host memory.
        compile: torch.compile for whole blocks.
        plain: diffusers' own modules.
        boundary: of two experts, the sigma from which on, upwards, the high-noise one works.
        cure: what to do when the memory is full.
    """

    dtype: str
    attention: str = "auto"
    quantize: Mode | Literal["none"] = "none"
    blocks_to_swap: int = 0
    offload_inactive: bool = True
    compile: bool = False
    plain: bool = False
    boundary: float = 0.0
    cure: str = "make a smaller or a shorter video, or give --blocks_to_swap or --quantize"


@dataclass(frozen=True)
class Request:
    """A video to make.

    Attributes:
        scene: what it shows.
        strengths: LoRA name -> strength; those that are not named are off, so that `{}` is the base. None takes every
            LoRA at the strength it was loaded with.
    """

    scene: Scene
    strengths: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Video:
    """A video that was made.

    Attributes:
        latents: (1, C, F, h, w) in float32, normalised, on the CPU.
        frames: (3, T, H, W) in [-1, 1], on the CPU.
    """

    latents: torch.Tensor
    frames: torch.Tensor


class Sampler:
    """Loaded transformers that make the latents of any number of videos.

    Args:
        kind: the model's family.
        model: its profile.
        experts: the transformer; of a model with two experts both, or one that goes the whole way.
        settings: how.
        device: where to compute.

    Attributes:
        attention: the name of the attention kernel that runs.

    Raises:
        WangenError: weights are of another kind, a LoRA does not fit, or the memory is full.
        UsageError: the attention kernel is missing, or more blocks are to be swapped than there are.
    """

    def __init__(
        self,
        kind: Family,
        model: Model,
        experts: Sequence[ExpertWeights],
        settings: Settings,
        device: torch.device,
    ) -> None:
        self._kind, self._model, self._settings, self._device = kind, model, settings, device
        self._weights = tuple(experts)
        with enough_memory("loading the transformer", settings.cure):
            self._loaded = [self._load(expert) for expert in experts]
        self.attention = self._loaded[0].attention
        self.switch(None)

    @property
    def experts(self) -> list[Expert]:
        """What predicts velocities, in the order given, for who compares losses: call `enter` first.

        Made anew each time: kept here it would be a circle, and the weights would stay until Python looks for those.
        """
        return [
            Expert(loaded.velocity, weights.high_noise, partial(self._enter, number))
            for number, (loaded, weights) in enumerate(zip(self._loaded, self._weights, strict=True))
        ]

    def latents(
        self,
        scene: Scene,
        strengths: Mapping[str, float] | None = None,
        on_step: Callable[[int], None] = lambda _number: None,
    ) -> torch.Tensor:
        """Sample one scene: (1, C, F, h, w) in float32 on the CPU, normalised.

        Args:
            scene: what to make.
            strengths: as of `Request`.
            on_step: called after each step with how many are done.

        Raises:
            WangenError: the memory is full, or the latents are not finite.
            UsageError: a DoRA at another strength than 0 and 1.
            ValueError: no LoRA of such a name was loaded.
        """
        self.switch(strengths)
        settings = self._settings
        return sample_latents(
            self._kind, self._model, self.experts, scene, self._device, boundary=settings.boundary,
            cure=settings.cure, on_step=on_step,
        )  # fmt: skip

    def switch(self, strengths: Mapping[str, float] | None) -> None:
        """Give every LoRA its strength, for all that `experts` predict from now on.

        Args:
            strengths: as of `Request`.

        Raises:
            UsageError: a DoRA at another strength than 0 and 1.
            ValueError: no LoRA of such a name was loaded.
        """
        known = {lora.name for weights in self._weights for lora in weights.loras}
        if unknown := (strengths or {}).keys() - known:
            raise ValueError(f"no LoRA called {min(unknown)} was loaded")
        for loaded, weights in zip(self._loaded, self._weights, strict=True):
            given = {lora.name: lora.strength for lora in weights.loras} if strengths is None else strengths
            active = {name: strength for name, strength in given.items() if strength}
            for layer in adapter_layers(loaded.place.transformer).values():
                doras = getattr(layer, "lora_magnitude_vector", {})
                # peft's DoRA scales what stands before it as well: it is first, so that LoRAs add up.
                layer.set_adapter(sorted(active, key=lambda name: name not in doras))
                for name, strength in active.items():
                    if strength != 1 and name in doras:
                        raise UsageError(f"a DoRA at strength {strength:g}", cure="give it 1, or 0 for none of it")
                    layer.set_scale(name, strength)

    def rest(self) -> None:
        """Make room on the device, for the VAE: experts that take turns both go to host memory."""
        if self._takes_turns:
            for loaded in self._loaded:
                loaded.place.park()

    @property
    def _takes_turns(self) -> bool:
        return len(self._weights) > 1 and self._settings.offload_inactive

    def _enter(self, number: int) -> None:
        """Bring a transformer onto the device; of those that take turns the other leaves it first."""
        if self._takes_turns:
            for other, loaded in enumerate(self._loaded):
                if other != number:
                    loaded.place.park()
        self._loaded[number].place.unpark()

    def _load(self, weights: ExpertWeights) -> "_Loaded":
        """One transformer with its LoRAs, where it belongs, and what predicts with it."""
        settings, device, dtype = self._settings, self._device, DTYPES[self._settings.dtype]
        goes_over = not settings.blocks_to_swap and not self._takes_turns
        transformer = self._kind.load_transformer(
            headers.shards(weights.dit, weights.flag)[0], dtype=dtype, device=device if goes_over else "cpu",
            quantize=settings.quantize, pack_on=device,
        )  # fmt: skip
        adapters = [(lora, read_adapter(lora.path, "--lora_weight")) for lora in weights.loras]
        # A DoRA's magnitudes scale what lies below them, and adapters of other kinds lie above those before them.
        for lora, adapter in sorted(adapters, key=lambda pair: not is_dora(pair[1])):
            _put_on(transformer, lora, adapter)
        if self._takes_turns and not settings.plain:
            lay_resident_groups(transformer, settings.blocks_to_swap)
        place = BlockSwap(transformer, settings.blocks_to_swap, device, parked=self._takes_turns)
        if settings.plain:
            kernel = set_attention(transformer, settings.attention, device, dtype, backward=False)
            return _Loaded(place, partial(self._kind.predict_velocity, transformer), kernel)
        compute = Compute(attention=settings.attention, checkpointing="none", compile=settings.compile)
        swap = place if settings.blocks_to_swap else None
        model = self._kind.velocity_model(transformer, compute, device=device, dtype=dtype, swap=swap, backward=False)
        return _Loaded(place, model, model.attention)


@dataclass(frozen=True)
class _Loaded:
    """A transformer in memory: what moves it, what predicts with it, and the name of its attention kernel."""

    place: BlockSwap
    velocity: Velocity
    attention: str


def _put_on(transformer: Any, lora: Lora, adapter: Adapter) -> None:
    """Add a LoRA. It is marked as trained, so that block swap leaves it on the device, where it is read early."""
    left_out = apply_adapter(transformer, adapter, name=lora.name)
    for layer in adapter_layers(transformer).values():
        frozen = {id(parameter) for parameter in layer.get_base_layer().parameters()}
        for parameter in layer.parameters():
            parameter.requires_grad_(id(parameter) not in frozen)
    log.info("  LoRA %s at %g", lora.path.name, lora.strength)
    if left_out:
        log.warning("  %s: %s not in this model and left out, such as %s", lora.path.name,
                    many(len(left_out), "layer"), left_out[0])  # fmt: skip


def make_videos(
    requests: Iterable[Request],
    sampler: Sampler,
    decoder: Decoder,
    on_step: Callable[[int], None] = lambda _number: None,
) -> Iterator[Video]:
    """Make one video after the other; every model was or is loaded once.

    Args:
        requests: what to make.
        sampler: the transformers.
        decoder: of their latents.
        on_step: called after each sampling step with how many of that video are done.

    Yields:
        Each video as soon as it is decoded.

    Raises:
        WangenError: the memory is full, or latents are not finite; what was made before has been handed out.
    """
    for request in requests:
        latents = sampler.latents(request.scene, request.strengths, on_step)
        sampler.rest()
        yield Video(latents, decoder.decode(latents))
