"""Tiny Wan 2.1 text-to-video weights in the ORIGINAL file formats, random but seeded: for tests and benchmarks.

They have the real architecture and the real key names and are read by the real loaders; only the sizes are small. A
random model makes noise, not pictures.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from wangen.runtime.randomness import generator_for
from wangen.runtime.safetensors_file import write

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class TinySizes:
    """Sizes of the tiny models; the defaults train thirty steps in seconds on two CPU cores."""

    dim: int = 256
    ffn_dim: int = 512
    num_layers: int = 2
    text_dim: int = 64
    text_ffn_dim: int = 128
    text_layers: int = 2
    text_heads: int = 4
    vae_dim: int = 8


def write_tiny_wan(
    folder: Path, captions: Iterable[str], *, seed: int = 0, sizes: TinySizes | None = None
) -> dict[str, Path]:
    """Write `Wan2.1_VAE.pth`, the umT5 `.pth` with its tokenizer folder, and a transformer `.safetensors`.

    Args:
        folder: where; made if missing.
        captions: texts that the tokenizer must know the words of.
        seed: of the weights.
        sizes: other sizes than the default.

    Returns:
        The files by weight role: `vae`, `t5`, `dit`.
    """
    sizes = sizes or TinySizes()
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "vae": folder / "Wan2.1_VAE.pth",
        "t5": folder / "models_t5_umt5-xxl-enc-bf16.pth",
        "dit": folder / "wan2.1_t2v_1.3B_bf16.safetensors",
    }
    vocabulary = write_tokenizer(folder / "google" / "umt5-xxl", captions)
    torch.save(random_weights(vae_shapes(sizes.vae_dim), seed, torch.float32), files["vae"])
    torch.save(random_weights(text_encoder_shapes(sizes, vocabulary), seed, torch.bfloat16), files["t5"])
    write(files["dit"], random_weights(transformer_shapes(sizes), seed, torch.bfloat16), {"format": "pt"})
    return files


def random_weights(shapes: Shapes, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Seeded weights whose activations keep their size: 1 / sqrt(fan in), norms near 1, small biases."""
    weights = {}
    for name, shape in shapes.items():
        draw = torch.randn(shape, generator=generator_for("tiny", seed, name))
        if name.endswith("gamma") or (len(shape) == 1 and "norm" in name and name.endswith("weight")):
            value = 1 + 0.1 * draw
        elif name.endswith("bias"):
            value = 0.05 * draw
        elif "embedding.weight" in name and len(shape) == 2 and ("token" in name or "pos" in name):
            value = draw
        else:
            value = draw / math.sqrt(math.prod(shape[1:]))
        if name.endswith("attn.q.weight") and "self" not in name and "cross" not in name:
            value = value / 4  # umT5 does not divide by sqrt(d_kv)
        weights[name] = value.to(dtype)
    return weights


def transformer_shapes(sizes: TinySizes) -> Shapes:
    """Names and shapes of a Wan 2.1 text-to-video transformer."""
    dim, ffn = sizes.dim, sizes.ffn_dim
    shapes = _linear("text_embedding.0", sizes.text_dim, dim) | _linear("text_embedding.2", dim, dim)
    shapes |= _linear("time_embedding.0", 256, dim) | _linear("time_embedding.2", dim, dim)
    shapes |= _linear("time_projection.1", dim, 6 * dim) | _linear("head.head", dim, 64)
    shapes |= {
        "patch_embedding.weight": (dim, 16, 1, 2, 2),
        "patch_embedding.bias": (dim,),
        "head.modulation": (1, 2, dim),
    }
    for number in range(sizes.num_layers):
        block = f"blocks.{number}"
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                shapes |= _linear(f"{block}.{attention}.{part}", dim, dim)
            shapes |= {f"{block}.{attention}.norm_{part}.weight": (dim,) for part in "qk"}
        shapes |= _linear(f"{block}.ffn.0", dim, ffn) | _linear(f"{block}.ffn.2", ffn, dim)
        shapes |= {f"{block}.norm3.weight": (dim,), f"{block}.norm3.bias": (dim,), f"{block}.modulation": (1, 6, dim)}
    return shapes


def text_encoder_shapes(sizes: TinySizes, vocabulary: int) -> Shapes:
    """Names and shapes of a umT5 encoder in Wan's layout."""
    dim, ffn = sizes.text_dim, sizes.text_ffn_dim
    shapes: Shapes = {"token_embedding.weight": (vocabulary, dim), "norm.weight": (dim,)}
    for number in range(sizes.text_layers):
        block = f"blocks.{number}"
        shapes |= {f"{block}.{norm}.weight": (dim,) for norm in ("norm1", "norm2")}
        shapes |= {f"{block}.attn.{part}.weight": (dim, dim) for part in "qkvo"}
        shapes |= {f"{block}.ffn.{part}.weight": (ffn, dim) for part in ("gate.0", "fc1")}
        shapes[f"{block}.ffn.fc2.weight"] = (dim, ffn)
        shapes[f"{block}.pos_embedding.embedding.weight"] = (32, sizes.text_heads)
    return shapes


def vae_shapes(dim: int) -> Shapes:
    """Names and shapes of the Wan 2.1 VAE: four stages of `dim * (1, 2, 4, 4)` channels, 16 latent channels."""
    wide = [dim, dim, 2 * dim, 4 * dim, 4 * dim]
    shapes = _conv("encoder.conv1", 3, dim) | _conv("conv1", 32, 32, (1, 1, 1)) | _conv("conv2", 16, 16, (1, 1, 1))
    shapes |= _conv("decoder.conv1", 16, 4 * dim)
    number = 0
    for stage in range(4):
        for channels in (wide[stage], wide[stage + 1]):
            shapes |= _residual(f"encoder.downsamples.{number}", channels, wide[stage + 1])
            number += 1
        if stage < 3:
            shapes |= _resample(f"encoder.downsamples.{number}", wide[stage + 1], wide[stage + 1], stage > 0, 1)
            number += 1
    number = 0
    for stage, channels in enumerate((4 * dim, 4 * dim, 2 * dim, dim)):
        start = 4 * dim if stage == 0 else (4 * dim, 4 * dim, 2 * dim)[stage - 1] // 2
        for entering in (start, channels, channels):
            shapes |= _residual(f"decoder.upsamples.{number}", entering, channels)
            number += 1
        if stage < 3:
            shapes |= _resample(f"decoder.upsamples.{number}", channels, channels // 2, stage < 2, 2)
            number += 1
    for side, last in (("encoder", 32), ("decoder", 3)):
        shapes |= _residual(f"{side}.middle.0", 4 * dim, 4 * dim) | _residual(f"{side}.middle.2", 4 * dim, 4 * dim)
        shapes |= _attention(f"{side}.middle.1", 4 * dim)
        head = 4 * dim if side == "encoder" else dim
        shapes |= {f"{side}.head.0.gamma": (head, 1, 1, 1)} | _conv(f"{side}.head.2", head, last)
    return shapes


def write_tokenizer(folder: Path, captions: Iterable[str]) -> int:
    """Write a `tokenizer.json` that knows the captions' words and every ASCII character; returns its size."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = Counter(word for caption in captions for word in caption.split())
    characters = {chr(code) for code in range(33, 127)} | {character for word in words for character in word}
    pieces = [("▁" + word, -8.0) for word in sorted(words)] + [("▁", -10.0)]
    pieces += [(character, -12.0) for character in sorted(characters)]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<s>", 0.0), ("<unk>", -20.0), *pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=3, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<s>", "<unk>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "T5Tokenizer", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return int(tokenizer.get_vocab_size())


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _conv(name: str, inputs: int, outputs: int, kernel: tuple[int, ...] = (3, 3, 3)) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, *kernel), f"{name}.bias": (outputs,)}


def _residual(name: str, inputs: int, outputs: int) -> Shapes:
    shapes: Shapes = {f"{name}.residual.0.gamma": (inputs, 1, 1, 1), f"{name}.residual.3.gamma": (outputs, 1, 1, 1)}
    shapes |= _conv(f"{name}.residual.2", inputs, outputs) | _conv(f"{name}.residual.6", outputs, outputs)
    return shapes | (_conv(f"{name}.shortcut", inputs, outputs, (1, 1, 1)) if inputs != outputs else {})


def _resample(name: str, inputs: int, outputs: int, temporal: bool, expansion: int) -> Shapes:
    time = _conv(f"{name}.time_conv", inputs, inputs * expansion, (3, 1, 1)) if temporal else {}
    return _conv(f"{name}.resample.1", inputs, outputs, (3, 3)) | time


def _attention(name: str, channels: int) -> Shapes:
    norm: Shapes = {f"{name}.norm.gamma": (channels, 1, 1)}
    return (
        norm
        | _conv(f"{name}.to_qkv", channels, 3 * channels, (1, 1))
        | _conv(f"{name}.proj", channels, channels, (1, 1))
    )
