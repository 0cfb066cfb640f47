"""Wan transformers in every layout -> diffusers' `WanTransformer3DModel`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from wangen.generator.errors import WangenError
from wangen.generator.kinds import expect
from wangen.generator.layouts import HEAD_DIM
from wangen.generator.lora_keys import BLOCK_MODULES, OUTER_MODULES
from wangen.runtime.libraries import TimestepEmbedding, WanTransformer3DModel
from wangen.runtime.memory.quantize import Mode, in_blocks
from wangen.runtime.weights.filling import Checkpoint, build, fill, open_checkpoint

BLOCK = re.compile(r"(?P<start>blocks\.\d+\.)(?P<rest>.+)")
BLOCK_TENSORS = {"modulation": "scale_shift_table"}
BLOCK_NAMES = {
    **BLOCK_MODULES,
    "self_attn.norm_q": "attn1.norm_q",
    "self_attn.norm_k": "attn1.norm_k",
    "cross_attn.norm_q": "attn2.norm_q",
    "cross_attn.norm_k": "attn2.norm_k",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "norm3": "norm2",
}
OUTER_TENSORS = {
    "head.modulation": "scale_shift_table",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
}
OUTER_NAMES = {
    **OUTER_MODULES,
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
}

TRANSFORMERS = (
    "wan-transformer-t2v",
    "wan-transformer-i2v",
    "wan-transformer-flf2v",
    "wan-transformer-i2v-2.2",
    "wan-transformer-ti2v",
)
"""The kinds that are read here, in the words of `kinds.kind_of`."""


def load_transformer(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantize: Mode | Literal["none"] | None = None,
    pack_on: torch.device | None = None,
) -> WanTransformer3DModel:
    """A Wan 2.1 or 2.2 transformer, frozen and in eval mode; which one is read from its tensors.

    Args:
        path: `.safetensors` (whole, any shard or the index), `.pth`, `.gguf`, or a diffusers folder; in the original
            names, with ComfyUI's prefixes or without, or in those of diffusers.
        dtype: None keeps what the file stores, and a file that mixes precisions needs another to compute with.
            Another dtype casts all weights except those that diffusers keeps in float32 (time embedder, modulation
            tables, the affine norm): their products steer every block, and rounding them costs more than they weigh.
            The forward pass then computes in `dtype`. Linear weights that
            the file stores in 8 bits or in GGUF's blocks stay so in memory and become `dtype` when they are used.
        device: where the weights go, tensor by tensor; `meta` compares names and shapes only.
        quantize: the form that the linear layers of the blocks get, each as soon as it is read (`memory.quantize`);
            `none` puts only what the file stores in few bits into layers of that kind, which training needs.
        pack_on: the device that quantises, where the weights stay on a slower one.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors.
    """
    header = expect(path, TRANSFORMERS, "--dit")
    checkpoint = open_checkpoint(path, header, transformer_names)
    config = _config(checkpoint)
    model = build(path, lambda: WanTransformer3DModel(**config))
    model.condition_embedder.timesteps_proj = Timesteps(model.config.freq_dim)
    kept = tuple(WanTransformer3DModel._keep_in_fp32_modules)
    convert = in_blocks(quantize, pack_on) if quantize else None
    fill(model, checkpoint, dtype, device, keep_float32=kept, convert=convert)
    shield_from_autocast(model)
    return model


class Timesteps(torch.nn.Module):
    """The sinusoids of a timestep, computed in float64 as `sinusoidal_embedding_1d` of the official code does.

    In float32, as in diffusers, they alone move the output by 2e-5.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        """(N,) in [0, 1000] -> (N, dim) in float32: cosines, then sines."""
        half = self.dim // 2
        exponents = torch.arange(half, dtype=torch.float64, device=timesteps.device) / -half
        angles = timesteps.to(torch.float64)[:, None] * torch.pow(10000.0, exponents)
        return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def transformer_names(names: Iterable[str]) -> Mapping[str, str]:
    """File name -> diffusers name, for the original names and for those of diffusers itself.

    diffusers has a converter too; it leaves out the position embedding of first-and-last-frame models.

    >>> transformer_names(["blocks.3.self_attn.o.bias", "head.modulation"])
    {'blocks.3.self_attn.o.bias': 'blocks.3.attn1.to_out.0.bias', 'head.modulation': 'scale_shift_table'}
    """
    return {name: _diffusers_name(name) for name in names}


def _diffusers_name(name: str) -> str:
    block = BLOCK.fullmatch(name)
    start, rest = (block["start"], block["rest"]) if block else ("", name)
    tensors, modules = (BLOCK_TENSORS, BLOCK_NAMES) if block else (OUTER_TENSORS, OUTER_NAMES)
    module, _, kind = rest.rpartition(".")
    if rest in tensors:
        return start + tensors[rest]
    return start + (f"{modules[module]}.{kind}" if module in modules else rest)


def saved_tensors(parameters: Mapping[str, torch.Tensor], dit: Path) -> dict[str, torch.Tensor]:
    """A whole transformer by the official names.

    Args:
        parameters: by their names in diffusers.
        dit: the file that it was trained from; nothing but the tensors tells what a Wan is.
    """
    del dit
    return {original_tensor_name(name): value for name, value in parameters.items()}


def original_tensor_name(name: str) -> str:
    """The official name of a transformer's tensor.

    >>> original_tensor_name("blocks.3.attn1.to_out.0.bias"), original_tensor_name("scale_shift_table")
    ('blocks.3.self_attn.o.bias', 'head.modulation')
    """
    block = BLOCK.fullmatch(name)
    start, rest = (block["start"], block["rest"]) if block else ("", name)
    tensors, modules = (BLOCK_TENSORS, BLOCK_NAMES) if block else (OUTER_TENSORS, OUTER_NAMES)
    whole = {new: original for original, new in tensors.items()}
    if rest in whole:
        return start + whole[rest]
    module, _, kind = rest.rpartition(".")
    originals = {new: original for original, new in modules.items()}
    return start + (f"{originals[module]}.{kind}" if module in originals else rest)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The sizes of a transformer, read from its tensors.

    Raises:
        WangenError: a tensor that tells a size is missing, or the width is no multiple of the head's.
    """
    patch_size = tuple(checkpoint.size("patch_embedding.weight", axis) for axis in (2, 3, 4))
    dim = checkpoint.size("patch_embedding.weight", 0)
    if not dim or dim % HEAD_DIM:
        raise WangenError(f"a transformer {dim} wide: not a multiple of the head size {HEAD_DIM}",
                          where=str(checkpoint.path))  # fmt: skip
    config = {
        "patch_size": patch_size,
        "num_attention_heads": dim // HEAD_DIM,
        "attention_head_dim": HEAD_DIM,
        "in_channels": checkpoint.size("patch_embedding.weight", 1),
        "out_channels": checkpoint.size("proj_out.weight", 0) // max(1, torch.Size(patch_size).numel()),
        "text_dim": checkpoint.size("condition_embedder.text_embedder.linear_1.weight", 1),
        "freq_dim": checkpoint.size("condition_embedder.time_embedder.linear_1.weight", 1),
        "ffn_dim": checkpoint.size("blocks.0.ffn.net.0.proj.weight", 0),
        "num_layers": checkpoint.num_blocks("blocks."),
    }
    if "blocks.0.attn2.add_k_proj.weight" in checkpoint.names:
        image_embedder = "condition_embedder.image_embedder"
        config |= {"image_dim": checkpoint.size(f"{image_embedder}.norm1.weight", 0), "added_kv_proj_dim": dim}
        if f"{image_embedder}.pos_embed" in checkpoint.names:
            config["pos_embed_seq_len"] = checkpoint.size(f"{image_embedder}.pos_embed", 1)
    return config


def shield_from_autocast(model: WanTransformer3DModel) -> None:
    """Let autocast, under which training runs, leave some modules alone.

    It would round the time embedding, which the official code keeps in float32 (its projection too; diffusers rounds
    that one). And on CUDA it would turn queries and keys into float32 at their norms, which flash attention and
    xformers refuse; the CPU's autocast does not.
    """
    model.condition_embedder.time_embedder.__class__ = _ShieldedTimeEmbedding
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.__class__ = _ShieldedNorm


class _ShieldedTimeEmbedding(TimestepEmbedding):  # type: ignore[misc]  # diffusers is untyped
    def forward(self, sample: torch.Tensor, condition: torch.Tensor | None = None) -> Any:
        with torch.autocast(sample.device.type, enabled=False):
            return super().forward(sample, condition)


class _ShieldedNorm(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)
