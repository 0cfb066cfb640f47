"""The names and sizes of umT5 encoders in every layout; neither torch nor transformers is needed to know them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wangen.generator.errors import WangenError
from wangen.generator.formats import Shapes

if TYPE_CHECKING:
    from wangen.runtime.weights.filling import Checkpoint

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

MIN_BUCKETS, MAX_BUCKETS = 4, 508
"""Of relative positions: half are for later keys, and half of a half for single distances, at least 1 of 128."""

EMBEDDING = "shared.weight"
FINAL_NORM = "encoder.final_layer_norm.weight"


@dataclass(frozen=True)
class Umt5Sizes:
    """The sizes of a umT5 encoder.

    Attributes:
        vocabulary: rows of the embedding.
        dim: width of the hidden states.
        head_dim: width of one head.
        ffn_dim: width inside the feed forward half.
        num_layers: blocks.
        num_heads: of the attention.
        num_buckets: of relative positions.
    """

    vocabulary: int
    dim: int
    head_dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    num_buckets: int

    def shapes(self) -> Shapes:
        """What every tensor of such an encoder is, by transformers' names."""
        inner = self.num_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocabulary, self.dim), FINAL_NORM: (self.dim,)}
        for number in range(self.num_layers):
            block = block_names(number)
            shapes |= {block[f"attn.{part}"]: (inner, self.dim) for part in "qkv"}
            shapes |= {block["attn.o"]: (self.dim, inner), block["ffn.fc2"]: (self.dim, self.ffn_dim)}
            shapes |= {block[part]: (self.ffn_dim, self.dim) for part in ("ffn.gate.0", "ffn.fc1")}
            shapes |= {block[part]: (self.dim,) for part in ("norm1", "norm2")}
            shapes[block["pos_embedding.embedding"]] = (self.num_buckets, self.num_heads)
        return shapes


def umt5_sizes(checkpoint: "Checkpoint") -> Umt5Sizes:
    """The sizes that the tensors of a checkpoint imply; whether all of them agree is another question.

    Raises:
        WangenError: a tensor that tells a size is missing, blocks are, or there are more or fewer buckets of relative
            positions than its formula has a meaning for.
    """
    first = block_names(0)
    num_heads = checkpoint.size(first["pos_embedding.embedding"], 1)
    num_buckets = checkpoint.size(first["pos_embedding.embedding"], 0)
    if not MIN_BUCKETS <= num_buckets <= MAX_BUCKETS:
        raise WangenError(f"the tensors do not fit the model: {num_buckets} buckets of relative positions, umT5 has 32",
                          where=str(checkpoint.path))  # fmt: skip
    return Umt5Sizes(
        vocabulary=checkpoint.size(EMBEDDING, 0),
        dim=checkpoint.size(EMBEDDING, 1),
        head_dim=checkpoint.size(first["attn.q"], 0) // num_heads,
        ffn_dim=checkpoint.size(first["ffn.gate.0"], 0),
        num_layers=checkpoint.num_blocks("encoder.block."),
        num_heads=num_heads,
        num_buckets=num_buckets,
    )


def block_names(number: int) -> dict[str, str]:
    """The official name of each weight of a block, as in `OFFICIAL_NAMES` -> its whole name in transformers.

    >>> block_names(3)["attn.q"]
    'encoder.block.3.layer.0.SelfAttention.q.weight'
    """
    return {official: f"encoder.block.{number}.{name}.weight" for official, name in OFFICIAL_NAMES.items()}


def umt5_names(names: Iterable[str]) -> Mapping[str, str]:
    """File name -> transformers name, for the official names, GGUF's, and those of Hugging Face and ComfyUI."""
    names = list(names)  # in their order, as messages name the first that is wrong
    renamed = {}
    for name in names:
        if name.startswith(NOT_NEEDED) or (name in TIED and EMBEDDING in names):
            continue
        renamed[name] = OUTER_NAMES.get(name, name)
        if name.startswith(STACK):
            renamed[name] = f"encoder.{name}"
        if match := BLOCK.fullmatch(name):
            table = OFFICIAL_NAMES if match["official"] == "blocks" else GGUF_NAMES
            if match["rest"] in table:
                renamed[name] = f"encoder.block.{match['number']}.{table[match['rest']]}.weight"
    return renamed
