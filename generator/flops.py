"""The work of a training step in FLOPs, from the model's sizes alone.

Letters: N video tokens of a forward pass, S text tokens, d the model's width, f that of its feed-forward layers.
"""

from dataclasses import dataclass
from typing import Literal

from wangen.profiles import TransformerSizes

FLASH_BACKWARD = 2.5
"""Work of flash attention's backward pass over its forward pass: it computes the scores again
(https://arxiv.org/abs/2307.08691, section 4.1)."""


@dataclass(frozen=True)
class StepFlops:
    """The work of one training step of one forward pass.

    Attributes:
        model: forward and backward without checkpointing; flash attention's second computation of the scores counts.
        done: what is computed, with what checkpointing computes again.
    """

    model: float
    done: float

    def __add__(self, other: "StepFlops") -> "StepFlops":
        return StepFlops(self.model + other.model, self.done + other.done)

    def __mul__(self, times: float) -> "StepFlops":
        return StepFlops(self.model * times, self.done * times)


NOTHING = StepFlops(0.0, 0.0)


def forward_flops(
    sizes: TransformerSizes, tokens: int, *, text_tokens: int = 512, image_tokens: int = 0, joint: bool = False
) -> tuple[float, float, float]:
    """The work of a forward pass of one item, apart by what its backward pass needs.

    Per layer: 2N(6d² + 2df) for the video's linear layers, 4d²S for the text's keys and values, 4N²d + 4NSd for
    attention. `torch.utils.flop_counter` agrees on a whole Wan to four digits.

    Where text and picture have layers of their own and look at both, as in Qwen-Image, these are 2(N + S)(4d² + 2df)
    and 4(N + S)²d, and all of the first belongs to the linear layers that a backward pass goes through.

    Args:
        sizes: of the transformer.
        tokens: N.
        text_tokens: S, 512 when texts are padded.
        image_tokens: of CLIP, in Wan 2.1 image-to-video: 257.
        joint: text and picture are one sequence.

    Returns:
        FLOPs of the video's linear layers, of the keys and values of text and image, and of attention.
    """
    d, layers, keys = sizes.dim, sizes.num_layers, text_tokens + image_tokens
    if joint:
        all_tokens = tokens + text_tokens
        return 2.0 * all_tokens * (4 * d * d + 2 * d * sizes.ffn_dim) * layers, 0.0, 4.0 * all_tokens**2 * d * layers
    linear = 2.0 * tokens * (6 * d * d + 2 * d * sizes.ffn_dim) * layers
    return linear, 4.0 * keys * d * d * layers, 4.0 * tokens * (tokens + keys) * d * layers


def step_flops(
    sizes: TransformerSizes,
    tokens: int,
    *,
    text_tokens: int = 512,
    image_tokens: int = 0,
    joint: bool = False,
    adapter_weights: int = 0,
    checkpointing: Literal["none", "full", "selective"] = "full",
    free_blocks: int = 0,
    train_base: bool = False,
    whole_blocks: bool = True,
) -> StepFlops:
    """The work of training on one item.

    With a frozen base linear layers cost their forward pass and the gradient of their input; the text's none. What
    trains costs the gradient of its weights too. Checkpointing adds a forward pass of the blocks that it covers,
    without attention when its outputs are kept.

    Args:
        sizes: of the transformer.
        tokens: N.
        text_tokens: S.
        image_tokens: of CLIP.
        joint: as of `forward_flops`.
        adapter_weights: trainable weights of the adapter, all counted as if they saw the video's tokens, or where text
            and picture have layers of their own half of them each.
        checkpointing: what is computed again.
        free_blocks: so many blocks compute nothing again.
        train_base: the base itself trains.
        whole_blocks: what is computed again is the whole block; our own forward pass leaves out its last product.
    """
    linear, texts, attention = forward_flops(
        sizes, tokens, text_tokens=text_tokens, image_tokens=image_tokens, joint=joint
    )
    adapter = adapter_weights * (float(tokens + text_tokens) if joint else 2.0 * tokens)
    model = 3 * adapter + (1 + FLASH_BACKWARD) * attention
    model += 3 * (linear + texts) if train_base else 2 * linear + texts
    again = {"none": 0.0, "full": linear + texts + adapter + attention, "selective": linear + texts + adapter}
    if not whole_blocks:
        last = 2.0 * (tokens + text_tokens * joint) * sizes.dim * sizes.ffn_dim * sizes.num_layers
        again |= {"full": again["full"] - last, "selective": again["selective"] - last}
    covered = max(0, sizes.num_layers - free_blocks) / sizes.num_layers
    return StepFlops(model, model + covered * again[checkpointing])
