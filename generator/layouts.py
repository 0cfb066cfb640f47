"""The layouts in which the models of Wan and Qwen-Image are written, and where the shapes of each say its sizes.

The names are

    original     Wan-AI's own names, also those of Kijai's and most of ComfyUI's files
    diffusers    WanTransformer3DModel, AutoencoderKLWan; QwenImageTransformer2DModel, which ComfyUI calls alike
    huggingface  UMT5EncoderModel and CLIPVisionModel of transformers; ComfyUI's text encoders and clip_vision_h;
                 Qwen2.5-VL, in the names that it was published with and in those of transformers 5
    gguf         llama.cpp's names for T5
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from wangen.generator.formats import Shapes

Family = Literal["transformer", "qwen-transformer", "vae", "vae-2.2", "t5", "clip", "qwen-vl"]

HEAD_DIM = 128
"""Width of an attention head of every transformer."""
QWEN_CELLS = 4
"""Latent cells of a token of Qwen-Image, whose channels lie side by side in it."""


@dataclass(frozen=True)
class Layout:
    """One family of models in one world's names.

    Attributes:
        family: what it is.
        name: whose names.
        marks: tensors that such a file has.
        sizes: what is told by one axis of a tensor: size -> (tensor, axis).
        blocks: the beginning of the blocks' names, up to their number.
        prefix: what may stand before all names.
    """

    family: Family
    name: Literal["original", "diffusers", "huggingface", "gguf"]
    marks: tuple[str, ...]
    sizes: Mapping[str, tuple[str, int]]
    blocks: str = ""
    prefix: str = ""

    def fits(self, shapes: Shapes) -> bool:
        """Whether a file has the marks."""
        return all(mark in shapes for mark in self.marks)

    def without_prefix(self, shapes: Shapes) -> Shapes:
        """The shapes by the names that `marks` and `sizes` use."""
        if not self.prefix or self.fits(shapes):
            return shapes
        return {name.removeprefix(self.prefix): shape for name, shape in shapes.items()}


LAYOUTS = (
    Layout(
        "transformer", "original", ("patch_embedding.weight", "blocks.0.self_attn.q.weight"),
        {"dim": ("patch_embedding.weight", 0), "in_channels": ("patch_embedding.weight", 1),
         "ffn_dim": ("blocks.0.ffn.0.weight", 0), "patched_channels": ("head.head.weight", 0)},
        "blocks.",
    ),
    Layout(
        "transformer", "diffusers", ("patch_embedding.weight", "blocks.0.attn1.to_q.weight"),
        {"dim": ("patch_embedding.weight", 0), "in_channels": ("patch_embedding.weight", 1),
         "ffn_dim": ("blocks.0.ffn.net.0.proj.weight", 0), "patched_channels": ("proj_out.weight", 0)},
        "blocks.",
    ),
    Layout(
        "qwen-transformer", "diffusers", ("img_in.weight", "transformer_blocks.0.img_mod.1.weight"),
        {"dim": ("img_in.weight", 0), "cell_channels": ("img_in.weight", 1),
         "ffn_dim": ("transformer_blocks.0.img_mlp.net.0.proj.weight", 0), "patched_channels": ("proj_out.weight", 0)},
        "transformer_blocks.",
    ),
    Layout(
        "vae", "original", ("encoder.downsamples.0.residual.2.weight", "decoder.head.2.weight"),
        {"dim": ("encoder.conv1.weight", 0), "latent_channels": ("conv2.weight", 0)},
    ),
    Layout(
        "vae-2.2", "original", ("encoder.downsamples.0.downsamples.0.residual.2.weight", "decoder.head.2.weight"),
        {"dim": ("encoder.conv1.weight", 0), "decoder_dim": ("decoder.head.2.weight", 1),
         "latent_channels": ("conv2.weight", 0)},
    ),
    Layout(
        "vae", "diffusers", ("encoder.down_blocks.0.conv1.weight", "post_quant_conv.weight", "decoder.norm_out.gamma"),
        {"dim": ("encoder.conv_in.weight", 0), "latent_channels": ("post_quant_conv.weight", 0)},
    ),
    Layout(
        "vae-2.2", "diffusers",
        ("encoder.down_blocks.0.resnets.0.conv1.weight", "post_quant_conv.weight", "decoder.norm_out.gamma"),
        {"dim": ("encoder.conv_in.weight", 0), "decoder_dim": ("decoder.conv_out.weight", 1),
         "latent_channels": ("post_quant_conv.weight", 0)},
    ),
    Layout(
        "t5", "original", ("token_embedding.weight", "blocks.0.ffn.gate.0.weight"),
        {"dim": ("token_embedding.weight", 1), "vocabulary": ("token_embedding.weight", 0),
         "ffn_dim": ("blocks.0.ffn.gate.0.weight", 0)},
        "blocks.",
    ),
    Layout(
        "t5", "huggingface", ("block.0.layer.0.SelfAttention.q.weight",),
        {"dim": ("block.0.layer.0.SelfAttention.q.weight", 1), "vocabulary": ("shared.weight", 0),
         "ffn_dim": ("block.0.layer.1.DenseReluDense.wi_0.weight", 0)},
        "block.", "encoder.",
    ),
    Layout(
        "t5", "gguf", ("enc.blk.0.attn_q.weight", "token_embd.weight"),
        {"dim": ("token_embd.weight", 1), "vocabulary": ("token_embd.weight", 0),
         "ffn_dim": ("enc.blk.0.ffn_gate.weight", 0)},
        "enc.blk.",
    ),
    Layout(
        "clip", "original", ("patch_embedding.weight", "cls_embedding", "transformer.0.attn.to_qkv.weight"),
        {"dim": ("patch_embedding.weight", 0), "patch": ("patch_embedding.weight", 2)},
        "transformer.", "visual.",
    ),
    Layout(
        "clip", "huggingface", ("embeddings.patch_embedding.weight", "embeddings.class_embedding"),
        {"dim": ("embeddings.patch_embedding.weight", 0), "patch": ("embeddings.patch_embedding.weight", 2)},
        "encoder.layers.", "vision_model.",
    ),
    Layout(
        "qwen-vl", "huggingface", ("model.embed_tokens.weight", "visual.blocks.0.mlp.gate_proj.weight"),
        {"dim": ("model.embed_tokens.weight", 1), "vocabulary": ("model.embed_tokens.weight", 0)}, "model.layers.",
    ),
    Layout(
        "qwen-vl", "huggingface",
        ("model.language_model.embed_tokens.weight", "model.visual.blocks.0.mlp.gate_proj.weight"),
        {"dim": ("model.language_model.embed_tokens.weight", 1),
         "vocabulary": ("model.language_model.embed_tokens.weight", 0)},
        "model.language_model.layers.",
    ),
)  # fmt: skip


def layout_of(shapes: Shapes) -> tuple[Layout, Shapes] | None:
    """The layout whose marks a file has, and the shapes by that layout's names; None for none."""
    for layout in LAYOUTS:
        bare = layout.without_prefix(shapes)
        if layout.fits(bare):
            return layout, bare
    return None


def sizes_of(layout: Layout, shapes: Shapes) -> dict[str, int]:
    """What the shapes say: every size of the layout that is there, the number of blocks, and for transformers heads
    and output channels.

    >>> layout, shapes = layout_of({"patch_embedding.weight": (256, 16, 1, 2, 2), "blocks.0.attn1.to_q.weight": (1, 1),
    ...                             "proj_out.weight": (64, 256)})
    >>> sizes_of(layout, shapes)
    {'dim': 256, 'in_channels': 16, 'num_layers': 1, 'num_heads': 2, 'out_channels': 16}
    """
    sizes = {
        size: shape[axis] for size, (name, axis) in layout.sizes.items() if axis < len(shape := shapes.get(name, ()))
    }
    if layout.blocks:
        number = re.compile(re.escape(layout.blocks) + r"(\d{1,6})\.")
        sizes["num_layers"] = len({match[1] for name in shapes if (match := number.match(name))})
    if layout.family in ("transformer", "qwen-transformer"):
        sizes["num_heads"] = sizes.get("dim", 0) // HEAD_DIM
        cells = math.prod(shapes["patch_embedding.weight"][2:]) if layout.family == "transformer" else QWEN_CELLS
        for of_token, of_cell in (("cell_channels", "in_channels"), ("patched_channels", "out_channels")):
            if channels := sizes.pop(of_token, 0):
                sizes[of_cell] = channels // max(1, cells)
    return sizes
