"""What a training run needs of the card's memory, by part: computed from the model's sizes alone.

Letters: L blocks, N tokens of a step, d width, f width inside the feed-forward layers, r rank. Numbers of weights are
exact (`weight_counts`); what a block keeps and what it needs at most while its gradient is computed are estimates from
the list of its tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from wangen.generator.adapter_settings import settings_of_flags
from wangen.generator.errors import UsageError
from wangen.generator.steps import Train
from wangen.generator.train_values import optimizer_arguments
from wangen.generator.weight_counts import OWN_TENSORS, weight_counts
from wangen.profiles import Model, Preset

GIB = 1 << 30
LONG_TEXT = 512
"""Rows of the longest caption."""

SHORT_TEXT = 128
"""Tokens of a prompt, where text goes through the blocks as pictures do."""

BITS = {"none": 16.0, "fp8": 8.25, "int8": 8.25, "nf4": 4.25}
"""Per weight of a linear layer of a block, with its share of the scales; without quantising in bfloat16."""

PLAIN_MEMORY: Mapping[str, Any] = {
    "quantize": "none", "blocks_to_swap": 0, "checkpointing": "full", "checkpointing_free_blocks": 0,
    "gradient_checkpointing_cpu_offload": False,
}  # fmt: skip
"""The flags of training where no card is named; scripts spell them out, so that a new default changes no old script."""

SPLIT: tuple[Literal["fsdp", "hsdp"], ...] = ("fsdp", "hsdp")
"""Values of `--parallel` with which processes share out the frozen weights: none are swapped, every block is
recomputed."""

RESERVE = 3 * GIB // 2
"""The device's context, the libraries' workspaces, the head's and the loss's tensors, and what fragments."""

CARD_SHARE = 15 / 16
"""Of the card's nominal memory: the rest belongs to the driver and the desktop."""

_MOMENT_BYTES = {"adamw8bit": 2, "adafactor": 0, "sgd": 0, "lion": 4, "prodigy": 16, "adan": 16}
_MORE_MOMENTS = ("momentum", "beta1", "amsgrad")
"""Arguments of SGD, Adafactor and AdamW, with which they keep a number more for each trained weight."""

PIECE_NUMBERS = 3 << 28
"""What may live while the gradients of a block's second half are taken, in numbers: 1.5 GiB in half precision. Beyond
that tokens go in pieces, but in no more than self attention, which takes them all at once, makes worth it."""

MOST_PROCESSORS = 170
"""Of a GPU: those of an RTX 5090; an H200 has 132."""

WAITING = 3
"""Tensors on the device for all those that wait in host memory: one in use, one on its way each way."""


def memory_of(options: Train) -> dict[str, Any]:
    """The flags by which a run is held in memory, with their values."""
    return {name: getattr(options, name) for name in PLAIN_MEMORY}


def gib_text(number: int) -> str:
    """Memory for people, in the unit that cards are sold by.

    >>> gib_text(25276502016)
    '23.5 GiB'
    """
    return f"{number / GIB:.1f} GiB"


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """The choices that decide the memory of a training run: `--vram` and its flags, rank and optimizer.

    Attributes:
        quantize: none, fp8, int8 or nf4.
        blocks_to_swap: frozen blocks in host memory.
        checkpointing: none, full or selective.
        free_blocks: so many of the last blocks are not recomputed.
        offload: what checkpointing keeps waits in host memory.
        rank: of the adapter on every usual linear layer of the blocks; 0 for none.
        modulation: it is also on those that make shifts, scales and gates.
        moment_bytes: what is kept beside each trained weight: the optimizer's moments, 8 of AdamW, and its average.
        ring: device buffers of block swap.
        float32: `--mixed_precision no`.
        whole: `--train_mode full`: every weight is trained, in float32, and there is no adapter.
        factors: what an adapter has beside the weights of a LoRA of that rank: LoHa twice as many.
        one_expert: of two only one is trained.
        all_resident: two experts stay on the device.
        stored_bits: of a weight in the base's file: less than 16 where it is quantised itself.
        shards: processes that share out the blocks' frozen weights, or with `whole` all that is trained.
        by_hand: unless `whole`, nothing but plain LoRAs is trained, not with `--plain`, `--compile` or `--pack`: long
            clips then go in pieces.
        deterministic: kernels of attention may add up in a fixed order.
    """

    quantize: str = "none"
    blocks_to_swap: int = 0
    checkpointing: str = "full"
    free_blocks: int = 0
    offload: bool = False
    rank: int = 32
    moment_bytes: int = 8
    ring: int = 2
    float32: bool = False
    whole: bool = False
    factors: int = 1
    one_expert: bool = False
    all_resident: bool = False
    stored_bits: float = 16.0
    shards: int = 1
    by_hand: bool = True
    deterministic: bool = False
    modulation: bool = False

    @property
    def wide(self) -> int:
        """Bytes of a number in training."""
        return 4 if self.float32 else 2


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes by part.

    Attributes:
        parts: on the device, by a name for people.
        host: in host memory: blocks that are swapped, two experts' weights, and what waits there.
    """

    parts: Mapping[str, int]
    host: int

    @property
    def device(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def moment_bytes(options: Train) -> int:
    """What the optimizer keeps for each trained weight, by the name of its class; 8 of most, as of AdamW.

    >>> from pathlib import Path
    >>> def bytes_of(kind, *words):
    ...     return moment_bytes(Train(output_dir=Path(), output_name="x", optimizer_type=kind, optimizer_args=words))
    >>> bytes_of("AdamW"), bytes_of("prodigyopt.Prodigy"), bytes_of("sgd"), bytes_of("sgd", "momentum=0.9")
    (8, 16, 0, 4)
    """
    given = optimizer_arguments(options.optimizer_args)
    kept = _MOMENT_BYTES.get(options.optimizer_type.rpartition(".")[2].lower(), 8)
    return kept + 4 * sum(bool(given.get(name)) for name in _MORE_MOMENTS)


def memory_settings(options: Train, shards: int = 1) -> MemorySettings:
    """The flags, with the presets filled in, as the memory formula takes them.

    Args:
        options: of the training step.
        shards: processes that share out the weights.
    """
    return MemorySettings(
        quantize=options.quantize or "none",
        blocks_to_swap=options.blocks_to_swap or 0,
        checkpointing=options.checkpointing or "full",
        free_blocks=options.checkpointing_free_blocks or 0,
        offload=bool(options.gradient_checkpointing_cpu_offload),
        rank=options.network_dim,
        moment_bytes=moment_bytes(options) + (4 if options.ema_decay else 0),
        ring=options.block_swap_ring_size,
        float32=options.mixed_precision == "no",
        whole=options.train_mode == "full",
        factors=2 if options.network_module == "loha" else 1,
        one_expert=options.experts != "both",
        all_resident=not options.offload_inactive_dit or shards > 1,
        shards=shards,
        by_hand=_is_by_hand(options),
        deterministic=options.deterministic,
        modulation=options.lora_targets == "all_linear",
    )


def _is_by_hand(options: Train) -> bool:
    """Whether blocks with adapters have their gradients by hand, where a model has a way for that (`dit_by_hand`)."""
    adapter = settings_of_flags(options)
    other = adapter.kind != "lora" or adapter.dora or adapter.draws
    return not (other or options.plain or options.compile or options.pack)


def memory_plan(model: Model, settings: MemorySettings, *, tokens: int) -> MemoryBudget:
    """What training takes at its worst moment, the backward pass of a block.

    The sum is: weights that stay + ring + adapter and optimizer + what the forward pass keeps + the live set of one
    block (`_of_a_block`) + 1.5 GiB. A recomputed block keeps its input, N d, and with selective checkpointing the
    output of self-attention, N d and one number per token and head.

    Of two experts one is on the device, with the adapters of both; the host has all weights of both. Blocks that
    several processes share out are gathered one at a time, one ahead.

    Args:
        model: the model profile.
        settings: the choices.
        tokens: of a step: those of the largest bucket, times its batch size.
    """
    sizes, wide, counts = model.transformer, settings.wide, weight_counts(model)
    num_experts = num_trained(model, settings)
    block, outer, swapped = block_bytes(model, settings), outer_bytes(model, wide), settings.blocks_to_swap
    in_parts = (sizes.num_layers - swapped) * block // settings.shards  # what lies outside the blocks is not
    frozen = 0 if settings.whole else outer + in_parts
    frozen *= num_experts if settings.all_resident else 1
    trained = trained_weights(model, settings) * num_experts // (settings.shards if settings.whole else 1)
    row = tokens * sizes.dim * wide
    free = sizes.num_layers if settings.checkpointing == "none" else settings.free_blocks
    kept_by_block, live = _of_a_block(model, settings, tokens, is_free=free > 0)
    attention = row + 4 * tokens * sizes.num_heads if settings.checkpointing == "selective" else 0
    waiting = (row + attention) * (sizes.num_layers - free)
    on_device = min(waiting, WAITING * (row + attention)) if settings.offload else waiting
    parts = {
        "weights that stay": frozen,
        "blocks on their way": block * (2 if settings.shards > 1 else min(settings.ring, swapped)),
        "adapters, gradients, optimizer": trained * (4 + 4 + settings.moment_bytes + (0 if settings.float32 else 2)),
        "kept for the backward pass": on_device + max(0, free - 1) * kept_by_block,
        "one block's backward pass": live,
        "dequantised weights": 0 if bits_of(settings) == 8 * wide else counts.largest_product * wide,
        "reserve": RESERVE,
    }
    parked = num_experts > 1 and not settings.all_resident
    in_host = 2 * (outer + sizes.num_layers * block) if parked else swapped * block
    return MemoryBudget(parts, in_host + (waiting if settings.offload else 0))


def _of_a_block(model: Model, settings: MemorySettings, tokens: int, *, is_free: bool) -> tuple[int, int]:
    """Bytes that a block keeps which is not recomputed, and the most that lives while a block's gradient is taken.

    A block keeps k N d + 2 N f numbers (k: `WeightCounts.kept_tensors`), and there are 2 N f more while its gradient is
    computed. In pieces, the second half of a block that is recomputed needs no more than self attention, s N d (s:
    `WeightCounts.own_tensors`), or `PIECE_NUMBERS`. Neither number falls with more tokens, although these go in more
    pieces: a smaller batch of the same run needs no more.

    Args:
        model: the model profile.
        settings: the choices.
        tokens: of the largest step.
        is_free: not every block is recomputed; the last one is not.
    """
    sizes, counts = model.transformer, weight_counts(model, modulation=settings.modulation)
    row, wide_row = (tokens * width * settings.wide for width in (sizes.dim, sizes.ffn_dim))
    kept = counts.kept_tensors * row + 2 * wide_row
    at_once = kept + 2 * wide_row
    in_pieces = settings.by_hand and not settings.whole and counts.own_tensors
    if not in_pieces or num_token_pieces(tokens, sizes.dim, sizes.ffn_dim) == 1:
        return kept, at_once
    # FlashAttention in a fixed order has one sum of the queries' gradient for each heads' share of the processors.
    sums = 2 * -(-MOST_PROCESSORS // sizes.num_heads) if settings.deterministic else 2
    own = (counts.own_tensors - 2 + sums) * row
    at_most = max(own, PIECE_NUMBERS * settings.wide)
    if is_free:  # beside what it keeps there are two tensors more, and of two pieces one's share of the wide ones
        at_most = max(at_most, kept + 2 * row + wide_row // 2)
    return kept, min(at_once, at_most)


def num_token_pieces(num_tokens: int, dim: int, ffn_dim: int) -> int:
    """Into how many pieces the tokens of a step go for what follows self attention in a block by hand.

    Beside 10 N d numbers there are (8 N d + 4 N f) / p while a piece's gradients are taken: as few pieces as keep this
    below what self attention needs, or below `PIECE_NUMBERS`. Short clips and pictures are one piece, for each costs
    time to start.

    >>> num_token_pieces(32760, 5120, 13824), num_token_pieces(32760, 1536, 8960), num_token_pieces(4096, 5120, 13824)
    (4, 6, 1)
    """
    stays, divided = 10 * num_tokens * dim, num_tokens * (8 * dim + 4 * ffn_dim)
    return max(1, -(-divided // (max(OWN_TENSORS * num_tokens * dim, PIECE_NUMBERS) - stays)))


def num_trained(model: Model, settings: MemorySettings) -> int:
    """How many transformers are trained: both experts, unless one is chosen."""
    return 2 if model.experts and not settings.one_expert else 1


def trained_weights(model: Model, settings: MemorySettings) -> int:
    """Weights that are trained, of each expert."""
    if settings.whole:
        counts = weight_counts(model)
        return counts.outer + counts.outer_float32 + model.transformer.num_layers * counts.block
    return adapter_weights(model, settings.rank, modulation=settings.modulation) * settings.factors


def bits_of(settings: MemorySettings) -> float:
    """Of a weight of a linear layer of a block: a file that holds less than the form asked for keeps its own."""
    plain = 8.0 * settings.wide
    asked = plain if settings.quantize == "none" else BITS[settings.quantize]
    stored = settings.stored_bits
    return stored if stored < 16 and (settings.quantize == "none" or stored <= asked) else asked


def block_bytes(model: Model, settings: MemorySettings) -> int:
    """Of one block's frozen weights in memory."""
    counts = weight_counts(model)
    linear = round(counts.block_linear * bits_of(settings) / 8)
    return linear + counts.block_rest * settings.wide + counts.block_float32 * 4


def outer_bytes(model: Model, wide: int = 2) -> int:
    """Of the weights outside the blocks: embeddings, time layers and head, which always stay on the device."""
    counts = weight_counts(model)
    return counts.outer * wide + counts.outer_float32 * 4


def adapter_weights(model: Model, rank: int, *, modulation: bool = False) -> int:
    """Weights of a LoRA of that rank on every usual target of the blocks; `modulation` as in `MemorySettings`."""
    return model.transformer.num_layers * rank * weight_counts(model, modulation=modulation).adapter


def packs(options: Train) -> bool:
    """Whether the batches of a step go through the blocks together: with `--pack`, which `--plain` does not read."""
    return options.pack and not options.plain


def batches_of_a_pass(options: Train) -> int:
    """How many batches go through the blocks together: where they are packed all that one process accumulates.

    >>> from dataclasses import replace
    >>> from pathlib import Path
    >>> run = Train(output_dir=Path("out"), output_name="cats", pack=True, gradient_accumulation_steps=4)
    >>> batches_of_a_pass(run), batches_of_a_pass(replace(run, plain=True))
    (4, 1)
    """
    return options.gradient_accumulation_steps if packs(options) else 1


def tokens_of(model: Model, resolution: tuple[int, int], num_frames: int) -> int:
    """Tokens of a clip, or of a picture with a control image (of its size) and its text where these are in the row.

    Args:
        model: the model profile.
        resolution: width and height in pixels.
        num_frames: 4n+1; 1 for an image.

    >>> from wangen import profiles
    >>> tokens_of(profiles.model("t2v-14B"), (832, 480), 81)
    32760
    >>> tokens_of(profiles.model("qwen-image-edit"), (1024, 1024), 1)  # 2 x 4096, and 1337 + 128 of text
    9657
    """
    return tokens_beside(model, resolution, num_frames, [resolution] * min(1, model.max_controls), SHORT_TEXT)


def tokens_beside(
    model: Model, size: tuple[int, int], num_frames: int, controls: Sequence[tuple[int, int]], rows: int
) -> int:
    """The same beside control images of sizes of their own, and a caption of so many rows."""
    tokens = grid_tokens(model, size, num_frames)
    if model.prompt is None:
        return tokens
    shown = sum(grid_tokens(model, control, num_frames) + model.prompt.picture_tokens for control in controls)
    return tokens + shown + rows


def grid_tokens(model: Model, size: tuple[int, int], num_frames: int) -> int:
    """Tokens of a picture or clip alone; `size` is (width, height) in pixels."""
    return prod(cells // patch for cells, patch in zip(model.latent_size(size, num_frames), model.patch, strict=True))


def usable_bytes(card_bytes: int) -> int:
    """What a training run may take of a card with so much memory, when nothing else uses it."""
    return int(card_bytes * CARD_SHARE)


def preset_of(model: Model, vram: str) -> Preset:
    """The preset for a value of `--vram` that is a number.

    Raises:
        UsageError: the model has none.
    """
    preset = model.presets.get(int(vram)) if vram.isdigit() else None
    if preset is None:
        known = ", ".join(map(str, sorted(model.presets))) or "none"
        raise UsageError(f"--vram {vram}: {model.name} has no preset for it", cure=f"there are: {known}")
    return preset


def preset_flags(model: Model, vram: str | None) -> dict[str, Any]:
    """The flags of the training step that `--vram` stands for; none for `auto`, which is decided where it trains.

    Raises:
        UsageError: the model has no such preset.
    """
    if vram in (None, "auto"):
        return {}
    preset = preset_of(model, str(vram))
    return {name: getattr(preset, name) for name in PLAIN_MEMORY}
