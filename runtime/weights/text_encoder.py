"""umT5 encoders in every layout -> transformers' `UMT5EncoderModel`.

Letters in shapes: B batch, L tokens.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import UMT5Config, UMT5EncoderModel

from wangen.generator.kinds import expect
from wangen.runtime.prompts import clean_prompt
from wangen.runtime.weights.filling import build, fill, open_checkpoint

MAX_PROMPT_TOKENS = 512

# What stands behind `blocks.N.` in the official files, and `enc.blk.N.` in GGUF -> behind `encoder.block.N.`
OFFICIAL_NAMES = {
    "norm1": "layer.0.layer_norm",
    "attn.q": "layer.0.SelfAttention.q",
    "attn.k": "layer.0.SelfAttention.k",
    "attn.v": "layer.0.SelfAttention.v",
    "attn.o": "layer.0.SelfAttention.o",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}
GGUF_NAMES = {
    "attn_norm": "layer.0.layer_norm",
    "attn_q": "layer.0.SelfAttention.q",
    "attn_k": "layer.0.SelfAttention.k",
    "attn_v": "layer.0.SelfAttention.v",
    "attn_o": "layer.0.SelfAttention.o",
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "ffn_norm": "layer.1.layer_norm",
    "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_up": "layer.1.DenseReluDense.wi_1",
    "ffn_down": "layer.1.DenseReluDense.wo",
}
OUTER_NAMES = {
    "token_embedding.weight": "shared.weight",
    "token_embd.weight": "shared.weight",
    "encoder.embed_tokens.weight": "shared.weight",
    "embed_tokens.weight": "shared.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
    "enc.output_norm.weight": "encoder.final_layer_norm.weight",
}
BLOCK = re.compile(r"(?P<official>blocks|enc\.blk)\.(?P<number>\d+)\.(?P<rest>.+)\.weight")
TIED = ("encoder.embed_tokens.weight", "embed_tokens.weight")
STACK = ("block.", "final_layer_norm.")
"""The beginnings of Hugging Face's names in a file of the encoder alone, without `encoder.`"""
NOT_NEEDED = ("decoder.", "lm_head.", "dec.", "output.")
"""The other half of a whole umT5."""


def load_text_encoder(
    path: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", fp8: bool = False
) -> UMT5EncoderModel:
    """A umT5 encoder, frozen and in eval mode.

    Args:
        path: `models_t5_umt5-xxl-enc-bf16.pth`, its safetensors form, ComfyUI's `umt5_xxl_fp16.safetensors` or
            `umt5_xxl_fp8_e4m3fn_scaled.safetensors`, a GGUF file, or a Hugging Face folder.
        dtype: None keeps what the file stores (bfloat16 in the official one), and a file that mixes precisions needs
            another to compute with. All weights are cast alike, as the official code does; transformers by itself
            would keep `wo` in float32. Weights that are stored in 8 bits
            or GGUF's blocks stay so in memory and become `dtype` when they are used.
        device: where the weights go; `meta` compares names and shapes only.
        fp8: keep the weights of all linear layers as 8-bit floats with one scale per row: half the memory of
            bfloat16, and the embeddings differ a little.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors.
    """
    checkpoint = open_checkpoint(path, expect(path, "umt5-encoder", "--t5"), umt5_names)
    attention = "encoder.block.0.layer.0.SelfAttention"
    num_heads = checkpoint.size(f"{attention}.relative_attention_bias.weight", 1)
    config = UMT5Config(
        vocab_size=checkpoint.size("shared.weight", 0),
        d_model=checkpoint.size("shared.weight", 1),
        d_kv=checkpoint.size(f"{attention}.q.weight", 0) // max(1, num_heads),
        d_ff=checkpoint.size("encoder.block.0.layer.1.DenseReluDense.wi_0.weight", 0),
        num_layers=checkpoint.num_blocks("encoder.block."),
        num_heads=num_heads,
        relative_attention_num_buckets=checkpoint.size(f"{attention}.relative_attention_bias.weight", 0),
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    model = build(path, lambda: UMT5EncoderModel(config))
    model.encoder.embed_tokens = model.shared  # one embedding, in whatever form it is stored
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    fill(model, checkpoint, dtype, device, make_fp8=linears if fp8 else ())
    return model


def umt5_names(names: Iterable[str]) -> Mapping[str, str]:
    """File name -> transformers name, for the official names, GGUF's, and those of Hugging Face and ComfyUI."""
    found = set(names)
    renamed = {}
    for name in found:
        if name.startswith(NOT_NEEDED) or (name in TIED and "shared.weight" in found):
            continue
        renamed[name] = OUTER_NAMES.get(name, name)
        if name.startswith(STACK):
            renamed[name] = f"encoder.{name}"
        if match := BLOCK.fullmatch(name):
            table = OFFICIAL_NAMES if match["official"] == "blocks" else GGUF_NAMES
            if match["rest"] in table:
                renamed[name] = f"encoder.block.{match['number']}.{table[match['rest']]}.weight"
    return renamed


@torch.no_grad()
def encode_prompts(text_encoder: UMT5EncoderModel, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[torch.Tensor]:
    """The embedding of each prompt, computed as one batch padded to its longest and masked.

    Args:
        text_encoder: from `load_text_encoder`.
        tokenizer: from `load_tokenizer`.
        prompts: raw texts; they are cleaned here. The empty text is the `</s>` token alone.

    Returns:
        For each prompt (length, text_dim) in the encoder's dtype on its device, where length counts the `</s>` and
        is at most 512; a longer prompt is cut and keeps its `</s>`.
    """
    if not prompts:
        return []
    end = tokenizer.token_to_id("</s>")
    texts = [encoding.ids[:-1] for encoding in tokenizer.encode_batch([clean_prompt(prompt) for prompt in prompts])]
    rows = [[*ids[: MAX_PROMPT_TOKENS - 1], end] for ids in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=text_encoder.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=text_encoder.device)
    hidden = text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, longest, text_dim)
    return [hidden[i, : len(row)].clone() for i, row in enumerate(rows)]
