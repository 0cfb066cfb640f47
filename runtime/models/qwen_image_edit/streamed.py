"""Qwen2.5-VL with its language layers left in the file: each comes onto the device when its turn is, and goes again.

All prompts of a group go through one layer, one after the other and at their own lengths, while a thread reads the
next. The layers are the library's own, called with what its model hands to the first of them.
Letters in shapes: L tokens, D width.
"""

import copy
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Qwen2_5_VLModel

from wangen.runtime.ahead import ahead
from wangen.runtime.weights.filling import Checkpoint, compare, fill

LAYERS = "language_model.layers."
GROUP_TOKENS = 2**16
"""Of prompts whose hidden states wait on the device together: 0.5 GB in 16 bits at the real width."""


@dataclass
class _Prompt:
    """A prompt on its way: its hidden states (1, L, D), and what every layer is given beside them."""

    hidden: torch.Tensor
    arguments: Mapping[str, Any]


class _Entrance(nn.Module):
    """Stands where the layers were, and keeps what the first of them would have been given."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[_Prompt] = []

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.prompts.append(_Prompt(hidden, arguments))
        return hidden


class StreamedTextEncoder:
    """The same hidden states as from the whole model, by two language layers in memory at most.

    The vision part, the embedding and the last norm are loaded: 2.5 GB in 16 bits of the real model's 15.5.

    Args:
        model: on the meta device; it is taken apart.
        checkpoint: its weights.
        dtype: of weights, activations and results.
        device: where it computes.
        fp8: the weights of the language part's linear layers are rounded to 8 bits with one scale per row.

    Raises:
        WangenError: missing, surplus or misshapen tensors.
    """

    def __init__(
        self,
        model: Qwen2_5_VLModel,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fp8: bool,
    ) -> None:
        compare(checkpoint, {name: tuple(value.shape) for name, value in model.named_parameters()})
        self.model = model
        self._checkpoint, self._dtype, self._device, self._fp8 = checkpoint, dtype, device, fp8
        self._on_meta, self._entrance = list(model.language_model.layers), _Entrance()
        model.language_model.layers = nn.ModuleList([self._entrance])
        fill(model, _part(checkpoint, lambda name: None if name.startswith(LAYERS) else name), dtype, device)

    @torch.no_grad()
    def hidden_states(
        self, inputs: Iterable[Mapping[str, Any]], on_block: Callable[[int, int], None]
    ) -> Generator[torch.Tensor, None, None]:
        """For each prompt the last hidden states (1, L, D); the layers are read again for each `GROUP_TOKENS`.

        Args:
            inputs: what the model is called with for each prompt by itself.
            on_block: told how many layers are done, and of how many.

        Raises:
            WangenError: the weights cannot be read.
        """
        for one in inputs:
            self.model(**one)
            if sum(prompt.hidden.shape[1] for prompt in self._entrance.prompts) >= GROUP_TOKENS:
                yield from self._through_layers(on_block)
        yield from self._through_layers(on_block)

    def _through_layers(self, on_block: Callable[[int, int], None]) -> list[torch.Tensor]:
        prompts, self._entrance.prompts = self._entrance.prompts, []
        total = len(self._on_meta) if prompts else 0
        done = 0
        with closing(ahead((partial(self._layer, number) for number in range(total)), 1)) as layers:
            for layer in layers:
                for prompt in prompts:
                    prompt.hidden = layer(prompt.hidden, **prompt.arguments)
                del layer  # before the next one but one is read
                done += 1
                on_block(done, total)
        return [self.model.language_model.norm(prompt.hidden) for prompt in prompts]

    def _layer(self, number: int) -> nn.Module:
        """A layer with its weights."""
        layer: nn.Module = copy.deepcopy(self._on_meta[number])
        begin = f"{LAYERS}{number}."
        part = _part(self._checkpoint, lambda name: name.removeprefix(begin) if name.startswith(begin) else None)
        linears = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        fill(layer, part, self._dtype, self._device, make_fp8=linears if self._fp8 else ())
        return layer


def _part(checkpoint: Checkpoint, rename: Callable[[str], str | None]) -> Checkpoint:
    """The tensors of a checkpoint that keep a name."""
    names = {new: old for name, old in checkpoint.names.items() if (new := rename(name)) is not None}
    return replace(checkpoint, names=names)
