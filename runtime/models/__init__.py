"""The contract between the steps and an architecture: one module per family, found through the model profile.

The steps call `family(model)` and never name one. This module imports no torch, so that judging a cache stays quick.
Letters in shapes: B batch, C channels, T frames, H and W pixels, F h w the same of latents, L tokens of text.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from wangen import profiles
from wangen.generator import headers
from wangen.generator.tokenizer_file import tokenizer_of

if TYPE_CHECKING:
    import torch

    from wangen.generator.steps import Generate


class Family(Protocol):
    """What a family's module offers."""

    def load_vae(self, path: Path, *, dtype: "torch.dtype | None" = None, device: Any = "cpu") -> Any:
        """The VAE, frozen."""

    def encode_video(self, vae: Any, video: "torch.Tensor") -> "torch.Tensor":
        """(B, 3, T, H, W) in [-1, 1] -> normalised latents (B, C, F, h, w) in float32."""

    def decode_latents(self, vae: Any, latents: "torch.Tensor") -> "torch.Tensor":
        """The inverse of `encode_video`, clamped to [-1, 1]."""

    def load_text_encoder(self, path: Path, *, dtype: "torch.dtype | None" = None, device: Any = "cpu") -> Any:
        """The text encoder, frozen."""

    def load_tokenizer(self, path: Path) -> Any:
        """Its tokenizer, found beside the weights or given."""

    def encode_prompts(self, text_encoder: Any, tokenizer: Any, prompts: Sequence[str]) -> "list[torch.Tensor]":
        """For each prompt its embedding (L, dim), trimmed to its own length."""

    def load_transformer(self, path: Path, *, dtype: "torch.dtype | None" = None, device: Any = "cpu") -> Any:
        """The transformer, frozen."""

    def predict_velocity(
        self, transformer: Any, latents: "torch.Tensor", timesteps: "torch.Tensor", texts: "Sequence[torch.Tensor]"
    ) -> "torch.Tensor":
        """Velocity (B, C, F, h, w) for noisy latents, timesteps (B,) in [0, 1000] and B embeddings (L, dim)."""

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
    """A model profile that uses this VAE; profiles that share a VAE share strides, frame rate and bucket step.

    Raises:
        WangenError: the file is no VAE that any profile uses; the message says what it is.
    """
    kind = headers.identify(path)
    models = [profiles.model(name) for name in profiles.model_names()]
    found = next((model for model in models if model.kind_of("vae") == kind), models[0])
    headers.expect(path, found.kind_of("vae"), "--vae")
    return found


def text_encoder_identity(t5: Path, tokenizer: Path | None) -> str:
    """Digest that identifies a text encoder together with its tokenizer, read from headers alone.

    Raises:
        WangenError: the file is no text encoder that a profile uses, or there is no tokenizer.
    """
    from wangen.runtime.cache import digest
    from wangen.runtime.sources import digest_file

    headers.expect(t5, profiles.model(profiles.model_names()[0]).kind_of("t5"), "--t5")
    return digest([headers.identity(t5), digest_file(tokenizer_of(t5, tokenizer))])
