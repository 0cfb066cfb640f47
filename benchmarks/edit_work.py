"""What a training step of Qwen-Image-Edit computes, and what its encoders would compute in each: counted, not measured.

The transformer's step is `wangen.generator.flops.step_flops`; the encoders are run on the meta device under
`torch.utils.flop_counter`, which counts products and convolutions.

Letters: N tokens of target and control image, S of text and of the picture in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from random_qwen import Sizes, text_encoder, transformer, vae
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import get_vision_window_index

from wangen import profiles
from wangen.generator.flops import StepFlops, step_flops
from wangen.profiles import TransformerSizes
from wangen.runtime.models.qwen_image_edit.pictures import MERGE, PATCH_PX, TIME_PATCH, encoder_size
from wangen.runtime.training.throughput import sizes_of

PX_PER_TOKEN = 16
PROMPT_TOKENS = 40
"""Of a prompt and what stands around it, behind the part of the template that is cut off."""


@dataclass(frozen=True)
class Work:
    """FLOPs of one item.

    Attributes:
        tokens: N and S.
        step: of the transformer, forward and backward.
        vae: of encoding target and control image.
        vision: of Qwen2.5-VL's vision part on the control image.
        language: of its language part on template, picture and prompt.
    """

    tokens: tuple[int, int]
    step: StepFlops
    vae: float
    vision: float
    language: float

    @property
    def encoders(self) -> float:
        """What real-time adds to a step."""
        return self.vae + self.vision + self.language

    def ratio(self, *, slower: float = 1.0, checkpointing: bool = True) -> float:
        """Real-time over cached, if the encoders reach `slower` times fewer FLOP/s than the transformer."""
        return 1 + slower * self.encoders / (self.step.done if checkpointing else self.step.model)


def work_of(sizes: Sizes, task: str, side: int) -> Work:
    """The work of a square target of `side` pixels with one control image."""
    prompt = profiles.model(task).prompt
    assert prompt is not None, task
    seen = encoder_size(*prompt.picture_size)
    text_tokens = seen[0] * seen[1] // (PATCH_PX * MERGE) ** 2 + PROMPT_TOKENS
    image_tokens = 2 * (side // PX_PER_TOKEN) ** 2
    with torch.device("meta"):
        encoder = text_encoder(sizes).model.eval()
    step = step_flops(transformer_sizes(sizes), image_tokens, text_tokens=text_tokens, joint=True)
    language = language_flops(encoder.language_model, prompt.num_dropped + text_tokens)
    vision = vision_flops(encoder.visual, seen[0] // PATCH_PX, seen[1] // PATCH_PX)
    return Work((image_tokens, text_tokens), step, 2 * vae_flops(sizes, side), vision, language)


def transformer_sizes(sizes: Sizes) -> TransformerSizes:
    """The sizes that the product's formulas take."""
    with torch.device("meta"):
        return sizes_of(transformer(sizes).config)


def counted(run: Callable[[], object]) -> float:
    """FLOPs of what is run."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return float(counter.get_total_flops())


def vae_flops(sizes: Sizes, side: int) -> float:
    """Of encoding one picture as the product does: of a convolution's three taps in time a single frame meets the last.

    diffusers' own encoder multiplies the zeros before the first frame too, and takes 2.6 times as much.
    """
    with torch.device("meta"):
        model = vae(sizes).eval()
    convolutions: list[Any] = [module for module in model.encoder.modules() if isinstance(module, nn.Conv3d)]
    for convolution in convolutions:
        convolution.weight = nn.Parameter(convolution.weight[:, :, -1:])
        convolution._padding = (*convolution._padding[:4], 0, 0)
    return counted(lambda: model.encode(torch.empty(1, 3, 1, side, side, device="meta")))


def language_flops(model: Any, tokens: int) -> float:
    """Of a prompt of so many tokens; attention is counted whole, although half of it is masked."""
    states = torch.empty(1, tokens, model.config.hidden_size, device="meta")
    positions = torch.empty(3, 1, tokens, dtype=torch.long, device="meta")
    return counted(lambda: model(inputs_embeds=states, position_ids=positions, use_cache=False))


def vision_flops(model: Any, rows: int, columns: int) -> float:
    """Of a picture of so many patches.

    The library's forward makes positions of numbers that the meta device does not have, so its parts are called: the
    windows' bounds are real, the values are not.
    """
    config, patches = model.config, rows * columns
    grid = torch.tensor([[1, rows, columns]])
    _, windows = get_vision_window_index(grid, spatial_merge_size=MERGE, window_size=config.window_size,
                                         patch_size=PATCH_PX)  # fmt: skip
    windows, whole = torch.unique_consecutive(windows), torch.tensor([0, patches])
    width = config.hidden_size // config.num_heads
    rotary = (torch.empty(patches, width, device="meta"),) * 2

    def run() -> None:
        states = model.patch_embed(torch.empty(patches, 3 * TIME_PATCH * PATCH_PX**2, device="meta"))
        for number, block in enumerate(model.blocks):
            bounds = whole if number in config.fullatt_block_indexes else windows
            states = block(states, cu_seqlens=bounds, position_embeddings=rotary)
        model.merger(states)

    return counted(run)


def transformer_forward_flops(sizes: Sizes, image_tokens: int, text_tokens: int) -> float:
    """Of a forward pass, counted: what `forward_flops` says by formula, and what lies outside the blocks.

    Args:
        sizes: of the models.
        image_tokens: N, of two equal squares.
        text_tokens: S.
    """
    with torch.device("meta"):
        model = transformer(sizes).eval()
        states = torch.empty(1, image_tokens, model.config.in_channels)
        text, timestep = torch.empty(1, text_tokens, sizes.text_dim), torch.empty(1)
    side = round((image_tokens / 2) ** 0.5)
    return counted(lambda: model(hidden_states=states, encoder_hidden_states=text, timestep=timestep,
                                 img_shapes=[[(1, side, side)] * 2]))  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """Numbers of weights.

    Attributes:
        transformer: all of it.
        vae: of the VAE's encoder.
        text: of Qwen2.5-VL without its output layer.
        text_linear: of these, in the language part's linear layers, which `--fp8_t5` keeps in 8 bits.
    """

    transformer: int
    vae: int
    text: int
    text_linear: int


def weights_of(sizes: Sizes) -> Weights:
    """How many weights each model has."""
    with torch.device("meta"):
        encoder, video = text_encoder(sizes).model, vae(sizes)
        linear = [module for module in encoder.language_model.modules() if isinstance(module, nn.Linear)]
        return Weights(
            _number(transformer(sizes)), _number(video.encoder) + _number(video.quant_conv), _number(encoder),
            sum(map(_number, linear)),
        )  # fmt: skip


def _number(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
