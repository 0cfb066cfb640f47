"""Batches made ready for a forward pass: noise and timesteps drawn from seeds of their own, in the reading threads."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import tee
from typing import Any, NamedTuple

import torch

from wangen.generator.steps import Train
from wangen.generator.toml_values import FRAMES_PER_LATENT
from wangen.runtime.ahead import ahead
from wangen.runtime.epochs import EpochSampler
from wangen.runtime.loader import Batch, Draw, read_batch
from wangen.runtime.randomness import generator_for
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.timesteps import Sampler

DrawKey = tuple[int, int, str, int]
"""(seed, epoch, content key of the sample, repeat): what everything random about one use of a sample is drawn from."""


@dataclass(frozen=True)
class Prepared:
    """One batch, made ready on the CPU (pinned, where a GPU waits).

    Letters: B items, C channels, F h w latent frames, height and width.

    Attributes:
        batch: latents, texts and what belongs to them.
        keys: B keys of the draws.
        sigmas: (B,) noise levels.
        noise: (B, C, F, h, w).
        clean_frames: for each item how many first latent frames are given and not noised.
    """

    batch: Batch
    keys: list[DrawKey]
    sigmas: torch.Tensor
    noise: torch.Tensor
    clean_frames: list[int]


class Group(NamedTuple):
    """The batches of one optimizer step.

    Attributes:
        epoch: that they belong to.
        batches: of this process; it may have none of a short step at an epoch's end.
        num_own: how many of them count; the rest are fillers, so that all processes make equally many passes.
        num_items: in the batches of all processes.
    """

    epoch: int
    batches: list[Prepared]
    num_own: int
    num_items: int

    @property
    def counted(self) -> list[Prepared]:
        """The batches that count."""
        return self.batches[: self.num_own]


def groups(
    plan: Plan,
    expert: ExpertPlan,
    step: int,
    ranks: Ranks,
    *,
    pin: bool = False,
    stop: Callable[[float], bool] | None = None,
) -> Generator[Group, None, None]:
    """What an expert is trained on from a step of its own to its end, read ahead in threads, also into the next epoch.

    Args:
        plan: of the run.
        expert: whose timesteps are drawn.
        step: how many steps it has done.
        ranks: this process reads its own share of every step's batches.
        pin: put the tensors into pinned memory, from where a GPU takes them while it computes.
        stop: asked while a batch is waited for, with the seconds that this has taken.

    Raises:
        StoppedError: it said so.
    """
    sampler = Sampler(plan.options, expert.low, expert.high, expert.name)
    to_read, to_train = tee(_drawn(plan, expert, step))
    jobs = (partial(_read, plan, sampler, epoch, draws, pin) for epoch, each in to_read for draws in ranks.own(each))
    with closing(ahead(jobs, plan.options.max_data_loader_n_workers, stop)) as reader:
        for epoch, batches in to_train:
            own = [next(reader) for _ in ranks.own(batches)]
            yield Group(epoch, own, ranks.num_own(batches), sum(map(len, batches)))


def _drawn(plan: Plan, expert: ExpertPlan, step: int) -> Iterator[tuple[int, Sequence[Sequence[Draw]]]]:
    """The epoch and the batches of all processes, of each step of an expert from this one to its end."""
    size = plan.options.gradient_accumulation_steps
    order = EpochSampler(plan.samples, plan.options.seed, plan.options.caption_dropout)
    while step < expert.num_steps:
        epoch, offset = divmod(step, plan.steps_per_epoch)
        batches = order.epoch(epoch)
        firsts = range(offset * size, len(batches), size)[: expert.num_steps - step]
        yield from ((epoch, batches[first : first + size]) for first in firsts)
        step += len(firsts)


def _read(plan: Plan, sampler: Sampler, epoch: int, draws: Sequence[Draw], pin: bool) -> Prepared:
    prepared = prepare(plan, read_batch(plan.samples, draws, plan.options.prior_loss_weight), draws, epoch, sampler)
    return pinned(prepared) if pin else prepared


def prepare(plan: Plan, batch: Batch, draws: Sequence[Draw], epoch: int, sampler: Sampler) -> Prepared:
    """Draw noise, timestep and condition of every item, each from (seed, epoch, sample, repeat)."""
    options = plan.options
    keys = [(options.seed, epoch, key, draw.repeat) for key, draw in zip(batch.keys, draws, strict=True)]
    height, width = batch.latents.shape[3:]
    tokens = (height // plan.model.patch[1]) * (width // plan.model.patch[2])
    sigmas = [sampler.sigma(key, draw.position, tokens) for key, draw in zip(keys, draws, strict=True)]
    shape = batch.latents.shape[1:]
    noise = torch.stack([_noise(shape, key, options.noise_offset) for key in keys])
    frames = [_clean_frames(options, key, shape[1]) for key in keys]
    return Prepared(batch, keys, torch.tensor(sigmas), noise, frames)


def _noise(shape: Sequence[int], key: DrawKey, offset: float) -> torch.Tensor:
    """Standard normal noise; with an offset every channel is shifted as a whole.

    Source of the offset: https://www.crosslabs.org/blog/diffusion-with-offset-noise.
    """
    noise = torch.randn(*shape, generator=generator_for("noise", *key))
    if offset:
        noise += offset * torch.randn(shape[0], 1, 1, 1, generator=generator_for("noise offset", *key))
    return noise


def _clean_frames(options: Train, key: DrawKey, num_frames: int) -> int:
    """How many first latent frames are given; none of a still image, which would leave nothing to learn."""
    if options.condition_dropout:
        drawn = torch.rand((), generator=generator_for("condition", *key)).item()
        if drawn < options.condition_dropout:
            return 0
    return clean_frames(options.condition_frames or 0, num_frames)


def clean_frames(condition_frames: int, num_frames: int) -> int:
    """Of so many latent frames those that are given clean, for `--condition_frames`; at least one is left to learn.

    >>> clean_frames(0, 21), clean_frames(1, 21), clean_frames(9, 21), clean_frames(9, 3), clean_frames(1, 1)
    (0, 1, 3, 2, 0)
    """
    return min(1 + (condition_frames - 1) // FRAMES_PER_LATENT, num_frames - 1) if condition_frames else 0


def pinned(prepared: Prepared) -> Prepared:
    """The same in pinned memory."""
    return _mapped(prepared, torch.Tensor.pin_memory)


def on_device(prepared: Prepared, device: torch.device) -> Prepared:
    """The same on a device, without waiting for it."""
    return _mapped(prepared, lambda tensor: tensor.to(device, non_blocking=True))


def _mapped(prepared: Prepared, change: Callable[[torch.Tensor], torch.Tensor]) -> Prepared:
    batch = prepared.batch
    held: dict[str, Any] = {
        name: None if value is None else change(value)
        for name in ("latents", "weights", "condition", "image_tokens", "loss_mask")
        for value in [getattr(batch, name)]
    }
    if batch.controls is not None:
        held["controls"] = [[change(control) for control in controls] for controls in batch.controls]
    return replace(
        prepared,
        batch=replace(batch, texts=[change(text) for text in batch.texts], **held),
        sigmas=change(prepared.sigmas),
        noise=change(prepared.noise),
    )
