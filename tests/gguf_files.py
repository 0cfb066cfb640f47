"""Transformers as GGUF files, written as city96's converter does."""

from collections.abc import Callable
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file


def write_gguf(
    path: Path,
    source: Path,
    dtype: gguf.GGMLQuantizationType,
    packs: Callable[[str, torch.Tensor], bool] = lambda _name, value: value.dim() == 2,
) -> dict[str, torch.Tensor]:
    """Write the tensors of a safetensors file.

    Args:
        path: of the new file.
        source: of the safetensors file.
        dtype: of what is packed; all else is float32.
        packs: whether a tensor is, by name.

    Returns:
        The numbers that it stands for, in float32.
    """
    writer, meant = gguf.GGUFWriter(path, "wan"), {}
    for name, value in load_file(source).items():
        shape, numbers = tuple(value.shape), value.float().numpy()
        if len(shape) > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
            numbers = numbers.reshape(shape[0], -1)
        meant[name] = value.float()
        if packs(name, value):
            stored = gguf.quants.quantize(numbers, dtype)
            meant[name] = torch.from_numpy(gguf.quants.dequantize(stored, dtype))
            writer.add_tensor(name, stored, raw_dtype=dtype)
        else:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant
