"""Weight files whose kind is asked for: those of the official vectors, and small layouts of the published models."""

from collections.abc import Mapping
from pathlib import Path

import published
from parity import DITS, VECTORS

from wangen.generator.formats import Header, TensorInfo
from wangen.generator.kinds import examine

T2V, I2V = DITS["dit_t2v21"], DITS["dit_i2v21"]
I2V22, TI2V = DITS["dit_i2v22_a14b"], DITS["dit_ti2v5b"]
LORA = VECTORS / "lora_t2v21" / "lora_musubi.safetensors"

T2V_SMALL = published.transformer(dim=256, ffn_dim=512, num_layers=2)
I2V_SMALL = published.transformer(dim=256, ffn_dim=512, num_layers=2, in_channels=36, image_branch=True)
UMT5_SMALL = published.umt5(vocabulary=64, dim=32, attention_dim=32, ffn_dim=64, num_heads=4, num_layers=2)


def header_of(shapes: Mapping[str, tuple[int, ...]]) -> Header:
    """The header of a file with these tensors."""
    return Header({name: TensorInfo("BF16", tuple(shape)) for name, shape in shapes.items()}, {}, "safetensors")


def words_of(tmp_path: Path, shapes: published.Shapes) -> str:
    """What a file with these tensors is called."""
    return examine(published.write_sparse(tmp_path / "a.safetensors", shapes)).words
