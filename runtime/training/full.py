"""Full fine-tuning: every weight of the transformer is trained, in float32, and saved under the official names."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch

from wangen.generator.errors import WangenError
from wangen.generator.steps import Train
from wangen.runtime.libraries import WanTransformer3DModel
from wangen.runtime.lora import cast
from wangen.runtime.safetensors_file import Later, write_if_other
from wangen.runtime.weights.quantized import DequantizingLinear, QuantizedEmbedding


def trainable_parameters(transformer: WanTransformer3DModel) -> dict[str, torch.nn.Parameter]:
    """Turn every weight of a transformer into a trainable float32 master.

    Args:
        transformer: without adapters; 4 bytes a weight are needed, and as much again for the gradient.

    Returns:
        The parameters by name, sorted.

    Raises:
        WangenError: its weights are quantised.
    """
    require_unquantised(transformer)
    make_masters(transformer.parameters())
    return dict(sorted(transformer.named_parameters()))


def require_unquantised(transformer: WanTransformer3DModel) -> None:
    """Refuse weights that are no numbers of their own.

    Raises:
        WangenError: they are quantised.
    """
    for name, layer in transformer.named_modules():
        if isinstance(layer, DequantizingLinear | QuantizedEmbedding):
            raise WangenError(f"{name} is quantised, and whole weights cannot be trained in 8 or 4 bits",
                              cure="give --dit in 16 or 32 bits, or train a LoRA")  # fmt: skip


def make_masters(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let weights be trainable ones in float32."""
    for parameter in parameters:
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)


def save(path: Path, parameters: Mapping[str, torch.Tensor], options: Train, metadata: Mapping[str, str]) -> list[Path]:
    """Write a whole transformer, tensor by tensor.

    Args:
        path: the file; one that holds the same bytes is left alone.
        parameters: all of the transformer, by the names of the file, from `Family.saved_tensors`.
        options: `--save_precision` is the dtype of every tensor.
        metadata: the header's text fields.

    Raises:
        WangenError: the disk refused, or a number that the precision cannot hold.
    """
    dtype: torch.dtype = getattr(torch, options.save_precision)
    tensors = {
        name: Later(dtype, tuple(value.shape), partial(_stored, value, dtype, name))
        for name, value in parameters.items()
    }
    write_if_other(path, tensors, metadata)
    return [path]


def _stored(value: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    return cast(value.detach().cpu(), dtype, name)
