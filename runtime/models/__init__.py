"""The contract between the steps and an architecture: one module per family, found through the model profile.

The steps call `family(model)` and never name one. This module imports no torch, so that judging a cache stays quick.
Letters in shapes: B batch, C channels, T frames, H and W pixels, F h w the same of latents, L tokens of text.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from wangen import profiles
from wangen.generator import headers, kinds
from wangen.generator.errors import UsageError
from wangen.generator.tasks import supported
from wangen.generator.tokenizer_file import tokenizer_digest, tokenizer_of

if TYPE_CHECKING:
    import torch

    from wangen.generator.steps import Generate


TILE_STEP_PX = 64
MIN_TILE_PX = 128


class Family(Protocol):
    """What a family's module offers."""

    def load_vae(self, path: Path, *, dtype: "torch.dtype | None" = None, device: Any = "cpu") -> Any:
        """The VAE, frozen."""

    def encode_video(
        self, vae: Any, video: "torch.Tensor", *, cache_cpu: bool = False, tile_px: int = 0
    ) -> "torch.Tensor":
        """(B, 3, T, H, W) in [-1, 1] or uint8, on any device -> normalised latents (B, C, F, h, w) in float32."""

    def decode_latents(
        self, vae: Any, latents: "torch.Tensor", *, cache_cpu: bool = False, tile_px: int = 0
    ) -> "torch.Tensor":
        """The inverse of `encode_video`, on the CPU and clamped to [-1, 1]."""

    def load_text_encoder(
        self, path: Path, *, dtype: "torch.dtype | None" = None, device: Any = "cpu", fp8: bool = False
    ) -> Any:
        """The text encoder, frozen; with `fp8` its linear layers are held in 8 bits."""

    def load_tokenizer(self, path: Path) -> Any:
        """Its tokenizer, found beside the weights or given."""

    def encode_prompts(self, text_encoder: Any, tokenizer: Any, prompts: Sequence[str]) -> "list[torch.Tensor]":
        """For each prompt its embedding (L, dim), trimmed to its own length."""

    def load_transformer(self, path: Path, *, dtype: "torch.dtype | None" = None, device: Any = "cpu") -> Any:
        """The transformer, frozen."""

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
    ) -> "torch.Tensor":
        """Velocity (B, C, F, h, w) for noisy latents, timesteps (B,) or (B, tokens), and B embeddings (L, dim)."""

    def sample_latents(
        self,
        transformer: Any,
        vae: Any,
        options: "Generate",
        texts: "Sequence[torch.Tensor]",
        on_step: Callable[[int], None] = ...,
    ) -> "torch.Tensor":
        """Denoise seeded noise to normalised latents (1, C, F, h, w)."""


def family(model: profiles.Model) -> Family:
    """The module that knows a model's architecture; importing it imports torch."""
    return cast(Family, import_module(f"{__name__}.{model.architecture}"))


def model_of_vae(path: Path) -> profiles.Model:
    """A supported model profile that uses this VAE; those that share one share strides, frame rate and bucket step.

    Raises:
        WangenError: the file is no VAE that such a profile uses; the message says what it is.
    """
    by_kind = {model.kind_of("vae"): model for model in map(profiles.model, supported())}
    return by_kind[kinds.kind_of(kinds.expect(path, tuple(by_kind), "--vae"))]


def require_tile(tile: int) -> None:
    """Refuse a side of tiles that a VAE cannot work in; 0, the whole picture, passes.

    Raises:
        UsageError: it is no multiple of 64, or below 128 pixels.
    """
    if tile and (tile < MIN_TILE_PX or tile % TILE_STEP_PX):
        raise UsageError(
            f"--vae_tile {tile}: the VAE's tiles are multiples of {TILE_STEP_PX} from {MIN_TILE_PX} pixels",
            cure="256 is a good size: larger ones are more exact, smaller ones need less memory; 0 takes no tiles",
        )


def vae_identity(vae: Path, tile: int = 0) -> str:
    """Digest that identifies a VAE and the way it works, read from headers alone.

    Args:
        vae: the weights.
        tile: side of the squares it works in, which change the latents; 0 for none.

    Raises:
        UsageError: tiles of such a size cannot be.
        WangenError: the file cannot be read.
    """
    require_tile(tile)
    from wangen.runtime.cache import digest

    identity = headers.identity(vae, "--vae")
    return digest([identity, f"tiles of {tile}"]) if tile else identity


def text_encoder_identity(t5: Path, tokenizer: Path | None, *, fp8: bool = False) -> str:
    """Digest that identifies a text encoder together with its tokenizer, read from headers alone.

    Args:
        t5: the weights.
        tokenizer: None looks for it near and inside the weights.
        fp8: the weights are rounded to 8 bits when they are loaded.

    Raises:
        WangenError: the file is no text encoder that a profile uses, or there is no tokenizer.
    """
    from wangen.runtime.cache import digest

    kinds.expect(t5, profiles.model(supported()[0]).kind_of("t5"), "--t5")
    parts = [headers.identity(t5, "--t5"), tokenizer_digest(tokenizer_of(t5, tokenizer))]
    return digest([*parts, "fp8"] if fp8 else parts)
