"""What a run costs: work, memory, disk and time, from its flags, its dataset's shapes and a card.

Time is a range: the work over what large products reach of the card's peak, times `GOOD` to `USUAL`, as docs/speed.md
explains; not less than starting the kernels takes, nor than copying swapped blocks does.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from wangen.generator.cache_sizes import UMT5_MAX_ROWS
from wangen.generator.cards import Gpu
from wangen.generator.flops import NOTHING, StepFlops, step_flops
from wangen.generator.memory import (
    SHORT_TEXT,
    MemoryBudget,
    MemorySettings,
    adapter_weights,
    batches_of_a_pass,
    block_bytes,
    grid_tokens,
    memory_plan,
    memory_settings,
    num_trained,
    trained_weights,
    usable_bytes,
)
from wangen.generator.plan.saves import saved_bytes
from wangen.generator.plan.shapes import Shape, Survey
from wangen.generator.run_length import num_steps_of
from wangen.generator.small_steps import is_small, replays
from wangen.generator.steps import Train
from wangen.generator.weight_counts import CLIP_TOKENS
from wangen.profiles import Model

Seconds = tuple[float, float]

REACHED = 0.8
"""Share of a card's peak that large products were seen to reach (790 of 989 TFLOP/s on an H100)."""

GOOD, USUAL = 1.4, 2.0
"""What a step takes over that limit: good for clips, and usual."""

LAUNCHES, LAUNCH_S, REPLAYED_S = 290, 13e-6, 2.5e-6
"""Kernels that a block starts in a step with checkpointing (traced), what starting one takes a fast processor, with the
Python around it (half of what it took a server's of 2026 in a virtual machine), and what it takes in a CUDA graph."""

LINK_BYTES_S: Mapping[int, float] = {3: 12e9, 4: 25e9, 5: 50e9}
"""Between host and card over 16 lanes, by the generation of PCIe."""


@dataclass(frozen=True)
class ShapePlan:
    """The batches of one shape.

    Attributes:
        shape: of the samples.
        samples: in the dataset.
        batches: in an epoch.
        tokens: of a full batch.
        flops: of a full batch.
        seconds: of a full batch, from good to usual; None where the card's speed is not known.
    """

    shape: Shape
    samples: int
    batches: int
    tokens: int
    flops: StepFlops
    seconds: Seconds | None


@dataclass(frozen=True)
class RunPlan:
    """A training run before it starts.

    Attributes:
        train: the flags, with `--vram` resolved.
        model: with the sizes of the weights themselves where these are here.
        gpu: the card; None where none is known.
        processes: that train together, on as many cards.
        shapes: of the dataset, the one that needs most memory first.
        steps_per_epoch: optimizer steps.
        num_steps: of the run; None where the dataset is not there yet.
        settings: what decides its memory.
        rows: about those of a text's embedding.
        budget: memory at the first of the shapes.
        cache_bytes: of the dataset's cache.
        state_bytes: of a training state and of a saved file.
    """

    train: Train
    model: Model
    gpu: Gpu | None
    processes: int
    shapes: Sequence[ShapePlan]
    steps_per_epoch: int
    num_steps: int | None
    settings: MemorySettings
    rows: int
    budget: MemoryBudget
    cache_bytes: int
    state_bytes: tuple[int, int]

    @property
    def usable(self) -> int | None:
        """Bytes of the card that a run may take when nothing else uses it."""
        return usable_bytes(self.gpu.memory) if self.gpu else None

    @property
    def fits(self) -> bool | None:
        """Whether the memory suffices, by the formula; None where no card is known."""
        return None if self.usable is None else self.budget.device <= self.usable

    @property
    def step_seconds(self) -> Seconds | None:
        """Of a mean step, from good to usual."""
        known = [(one.batches, one.seconds) for one in self.shapes if one.seconds]
        if len(known) < len(self.shapes):
            return None
        batches = sum(number for number, _ in known)
        each = self.train.gradient_accumulation_steps / batches
        low, high = (sum(number * seconds[end] for number, seconds in known) * each for end in (0, 1))
        return low, high

    @property
    def flops(self) -> StepFlops:
        """Of a mean step of one process."""
        total = reduce(add, (one.flops * one.batches for one in self.shapes), NOTHING)
        return total * (self.train.gradient_accumulation_steps / max(1, sum(one.batches for one in self.shapes)))


def plan_run(
    train: Train, model: Model, survey: Survey, gpu: Gpu | None, *, processes: int = 1, bits: float = 16.0
) -> RunPlan:
    """The plan of a run.

    Args:
        train: the flags; `--vram` is resolved.
        model: with the sizes that the weights have.
        survey: of the dataset.
        gpu: the card of each process.
        processes: that train together.
        bits: of a weight in the file of the base.
    """
    rows = survey.mean_rows or SHORT_TEXT
    settings = replace(memory_settings(train), stored_bits=bits)
    shapes = []
    for shape, uses in survey.uses.items():
        flops = shape_flops(shape, train, model, rows)
        tokens = memory_tokens(shape, model, rows)
        replayed = replays(train) and is_small(tokens, model.transformer.dim)
        seconds = batch_seconds(flops, gpu, settings, model, replayed=replayed) if gpu else None
        shapes.append(ShapePlan(shape, survey.samples[shape], -(-uses // shape.batch_size), tokens, flops, seconds))
    shapes.sort(key=lambda one: one.tokens, reverse=True)
    most = shapes[0].tokens * batches_of_a_pass(train) if shapes else 0
    budget = memory_plan(model, settings, tokens=most)
    shards = _shards(train, budget, gpu, processes)
    if shards > 1:
        settings = replace(settings, shards=shards, all_resident=True)
        budget = memory_plan(model, settings, tokens=most)
    batches = _num_batches(survey)
    steps = -(-batches // (train.gradient_accumulation_steps * processes))
    return RunPlan(
        train=train, model=model, gpu=gpu, processes=processes, shapes=shapes, steps_per_epoch=steps,
        num_steps=num_steps_of(train, steps) if survey.exact else None, settings=settings, rows=rows, budget=budget,
        cache_bytes=survey.cache_bytes, state_bytes=saved_bytes(train, all_trained(train, model)),
    )  # fmt: skip


def _shards(train: Train, budget: MemoryBudget, gpu: Gpu | None, processes: int) -> int:
    """How many processes share out the weights, 1 where each has all: as `--parallel auto` chooses."""
    if processes == 1 or train.parallel == "ddp" or (train.parallel == "auto" and train.blocks_to_swap):
        return 1
    if train.parallel == "auto" and (gpu is None or budget.device <= usable_bytes(gpu.memory)):
        return 1
    return processes


def _num_batches(survey: Survey) -> int:
    """In an epoch: as the trainer batches them, whatever control images they have."""
    together: Counter[Shape] = Counter()
    for shape, uses in survey.uses.items():
        together[Shape(shape.size, shape.num_frames, batch_size=shape.batch_size)] += uses
    return sum(-(-uses // shape.batch_size) for shape, uses in together.items())


def memory_tokens(shape: Shape, model: Model, rows: int) -> int:
    """Tokens that a batch of full size carries through the blocks, text included where it goes with the picture.

    >>> from wangen import profiles
    >>> memory_tokens(Shape((832, 480), 81, batch_size=2), profiles.model("t2v-14B"), 64)
    65520
    """
    return shape.batch_size * (video_tokens(shape, model) + (rows if model.prompt else 0))


def tokens_of_a_step(plan: RunPlan) -> tuple[int, int]:
    """The fewest and the most tokens of pictures and clips that a step of all processes can have."""
    batches = plan.train.gradient_accumulation_steps * plan.processes
    each = [(video_tokens(one.shape, plan.model), one.shape.batch_size) for one in plan.shapes]
    return min(tokens for tokens, _ in each), batches * max(tokens * size for tokens, size in each)


def video_tokens(shape: Shape, model: Model) -> int:
    """Tokens of a sample's picture or clip and its control images."""
    control = grid_tokens(model, shape.control_size or shape.size, shape.num_frames)
    return grid_tokens(model, shape.size, shape.num_frames) + shape.num_controls * control


def shape_flops(shape: Shape, train: Train, model: Model, rows: int) -> StepFlops:
    """The work of a full batch; `rows`: of a text's embedding."""
    whole = train.train_mode == "full"
    each = step_flops(
        model.transformer, video_tokens(shape, model),
        text_tokens=UMT5_MAX_ROWS if train.plain and not model.prompt else rows,
        image_tokens=CLIP_TOKENS if model.has_clip else 0, joint=model.prompt is not None,
        adapter_weights=0 if whole else adapter_weights(model, train.network_dim),
        checkpointing=train.checkpointing or "full", free_blocks=train.checkpointing_free_blocks or 0, train_base=whole,
        whole_blocks=train.plain,
    )  # fmt: skip
    return each * shape.batch_size


def batch_seconds(
    flops: StepFlops, gpu: Gpu, settings: MemorySettings, model: Model, *, replayed: bool = False
) -> Seconds | None:
    """What a batch takes, from good to usual, `replayed` if NVIDIA's; None where the card's speed is not known."""
    if gpu.card is None:
        return None
    limit = flops.done / (REACHED * gpu.card.tflops * 1e12)
    copied = 2 * settings.blocks_to_swap * block_bytes(model, settings) / LINK_BYTES_S[gpu.card.pcie]
    each = REPLAYED_S if replayed and not gpu.card.amd else LAUNCH_S
    started = model.transformer.num_layers * LAUNCHES * each
    return max(GOOD * limit, copied, started), max(USUAL * limit, 1.5 * copied, 2 * started)


def all_trained(train: Train, model: Model) -> int:
    """The numbers that are trained in all experts."""
    settings = memory_settings(train)
    return trained_weights(model, settings) * num_trained(model, settings)
