"""The text encoder of the vectors in every layout that people have."""

from pathlib import Path

import gguf
import torch
from parity import T5, TOKENIZER
from safetensors.torch import save_file

from wangen.runtime.weights.text_encoder import load_text_encoder
from wangen.runtime.weights.umt5_names import GGUF_NAMES

PLAIN = ("pth", "safetensors", "transformers", "tied", "whole")
"""The layouts that hold the very same numbers in one file."""


def write_plain(folder: Path, form: str) -> Path:
    """The fixture in one of the layouts of `PLAIN`."""
    path = folder / "t5.safetensors"
    if form == "pth":
        return T5
    if form == "safetensors":  # Kijai's
        save_file(torch.load(T5, weights_only=True), path)
        return path
    state = hugging_face_state(torch.float32)
    if form == "tied":
        state["encoder.embed_tokens.weight"] = state["shared.weight"].clone()
    if form == "whole":
        state["decoder.block.0.layer.0.SelfAttention.q.weight"] = torch.zeros(4, 4)
        state["lm_head.weight"] = torch.zeros(4, 4)
    save_file(state, path)
    return path


def write_shards(folder: Path) -> Path:
    """The fixture as a Hugging Face pipeline's folder; returns its `text_encoder`."""
    load_text_encoder(T5, dtype=torch.float32).save_pretrained(folder / "text_encoder", max_shard_size="50KB")
    (folder / "model_index.json").write_text("{}")
    return folder / "text_encoder"


def hugging_face_state(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The fixture under the names of transformers and ComfyUI."""
    state = load_text_encoder(T5, dtype=dtype).state_dict()
    return {name: value.contiguous() for name, value in state.items() if name != "encoder.embed_tokens.weight"}


def write_comfy_fp8(path: Path, *, embedding: bool = False) -> dict[str, torch.Tensor]:
    """The fixture as ComfyUI's scaled 8-bit file with the tokenizer inside; returns the weights that it stands for.

    Args:
        path: of the file.
        embedding: store the embedding in 8 bits too, with a scale per row.
    """
    tensors: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, value in hugging_face_state(torch.float32).items():
        tensors[name] = meant[name] = value
        shared = embedding and name == "shared.weight"
        if shared or (value.ndim == 2 and "SelfAttention" in name and "bias" not in name):
            scale = (value.abs().amax(dim=1, keepdim=True) if shared else value.abs().max()) / 448
            tensors[name] = (value / scale).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "scale_weight"] = scale
            meant[name] = tensors[name].float() * scale
    spiece = (TOKENIZER / "spiece.model").read_bytes()
    tensors |= {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    tensors |= {"spiece_model": torch.frombuffer(bytearray(spiece), dtype=torch.uint8)}
    save_file(tensors, path)
    return meant


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType) -> dict[str, torch.Tensor]:
    """The fixture under the names of llama.cpp; returns the weights that it stands for, by transformers' names."""
    outer = {"shared": "token_embd", "encoder.final_layer_norm": "enc.output_norm"}
    inner = {value: key for key, value in GGUF_NAMES.items()}
    meant = {}
    writer = gguf.GGUFWriter(path, "t5encoder")
    for name, value in hugging_face_state(torch.float32).items():
        stem = name.removesuffix(".weight")
        if stem in outer:
            new = outer[stem]
        else:
            _, _, number, rest = stem.split(".", 3)
            new = f"enc.blk.{number}.{inner[rest]}"
        numbers = value.numpy()
        if value.ndim == 2 and "attn_rel_b" not in new:
            stored = gguf.quants.quantize(numbers, kind)
            meant[name] = torch.from_numpy(gguf.quants.dequantize(stored, kind))
            writer.add_tensor(f"{new}.weight", stored, raw_dtype=kind)
        else:
            meant[name] = value
            writer.add_tensor(f"{new}.weight", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant
