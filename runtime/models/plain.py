"""The library's own forward as a velocity model: what every fast path is compared with, and `--plain`."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from wangen.runtime.models.compute import Compute
from wangen.runtime.models.inputs import Controls, Inputs


class PlainModel:
    """Predicts velocities with a library's transformer, under autocast in bfloat16.

    Args:
        transformer: with its adapter.
        predict: the family's `predict_velocity`.
        compute: checkpointing (`none` or `full`) and offloading.
        dtype: bfloat16 switches autocast on.
        attention: the name of the kernel that is set.
    """

    def __init__(
        self,
        transformer: Any,
        predict: Callable[..., torch.Tensor],
        compute: Compute,
        dtype: torch.dtype,
        attention: str,
    ) -> None:
        self.attention = attention
        self._transformer, self._predict, self._compute, self._dtype = transformer, predict, compute, dtype
        if compute.checkpointing != "none":
            transformer.enable_gradient_checkpointing()

    def __call__(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        texts: Sequence[torch.Tensor],
        *,
        condition: torch.Tensor | None = None,
        image_tokens: torch.Tensor | None = None,
        controls: Controls | None = None,
    ) -> torch.Tensor:
        """Velocities (B, C, F, h, w), as `predict_velocity`."""
        with self._autocast(latents.device), self._offload(latents.device):
            return self._predict(
                self._transformer, latents, timesteps, texts, condition=condition, image_tokens=image_tokens,
                controls=controls,
            )  # fmt: skip

    def packed(self, passes: Sequence[Inputs]) -> list[torch.Tensor]:
        """The velocities of several batches, one after the other."""
        return [self(one.latents, one.timesteps, one.texts, **one.given) for one in passes]

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self._dtype == torch.bfloat16:
            return torch.autocast(device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _offload(self, device: torch.device) -> AbstractContextManager[Any]:
        if self._compute.offload:
            return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
        return contextlib.nullcontext()
