"""The tensors of the real models, from their published configurations: names and shapes, and files of that size.

Written after the official modules (Wan2.1 and Wan2.2: wan/modules/model.py, vae2_1.py, vae2_2.py, t5.py, clip.py and
wan/configs), independently of every converter; `test_full_size` holds the same functions, called with small sizes,
against the files that the official code wrote (tests/vectors).
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

Shapes = dict[str, tuple[int, ...]]

ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


def transformer(
    *,
    dim: int,
    ffn_dim: int,
    num_layers: int,
    in_channels: int = 16,
    out_channels: int = 16,
    text_dim: int = 4096,
    image_branch: bool = False,
    num_images: int = 1,
) -> Shapes:
    """`WanModel`; with the image branch of Wan 2.1, whose positions are learned where there are two images."""
    shapes = {"patch_embedding.weight": (dim, in_channels, 1, 2, 2), "patch_embedding.bias": (dim,)}
    shapes |= linear("text_embedding.0", text_dim, dim) | linear("text_embedding.2", dim, dim)
    shapes |= linear("time_embedding.0", 256, dim) | linear("time_embedding.2", dim, dim)
    shapes |= linear("time_projection.1", dim, 6 * dim)
    for number in range(num_layers):
        block = f"blocks.{number}"
        shapes |= attention(f"{block}.self_attn", dim) | attention(f"{block}.cross_attn", dim)
        if image_branch:
            shapes |= linear(f"{block}.cross_attn.k_img", dim, dim) | linear(f"{block}.cross_attn.v_img", dim, dim)
            shapes[f"{block}.cross_attn.norm_k_img.weight"] = (dim,)
        shapes |= norm(f"{block}.norm3", dim)
        shapes |= linear(f"{block}.ffn.0", dim, ffn_dim) | linear(f"{block}.ffn.2", ffn_dim, dim)
        shapes[f"{block}.modulation"] = (1, 6, dim)
    shapes |= linear("head.head", dim, 4 * out_channels) | {"head.modulation": (1, 2, dim)}
    if image_branch:
        shapes |= norm("img_emb.proj.0", 1280) | linear("img_emb.proj.1", 1280, 1280)
        shapes |= linear("img_emb.proj.3", 1280, dim) | norm("img_emb.proj.4", dim)
        if num_images == 2:
            shapes["img_emb.emb_pos"] = (1, 2 * 257, 1280)
    return shapes


def qwen_transformer(*, dim: int = 3072, num_layers: int = 60, text_dim: int = 3584) -> Shapes:
    """`QwenImageTransformer2DModel`: Qwen-Image and its Edit models."""
    shapes = linear("img_in", 64, dim) | linear("txt_in", text_dim, dim) | {"txt_norm.weight": (text_dim,)}
    shapes |= linear("time_text_embed.timestep_embedder.linear_1", 256, dim)
    shapes |= linear("time_text_embed.timestep_embedder.linear_2", dim, dim)
    for number in range(num_layers):
        block = f"transformer_blocks.{number}"
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            shapes |= linear(f"{block}.attn.{name}", dim, dim)
        shapes |= {f"{block}.attn.norm_{name}.weight": (128,) for name in ("q", "k", "added_q", "added_k")}
        for stream in ("img", "txt"):
            shapes |= linear(f"{block}.{stream}_mod.1", dim, 6 * dim)
            shapes |= linear(f"{block}.{stream}_mlp.net.0.proj", dim, 4 * dim)
            shapes |= linear(f"{block}.{stream}_mlp.net.2", 4 * dim, dim)
    return shapes | linear("norm_out.linear", dim, 2 * dim) | linear("proj_out", dim, 64)


def vae21(dim: int = 96) -> Shapes:
    """`WanVAE_` of Wan 2.1: dim * (1, 2, 4, 4), two residual blocks a stage (three in the decoder), z 16."""
    shapes = conv("encoder.conv1", 3, dim) | conv("conv1", 32, 32, (1, 1, 1)) | conv("conv2", 16, 16, (1, 1, 1))
    widths, index = [dim, dim, 2 * dim, 4 * dim, 4 * dim], 0
    for stage in range(4):
        for inputs in (widths[stage], widths[stage + 1]):
            shapes |= residual(f"encoder.downsamples.{index}", inputs, widths[stage + 1])
            index += 1
        if stage < 3:
            shapes |= resample(f"encoder.downsamples.{index}", widths[stage + 1], time=1 if stage else 0)
            index += 1
    shapes |= middle_and_head("encoder", 4 * dim, 4 * dim, 32)
    shapes |= conv("decoder.conv1", 16, 4 * dim) | middle_and_head("decoder", 4 * dim, dim, 3)
    widths, index = [4 * dim, 4 * dim, 4 * dim, 2 * dim, dim], 0
    for stage in range(4):
        entering = widths[stage] // 2 if stage else widths[0]  # upsampling halves the channels
        for inputs in (entering, widths[stage + 1], widths[stage + 1]):
            shapes |= residual(f"decoder.upsamples.{index}", inputs, widths[stage + 1])
            index += 1
        if stage < 3:
            width = widths[stage + 1]
            shapes |= resample(f"decoder.upsamples.{index}", width, width // 2, time=2 if stage < 2 else 0)
            index += 1
    return shapes


def vae22(dim: int = 160, decoder_dim: int = 256) -> Shapes:
    """`WanVAE_` of Wan 2.2: patches of 2x2 pixels, stages with shortcuts that have no weights, z 48."""
    shapes = conv("encoder.conv1", 12, dim) | conv("conv1", 96, 96, (1, 1, 1)) | conv("conv2", 48, 48, (1, 1, 1))
    widths = [dim, dim, 2 * dim, 4 * dim, 4 * dim]
    for stage in range(4):
        name = f"encoder.downsamples.{stage}.downsamples"
        for index, inputs in enumerate((widths[stage], widths[stage + 1])):
            shapes |= residual(f"{name}.{index}", inputs, widths[stage + 1])
        if stage < 3:
            shapes |= resample(f"{name}.2", widths[stage + 1], time=1 if stage else 0)
    shapes |= middle_and_head("encoder", 4 * dim, 4 * dim, 96)
    shapes |= conv("decoder.conv1", 48, 4 * decoder_dim) | middle_and_head("decoder", 4 * decoder_dim, decoder_dim, 12)
    widths = [4 * decoder_dim, 4 * decoder_dim, 4 * decoder_dim, 2 * decoder_dim, decoder_dim]
    for stage in range(4):
        name = f"decoder.upsamples.{stage}.upsamples"
        for index, inputs in enumerate((widths[stage], widths[stage + 1], widths[stage + 1])):
            shapes |= residual(f"{name}.{index}", inputs, widths[stage + 1])
        if stage < 3:
            shapes |= resample(f"{name}.3", widths[stage + 1], time=2 if stage < 2 else 0)
    return shapes


def umt5(
    *,
    vocabulary: int = 256384,
    dim: int = 4096,
    attention_dim: int = 4096,
    ffn_dim: int = 10240,
    num_heads: int = 64,
    num_layers: int = 24,
) -> Shapes:
    """`T5Encoder` with `shared_pos=False`: umT5-xxl's encoder."""
    shapes: Shapes = {"token_embedding.weight": (vocabulary, dim), "norm.weight": (dim,)}
    for number in range(num_layers):
        block = f"blocks.{number}"
        shapes |= {f"{block}.{name}.weight": (dim,) for name in ("norm1", "norm2")}
        shapes |= {f"{block}.attn.{name}.weight": (attention_dim, dim) for name in "qkv"}
        shapes |= {f"{block}.attn.o.weight": (dim, attention_dim), f"{block}.ffn.fc2.weight": (dim, ffn_dim)}
        shapes |= {f"{block}.ffn.{name}.weight": (ffn_dim, dim) for name in ("gate.0", "fc1")}
        shapes[f"{block}.pos_embedding.embedding.weight"] = (32, num_heads)
    return shapes


def clip_visual(
    *, dim: int = 1280, num_layers: int = 32, out_dim: int = 1024, image_px: int = 224, patch_px: int = 14
) -> Shapes:
    """`VisionTransformer` of the xlm-roberta-large-vit-huge-14 model."""
    num_tokens = (image_px // patch_px) ** 2 + 1
    shapes: Shapes = {
        "visual.patch_embedding.weight": (dim, 3, patch_px, patch_px),
        "visual.cls_embedding": (1, 1, dim),
        "visual.pos_embedding": (1, num_tokens, dim),
        "visual.head": (dim, out_dim),
    }
    shapes |= norm("visual.pre_norm", dim) | norm("visual.post_norm", dim)
    for number in range(num_layers):
        block = f"visual.transformer.{number}"
        shapes |= norm(f"{block}.norm1", dim) | norm(f"{block}.norm2", dim)
        shapes |= linear(f"{block}.attn.to_qkv", dim, 3 * dim) | linear(f"{block}.attn.proj", dim, dim)
        shapes |= linear(f"{block}.mlp.0", dim, 4 * dim) | linear(f"{block}.mlp.2", 4 * dim, dim)
    return shapes


def clip_textual(
    *, vocabulary: int = 250002, num_positions: int = 514, dim: int = 1024, num_layers: int = 24, out_dim: int = 1024
) -> Shapes:
    """`XLMRobertaCLIP`'s other half, which the checkpoint holds and nobody needs."""
    middle = (dim + out_dim) // 2
    shapes: Shapes = {
        "log_scale": (),
        "textual.token_embedding.weight": (vocabulary, dim),
        "textual.type_embedding.weight": (1, dim),
        "textual.pos_embedding.weight": (num_positions, dim),
        "textual.head.0.weight": (middle, dim),
        "textual.head.2.weight": (out_dim, middle),
    }
    for number in range(num_layers):
        block = f"textual.blocks.{number}"
        for name in "qkvo":
            shapes |= linear(f"{block}.attn.{name}", dim, dim)
        shapes |= norm(f"{block}.norm1", dim) | norm(f"{block}.norm2", dim)
        shapes |= linear(f"{block}.ffn.0", dim, 4 * dim) | linear(f"{block}.ffn.2", 4 * dim, dim)
    return shapes | norm("textual.norm", dim)


def num_elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The number of parameters."""
    return sum(map(math.prod, shapes.values()))


def fp8_scaled(shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A transformer as ComfyUI's fp8_scaled files hold it: 8-bit matrices within the blocks, each with a scale."""
    tensors = {f"model.diffusion_model.{name}": ("F16", shape) for name, shape in shapes.items()}
    for name, (_, shape) in list(tensors.items()):
        if ".blocks." in name and len(shape) == 2:
            tensors[name] = ("F8_E4M3", shape)
            tensors[name.removesuffix("weight") + "scale_weight"] = ("F32", ())
    return tensors | {"model.diffusion_model.scaled_fp8": ("F8_E4M3", (2,))}


def write_sparse(path: Path, shapes: Shapes, dtype: str = "BF16") -> Path:
    """A safetensors file with a true header and a body of zeros that takes no room on the disk."""
    return write_sparse_mixed(path, {name: (dtype, shape) for name, shape in shapes.items()})


def write_sparse_mixed(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Path:
    """The same with a dtype for each tensor."""
    fields, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * ELEMENT_BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    if os.name == "nt" and position > 2**30:
        pytest.skip("a file of many gigabytes takes no room only where files have holes")
    text = json.dumps(fields).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
    return path


def write_sparse_shards(
    folder: Path, shapes: Shapes, count: int, stem: str = "diffusion_pytorch_model", dtype: str = "BF16"
) -> Path:
    """A sharded checkpoint with its index; returns the folder."""
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_split(shapes, count), start=1):
        name = f"{stem}-{number:05d}-of-{count:05d}.safetensors"
        write_sparse(folder / name, {key: shapes[key] for key in names}, dtype)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": num_elements(shapes) * ELEMENT_BYTES[dtype]}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _split(names: Iterable[str], count: int) -> list[list[str]]:
    listed = list(names)
    size = -(-len(listed) // count)
    return [listed[first : first + size] for first in range(0, len(listed), size)]


def linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def attention(name: str, dim: int) -> Shapes:
    shapes: Shapes = {f"{name}.norm_q.weight": (dim,), f"{name}.norm_k.weight": (dim,)}
    for part in "qkvo":
        shapes |= linear(f"{name}.{part}", dim, dim)
    return shapes


def conv(name: str, inputs: int, outputs: int, kernel: tuple[int, ...] = (3, 3, 3)) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, *kernel), f"{name}.bias": (outputs,)}


def residual(name: str, inputs: int, outputs: int) -> Shapes:
    shapes: Shapes = {f"{name}.residual.0.gamma": (inputs, 1, 1, 1), f"{name}.residual.3.gamma": (outputs, 1, 1, 1)}
    shapes |= conv(f"{name}.residual.2", inputs, outputs) | conv(f"{name}.residual.6", outputs, outputs)
    return shapes | (conv(f"{name}.shortcut", inputs, outputs, (1, 1, 1)) if inputs != outputs else {})


def resample(name: str, width: int, outputs: int | None = None, *, time: int) -> Shapes:
    """A resampling of pixels, and of frames where `time` says how many times the channels its convolution gives."""
    shapes = conv(f"{name}.resample.1", width, outputs or width, (3, 3))
    return shapes | (conv(f"{name}.time_conv", width, time * width, (3, 1, 1)) if time else {})


def middle_and_head(side: str, width: int, last: int, outputs: int) -> Shapes:
    """Residual, attention, residual; and at the end of the side norm and convolution."""
    shapes = residual(f"{side}.middle.0", width, width) | residual(f"{side}.middle.2", width, width)
    shapes[f"{side}.middle.1.norm.gamma"] = (width, 1, 1)
    shapes |= conv(f"{side}.middle.1.to_qkv", width, 3 * width, (1, 1))
    shapes |= conv(f"{side}.middle.1.proj", width, width, (1, 1))
    shapes[f"{side}.head.0.gamma"] = (last, 1, 1, 1)
    return shapes | conv(f"{side}.head.2", last, outputs)


WAN_14B = {"dim": 5120, "ffn_dim": 13824, "num_layers": 40}

TRANSFORMERS: dict[str, Shapes] = {
    "t2v-1.3B": transformer(dim=1536, ffn_dim=8960, num_layers=30),
    "t2v-14B": transformer(**WAN_14B),
    "i2v-14B": transformer(**WAN_14B, in_channels=36, image_branch=True),
    "flf2v-14B": transformer(**WAN_14B, in_channels=36, image_branch=True, num_images=2),
    "t2v-A14B": transformer(**WAN_14B),
    "i2v-A14B": transformer(**WAN_14B, in_channels=36),
    "ti2v-5B": transformer(dim=3072, ffn_dim=14336, num_layers=30, in_channels=48, out_channels=48),
    **dict.fromkeys(("qwen-image", "qwen-image-edit", "qwen-image-edit-plus"), qwen_transformer()),
}
"""The transformer (each expert) of every task."""
