"""The contract between the steps and an architecture: one module per family, found through the model profile.

The steps call `family(model)` and never name one. This module imports no torch, so that judging a cache stays quick.
Letters in shapes: B batch, C channels, T frames, H and W pixels, F h w the same of latents, L tokens of text.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from wangen import profiles
from wangen.generator import headers, kinds
from wangen.generator.errors import UsageError
from wangen.generator.sampling_refusals import TILES_PX, require_tile
from wangen.generator.tasks import require_supported
from wangen.generator.tokenizer_file import tokenizer_digest, tokenizer_of
from wangen.generator.vae_twins import twin_warning
from wangen.runtime.decoders.choice import DECODERS
from wangen.runtime.decoders.pyav import PYAV

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from wangen.runtime.memory.blocks import BlockWeights
    from wangen.runtime.models.compute import Compute
    from wangen.runtime.models.inputs import Controls, Inputs


log = logging.getLogger("wangen")

TEXT_TASKS = ("t2v-14B", "ti2v-5B")
"""For each VAE the model that a cache is for when nothing else is said: those that share a VAE share its entries."""
I2V_OF = {"t2v-14B": "i2v-14B", "ti2v-5B": "ti2v-5B"}


class LatentEncoder(Protocol):
    """The encoding half of a VAE."""

    def encode(self, video: "torch.Tensor", *, cache_cpu: bool = False, tile_px: int = 0) -> "torch.Tensor":
        """(B, 3, T, H, W) in [-1, 1] or uint8, on any device -> normalised latents (B, C, F, h, w) in float32."""

    def encode_condition(
        self, images: "torch.Tensor", num_frames: int, *, cache_cpu: bool = False, tile_px: int = 0
    ) -> "torch.Tensor":
        """(B, 3, 1, H, W) -> (B, C, F, h, w): what encoding the image with mid grey after it for T frames gives."""


class PromptEncoder(Protocol):
    """A text encoder with its tokenizer."""

    def encode(
        self,
        prompts: Sequence[str],
        on_block: Callable[[int, int], None] = ...,
        *,
        pictures: "Sequence[Sequence[Image]] | None" = None,
    ) -> "list[torch.Tensor]":
        """For each prompt its embedding (L, dim) on the CPU, trimmed to its own length.

        `on_block` is told how many blocks are done, and of how many. `pictures` are the control images of each prompt,
        in RGB and of any size, where the model's template shows them.
        """


class VelocityModel(Protocol):
    """A transformer with its adapter, as training calls it."""

    @property
    def attention(self) -> str:
        """The name of the attention kernel that runs."""

    def __call__(
        self,
        latents: "torch.Tensor",
        timesteps: "torch.Tensor",
        texts: "Sequence[torch.Tensor]",
        *,
        condition: "torch.Tensor | None" = None,
        image_tokens: "torch.Tensor | None" = None,
        controls: "Controls | None" = None,
    ) -> "torch.Tensor":
        """Velocity (B, C, F, h, w), as `Family.predict_velocity`."""

    def packed(self, passes: "Sequence[Inputs]") -> "list[torch.Tensor]":
        """The velocities of several batches of different shapes, as one sequence where the model can."""


class Family(Protocol):
    """What a family's module offers; what none of its models asks for (an image encoder, clean frames) it may lack."""

    def load_latent_encoder(self, path: Path, *, dtype: "torch.dtype", device: Any, plain: bool) -> LatentEncoder:
        """What the caching step encodes with; `plain` takes the library's module."""

    def load_prompt_encoder(
        self,
        path: Path,
        tokenizer: Path | None,
        *,
        dtype: "torch.dtype",
        device: Any,
        fp8: bool,
        plain: bool,
        model: profiles.Model,
    ) -> PromptEncoder:
        """What the caching step encodes captions with, as the model asks; `plain` takes the library's module."""

    def load_vae(self, path: Path, *, dtype: "torch.dtype | None" = None, device: Any = "cpu") -> Any:
        """The VAE, frozen."""

    def decode_latents(
        self,
        vae: Any,
        latents: "torch.Tensor",
        *,
        cache_cpu: bool = False,
        tile_px: int = 0,
        on_chunk: Callable[[], None] = ...,
    ) -> "torch.Tensor":
        """A `LatentEncoder`'s inverse, on the CPU and clamped to [-1, 1]; `on_chunk` is called before each chunk."""

    def load_transformer(
        self,
        path: Path,
        *,
        dtype: "torch.dtype | None" = None,
        device: Any = "cpu",
        quantize: Any = None,
        pack_on: "torch.device | None" = None,
    ) -> Any:
        """The transformer, frozen; `quantize` is the form that its blocks' linear layers get while they are read.

        `pack_on` is the device that brings them into it.
        """

    def transformer_names(self, names: Iterable[str]) -> Mapping[str, str]:
        """The names of a transformer's tensors in a file, without prefix -> those of diffusers."""

    def original_tensor_name(self, name: str) -> str:
        """The official name of a transformer's tensor, given that of diffusers."""

    def saved_tensors(self, parameters: "Mapping[str, torch.Tensor]", dit: Path) -> "dict[str, torch.Tensor]":
        """A whole trained transformer, given by diffusers' names, as its file holds it; `dit` is what it was before."""

    def load_image_encoder(self, path: Path, *, dtype: "torch.dtype | None" = None, device: Any = "cpu") -> Any:
        """The image encoder, frozen; for models that are conditioned on what an image shows."""

    def encode_images(self, image_encoder: Any, images: "torch.Tensor") -> "torch.Tensor":
        """(B, 3, H, W) in [-1, 1] -> tokens (B, N, dim)."""

    def predict_velocity(
        self,
        transformer: Any,
        latents: "torch.Tensor",
        timesteps: "torch.Tensor",
        texts: "Sequence[torch.Tensor]",
        *,
        condition: "torch.Tensor | None" = None,
        image_tokens: "torch.Tensor | None" = None,
        controls: "Controls | None" = None,
    ) -> "torch.Tensor":
        """Velocity (B, C, F, h, w) for noisy latents, timesteps (B,) or (B, tokens), and B embeddings (L, dim)."""

    def velocity_model(
        self,
        transformer: Any,
        compute: "Compute",
        *,
        device: "torch.device",
        dtype: "torch.dtype",
        swap: "BlockWeights | None" = None,
        backward: bool = True,
    ) -> VelocityModel:
        """What velocities are predicted with: the fast path, or with `compute.plain` the library's own forward.

        `backward` asks for an attention kernel that has a gradient.
        """

    def guided(self, prompted: "torch.Tensor", negative: "torch.Tensor", scale: float) -> "torch.Tensor":
        """Classifier-free guidance: the velocity that two velocities (B, C, F, h, w) make, for a scale above 1."""

    def timesteps_per_token(
        self, timesteps: "torch.Tensor", latents: "torch.Tensor", clean_frames: Sequence[int]
    ) -> "torch.Tensor":
        """Timesteps (B,) -> (B, tokens), with 0 for the tokens of each item's first latent frames."""


def family(model: profiles.Model) -> Family:
    """The module that knows a model's architecture; importing it imports torch."""
    return cast(Family, import_module(f"{__name__}.{model.architecture}"))


def model_of_cache(task: str | None, *, vae: Path | None = None, i2v: bool = False) -> profiles.Model:
    """The model profile that a cache is made for.

    Args:
        task: a profile's name; None takes the one of text-to-video (with `i2v` of image-to-video) with this VAE.
        vae: must be of the kind that the profile uses; None leaves it open.
        i2v: the first frame is a condition.

    Raises:
        UsageError: the two contradict each other, or caching for the model is not in this version.
        WangenError: the file is no such VAE; the message says what it is.
    """
    if task is None:
        task = I2V_OF[_task_of_vae(vae)] if i2v else _task_of_vae(vae)
    model = profiles.model(task)
    if i2v and model.condition in ("text", "controls"):
        raise UsageError(f"--i2v: {task} has no first frame as condition", cure="give --task i2v-14B or i2v-A14B")
    require_supported(model, "caching for")
    if vae:
        expect_vae(vae, model)
    return model


def expect_vae(vae: Path, model: profiles.Model) -> None:
    """See that a VAE is what a model takes, and warn where it seems to be the other of two that look alike.

    Raises:
        WangenError: it is no such VAE; the message says what it is.
    """
    kinds.expect(vae, model.kind_of("vae"), "--vae", model.name)
    if warning := twin_warning(vae, model):
        log.warning("  %s", warning)


def _task_of_vae(vae: Path | None) -> str:
    """The first of the profiles for texts that has this VAE."""
    if vae is None:
        return TEXT_TASKS[0]
    by_kind = {profiles.model(task).kind_of("vae"): task for task in TEXT_TASKS}
    return by_kind[kinds.kind_of(kinds.expect(vae, tuple(by_kind), "--vae"))]


def vae_identity(vae: Path, tile: int = 0, decoder: str = PYAV.name) -> str:
    """Digest that identifies a VAE and the way it works, read from headers alone.

    Args:
        vae: the weights.
        tile: side of the squares it works in, which change the latents; 0 for none.
        decoder: name of what decodes the clips.

    Raises:
        UsageError: tiles of such a size cannot be.
        WangenError: the file cannot be read.
    """
    from wangen.runtime.cache import decoded_by, in_tiles

    require_tile(tile)
    return decoded_by(in_tiles(headers.identity(vae, "--vae"), tile), decoder)


def way_of(vae: Path, identities: Collection[str]) -> tuple[int, str] | None:
    """The tiles' side, 0 for none, and the decoder with which a VAE is one of these identities; None where it is not.

    Raises:
        WangenError: the file cannot be read.
    """
    from wangen.runtime.cache import decoded_by, in_tiles

    identity = headers.identity(vae, "--vae")
    sides = (0, *TILES_PX)
    ways = product(sides, DECODERS)
    return next((way for way in ways if decoded_by(in_tiles(identity, way[0]), way[1]) in identities), None)


def text_encoder_identity(
    t5: Path, tokenizer: Path | None, *, fp8: bool = False, model: profiles.Model | None = None
) -> str:
    """Digest that identifies a text encoder together with its tokenizer, read from headers alone.

    Args:
        t5: the weights.
        tokenizer: None looks for it near and inside the weights.
        fp8: the weights are rounded to 8 bits when they are loaded.
        model: whose text encoder it is; None means Wan's.

    Raises:
        WangenError: the file is no text encoder that a profile uses, or there is no tokenizer.
    """
    from wangen.runtime.cache import digest

    model = model or profiles.model(TEXT_TASKS[0])
    kinds.expect(t5, model.kind_of("t5"), "--t5")
    parts = [headers.identity(t5, "--t5"), tokenizer_digest(tokenizer_of(t5, tokenizer, model))]
    return digest([*parts, "fp8"] if fp8 else parts)
