"""How many weights a model's transformer has, by part: from the sizes in its profile, one formula per architecture.

Tests count the real modules of diffusers on the meta device against them. Letters: d width, f width inside the
feed-forward layers.
"""

from dataclasses import dataclass, replace

from wangen.profiles import Model

FREQUENCIES = 256  # sinusoids of a timestep
LATENTS_PER_TOKEN = 4  # 1x2x2 latent cells

OWN_TENSORS = 15
"""Queries and keys before and after their norm, values and attention's output are 6; the gradients of queries, keys,
values, attention's output, the second half's input and the block's output another 6; what is small beside them one
more; and kernels in half precision add up the queries' gradient in float32, which is 2."""

UMT5_DIM = 4096
CLIP_DIM = 1280  # ViT-H
CLIP_TOKENS = 257  # of an image
BOTH_IMAGES = 2 * CLIP_TOKENS  # of first and last frame, each with a position

QWEN_TEXT_DIM = 3584
QWEN_HEAD_DIM = 128


@dataclass(frozen=True)
class WeightCounts:
    """Numbers of weights, and of what a block keeps.

    Attributes:
        block_linear: of the linear layers of one block: those that are quantised.
        block_rest: its biases and norms.
        block_float32: what of it is in float32 whatever the rest is in.
        outer: embeddings, time layers and head, which always stay on the device.
        outer_float32: what of these is in float32 whatever the rest is in.
        adapter: of a LoRA of rank 1 on every usual target of one block.
        modulation_adapter: of one on those layers of a block that make its shifts, scales and gates.
        largest_product: weights that are dequantised at once.
        kept_tensors: of N x d, beside those of N x f, that a block keeps for its backward pass where it is not
            recomputed; N tokens of a step.
        own_tensors: of N x d that live at once while the gradient of self attention is taken, beside a block's input,
            where the rest of the block can go in pieces; 0 where it cannot.
    """

    block_linear: int
    block_rest: int
    block_float32: int
    outer: int
    outer_float32: int
    adapter: int
    largest_product: int
    kept_tensors: int
    own_tensors: int = 0
    modulation_adapter: int = 0

    @property
    def block(self) -> int:
        """All weights of one block."""
        return self.block_linear + self.block_rest + self.block_float32


def weight_counts(model: Model, *, modulation: bool = False) -> WeightCounts:
    """The counts of a model, of each expert where there are two.

    With `modulation` what makes shifts, scales and gates is among the adapter's targets, and the two gates of each
    stream, which then get gradients, keep what they let through.
    """
    counts = _FORMULAS[model.architecture](model)
    if not modulation or not counts.modulation_adapter:
        return counts
    return replace(counts, adapter=counts.adapter + counts.modulation_adapter, kept_tensors=counts.kept_tensors + 2)


def _wan(model: Model) -> WeightCounts:
    sizes = model.transformer
    d, f = sizes.dim, sizes.ffn_dim
    squares = 10 if model.has_clip else 8
    outer = d * (sizes.in_channels * LATENTS_PER_TOKEN + 1) + (d + 1) * sizes.out_channels * LATENTS_PER_TOKEN
    outer += d * (UMT5_DIM + 1) + d * (d + 1)  # text
    outer += 6 * d * (d + 1)  # projection of the time embedding
    outer_float32 = d * (FREQUENCIES + 1) + d * (d + 1) + 2 * d  # time embedding, the head's modulation
    if model.has_clip:
        outer += CLIP_DIM * (CLIP_DIM + 1) + d * (CLIP_DIM + 1)
        outer_float32 += 2 * CLIP_DIM + 2 * d
    if model.condition == "first_and_last":
        outer += BOTH_IMAGES * CLIP_DIM
    return WeightCounts(
        block_linear=squares * d * d + 2 * d * f,
        block_rest=9 * d + f + 4 * d + (3 * d if model.has_clip else 0),
        block_float32=8 * d,  # the affine norm and the modulation table
        outer=outer,
        outer_float32=outer_float32,
        adapter=squares * 2 * d + 2 * (d + f),
        largest_product=max(3 * d * d, d * f),
        kept_tensors=16,
        own_tensors=OWN_TENSORS,
    )


def _qwen(model: Model) -> WeightCounts:
    """Two streams with layers of their own; a third of a block's weights makes shifts, scales and gates."""
    sizes = model.transformer
    d, f = sizes.dim, sizes.ffn_dim
    outer = d * (sizes.in_channels * LATENTS_PER_TOKEN + 1) + (d + 1) * sizes.out_channels * LATENTS_PER_TOKEN
    outer += QWEN_TEXT_DIM + d * (QWEN_TEXT_DIM + 1)  # text
    outer += d * (FREQUENCIES + 1) + d * (d + 1) + 2 * d * (d + 1)  # time embedding, the head's modulation
    return WeightCounts(
        block_linear=2 * (6 * d * d + 4 * d * d + 2 * d * f),
        block_rest=2 * (6 * d + 4 * d + f + d) + 4 * QWEN_HEAD_DIM,
        block_float32=0,
        outer=outer,
        outer_float32=0,
        adapter=2 * (4 * 2 * d + 2 * (d + f)),
        largest_product=6 * d * d,
        kept_tensors=12,
        modulation_adapter=2 * (d + 6 * d),
    )


_FORMULAS = {"wan": _wan, "qwen_image_edit": _qwen}
