"""umT5 encoders in every layout -> transformers' `UMT5EncoderModel`.

Letters in shapes: B batch, L tokens.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import UMT5Config, UMT5EncoderModel

from wangen.generator.kinds import expect
from wangen.runtime.weights.filling import build, fill, open_checkpoint
from wangen.runtime.weights.tokenizer import load_tokenizer, token_ids
from wangen.runtime.weights.umt5_names import umt5_names, umt5_sizes


def load_text_encoder(
    path: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", fp8: bool = False
) -> UMT5EncoderModel:
    """A umT5 encoder, frozen and in eval mode.

    Args:
        path: `models_t5_umt5-xxl-enc-bf16.pth`, its safetensors form, ComfyUI's `umt5_xxl_fp16.safetensors` or
            `umt5_xxl_fp8_e4m3fn_scaled.safetensors`, a GGUF file, or a Hugging Face folder.
        dtype: None keeps what the file stores (bfloat16 in the official one), and a file that mixes precisions needs
            another to compute with. All weights are cast alike, as the official code does; transformers by itself
            would keep `wo` in float32. Weights that are stored in 8 bits or GGUF's blocks stay so in memory and become
            `dtype` when they are used.
        device: where the weights go; `meta` compares names and shapes only.
        fp8: keep the weights of all linear layers as 8-bit floats with one scale per row: half the memory of
            bfloat16, and the embeddings differ a little.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors.
    """
    checkpoint = open_checkpoint(path, expect(path, "umt5-encoder", "--t5"), umt5_names)
    sizes = umt5_sizes(checkpoint)
    config = UMT5Config(
        vocab_size=sizes.vocabulary,
        d_model=sizes.dim,
        d_kv=sizes.head_dim,
        d_ff=sizes.ffn_dim,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        relative_attention_num_buckets=sizes.num_buckets,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    model = build(path, lambda: UMT5EncoderModel(config))
    model.encoder.embed_tokens = model.shared  # one embedding, in whatever form it is stored
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    fill(model, checkpoint, dtype, device, make_fp8=linears if fp8 else ())
    return model


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
    rows = token_ids(tokenizer, prompts)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=text_encoder.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=text_encoder.device)
    hidden = text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, longest, text_dim)
    return [hidden[i, : len(row)].clone() for i, row in enumerate(rows)]


class PlainPromptEncoder:
    """Prompts -> embeddings by transformers' module, all given at once as one padded batch."""

    def __init__(self, text_encoder: UMT5EncoderModel, tokenizer: Tokenizer) -> None:
        self._text_encoder = text_encoder
        self._tokenizer = tokenizer

    def encode(
        self,
        prompts: Sequence[str],
        on_block: Callable[[int, int], None] = lambda done, total: None,
        *,
        pictures: Sequence[Sequence[Any]] | None = None,
    ) -> list[torch.Tensor]:
        """For each prompt its embedding (L, dim) on the CPU, as `encode_prompts` makes it; `on_block` is not called.

        umT5 sees no pictures.
        """
        return [embedding.cpu() for embedding in encode_prompts(self._text_encoder, self._tokenizer, prompts)]


def load_plain_prompt_encoder(
    t5: Path, tokenizer: Path | None, *, dtype: torch.dtype, device: torch.device | str = "cpu", fp8: bool = False
) -> PlainPromptEncoder:
    """The same as `fast.umt5.load_prompt_encoder`, with the whole encoder in memory.

    Args:
        t5: as for `load_text_encoder`.
        tokenizer: None looks for it near and inside the weights.
        dtype: as for `load_text_encoder`.
        device: as for `load_text_encoder`.
        fp8: as for `load_text_encoder`.

    Raises:
        WangenError: as `load_text_encoder`, or there is no tokenizer.
    """
    text_encoder = load_text_encoder(t5, dtype=dtype, device=device, fp8=fp8)
    return PlainPromptEncoder(text_encoder, load_tokenizer(tokenizer or t5))
