"""Weight files whose kind is asked for: those of the official vectors, and small layouts of the published models."""

from collections.abc import Mapping
from pathlib import Path

import published

from wangen.generator.formats import Header, TensorInfo
from wangen.generator.kinds import examine

VECTORS = Path(__file__).parent / "vectors"
T2V = VECTORS / "dit_t2v21" / "model.safetensors"
I2V = VECTORS / "dit_i2v21" / "model.safetensors"
I2V22 = VECTORS / "dit_i2v22_a14b" / "model.safetensors"
TI2V = VECTORS / "dit_ti2v5b" / "model.safetensors"
VAE21 = VECTORS / "vae21" / "Wan2.1_VAE.pth"
VAE22 = VECTORS / "vae22" / "Wan2.2_VAE.pth"
T5 = VECTORS / "t5" / "models_t5_umt5-xxl-enc-bf16.pth"
CLIP = VECTORS / "clip" / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
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
