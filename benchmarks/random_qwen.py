"""Qwen-Image-Edit models of any size: on the meta device, to count with, or with random weights in files, to run."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from wangen import profiles
from wangen.generator.layouts import HEAD_DIM
from wangen.runtime.models.qwen_image_edit.text_encoder import FULL_ATTENTION_EVERY, MROPE_SECTION, VISION_HEAD_DIM

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tiny_weights import random_weights

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>")  # fmt: skip
VOCABULARY = 2048
"""Of small models: enough for the template's words to be a token each, as they are in the real vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the three models are.

    Attributes:
        blocks: of the transformer.
        heads: of the transformer, 128 wide each.
        text_dim: width of the language part, and of what the transformer is given.
        text_ffn_dim: width of its feed-forward layers.
        text_layers: of the language part.
        text_heads: for queries, 128 wide each.
        text_kv_heads: for keys and values.
        vision_heads: of the vision part, 80 wide each.
        vision_ffn_dim: width of its feed-forward layers.
        vision_layers: of the vision part.
        vocabulary: tokens.
        vae_dim: of the VAE's first stage.
    """

    blocks: int
    heads: int
    text_dim: int
    text_ffn_dim: int
    text_layers: int
    text_heads: int
    text_kv_heads: int
    vision_heads: int
    vision_ffn_dim: int
    vision_layers: int
    vocabulary: int
    vae_dim: int


REAL = Sizes(blocks=60, heads=24, text_dim=3584, text_ffn_dim=18944, text_layers=28, text_heads=28, text_kv_heads=4,
             vision_heads=16, vision_ffn_dim=3420, vision_layers=32, vocabulary=152064, vae_dim=96)  # fmt: skip
"""Those of Qwen/Qwen-Image-Edit: transformer/config.json, text_encoder/config.json (Qwen2.5-VL 7B), vae/config.json."""
SMALL = Sizes(blocks=6, heads=3, text_dim=384, text_ffn_dim=1024, text_layers=5, text_heads=3, text_kv_heads=1,
              vision_heads=1, vision_ffn_dim=512, vision_layers=8, vocabulary=VOCABULARY, vae_dim=4)  # fmt: skip


def transformer(sizes: Sizes) -> QwenImageTransformer2DModel:
    """The transformer, on the default device."""
    return QwenImageTransformer2DModel(
        num_layers=sizes.blocks, num_attention_heads=sizes.heads, joint_attention_dim=sizes.text_dim
    )


def vae(sizes: Sizes) -> AutoencoderKLQwenImage:
    """The VAE, on the default device."""
    return AutoencoderKLQwenImage(base_dim=sizes.vae_dim)


def text_encoder(sizes: Sizes) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL with its output layer, on the default device."""
    rope = {"type": "mrope", "mrope_section": list(MROPE_SECTION)}
    text = {
        "vocab_size": sizes.vocabulary, "hidden_size": sizes.text_dim, "intermediate_size": sizes.text_ffn_dim,
        "num_hidden_layers": sizes.text_layers, "num_attention_heads": sizes.text_heads,
        "num_key_value_heads": sizes.text_kv_heads, "rms_norm_eps": 1e-6, "rope_scaling": rope, "rope_theta": 1e6,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    assert sizes.text_dim == sizes.text_heads * HEAD_DIM
    vision = {
        "depth": sizes.vision_layers, "hidden_size": VISION_HEAD_DIM * sizes.vision_heads,
        "num_heads": sizes.vision_heads, "intermediate_size": sizes.vision_ffn_dim, "out_hidden_size": sizes.text_dim,
        "fullatt_block_indexes": list(range(FULL_ATTENTION_EVERY - 1, sizes.vision_layers, FULL_ATTENTION_EVERY)),
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def write_models(folder: Path, sizes: Sizes, task: str, prompts: Iterable[str]) -> None:
    """Write a folder as diffusers saves a pipeline, with random weights in float32.

    Args:
        folder: where; made if missing.
        sizes: of the models.
        task: the model profile whose template the tokenizer has to know.
        prompts: the words that it has to know besides.
    """
    parts = {"transformer": transformer(sizes), "vae": vae(sizes), "text_encoder": text_encoder(sizes)}
    for seed, (name, part) in enumerate(parts.items()):
        shapes = {key: tuple(parameter.shape) for key, parameter in part.named_parameters()}
        part.load_state_dict(random_weights(shapes, seed, torch.float32), strict=False)
        part.save_pretrained(folder / name)
    index = {"_class_name": "QwenImageEditPipeline", **{name: ["x", "y"] for name in parts}}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "processor").mkdir()
    prompt = profiles.model(task).prompt
    assert prompt is not None, task
    tokenizer([prompt.template, prompt.picture, *prompts]).save(str(folder / "processor" / "tokenizer.json"))


def tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer to which every word of the texts is one token, and any other text bytes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(SPECIAL), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return made
