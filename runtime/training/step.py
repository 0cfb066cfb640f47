"""One optimizer step: the family's velocity, the loss, the clipped gradient. Nothing here waits for a GPU."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from wangen.generator.adapter_settings import settings_of_flags
from wangen.generator.memory import packs
from wangen.generator.steps import Train
from wangen.runtime.denoising import Velocity
from wangen.runtime.devices import fixed_order, is_out_of_memory
from wangen.runtime.fast import graphs
from wangen.runtime.flow import flow_loss, loss_weight, noised, velocity
from wangen.runtime.interrupt import Interrupt
from wangen.runtime.loader import Batch
from wangen.runtime.models import Family, VelocityModel
from wangen.runtime.models.inputs import Inputs
from wangen.runtime.randomness import seed_for
from wangen.runtime.training.prepared import DrawKey, Group, Prepared, on_device
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.run import Run, Trainee
from wangen.runtime.training.weight_norms import scale_weight_norms

Pass = tuple[list[Prepared], int]
"""The batches of a forward pass, and how many of their items count."""


@dataclass(frozen=True)
class StepResult:
    """What a step leaves to be read later, of this process's share: reading a tensor of a GPU waits for it.

    Attributes:
        step: of the run, counted from 1.
        epoch: of the expert's data.
        expert: its name.
        losses: (items,) of the items, weighted, on the device.
        errors: (items,) their plain mean squared errors, on the device.
        sigmas: (items,) on the CPU.
        names: of the items.
        grad_norm: before clipping, on the device.
        learning_rates: of this step, by the names under which they are logged.
        tokens: of each item, latent tokens that went through the transformer.
        text_tokens: of each item, rows of text that did.
        image_tokens: of CLIP, with each item.
        num_scaled: layers that `--scale_weight_norms` shrank, () on the device.
    """

    step: int
    epoch: int
    expert: str
    losses: torch.Tensor
    errors: torch.Tensor
    sigmas: torch.Tensor
    names: list[str]
    grad_norm: torch.Tensor
    learning_rates: Mapping[str, float]
    tokens: list[int]
    text_tokens: list[int]
    image_tokens: int
    num_scaled: torch.Tensor | None


def optimizer_step(run: Run, trainee: Trainee, group: Group, factor: float, interrupt: Interrupt) -> StepResult | None:
    """One optimizer step over a group of batches; None when an interrupt came first, with nothing changed.

    Every item counts the same, however the group is cut into batches and shared out to processes.

    Args:
        run: of the whole.
        trainee: the expert that is trained.
        group: its batches.
        factor: on the learning rate.
        interrupt: asked before every batch where this process is the only one: others would wait for it.

    Raises:
        torch.OutOfMemoryError: nothing of the step is done.
    """
    options = run.plan.options
    passes = _passes(group, run.ranks, pack=packs(options))
    found = _gradients_anyhow(run, trainee, group, passes, interrupt)
    if found is None:
        return None
    losses, errors = found
    if not trainee.step:
        graphs.release()  # the optimizer is about to take the memory of its state
    norm = trainee.optimization.clip(options.max_grad_norm)
    run.is_updating = True
    trainee.optimization.step(factor, seed_for("optimizer", options.seed, trainee.plan.name, trainee.step))
    num_scaled = None
    if options.scale_weight_norms:
        num_scaled = scale_weight_norms(trainee.pairs, options.scale_weight_norms)
    trainee.step += 1
    if trainee.ema:
        trainee.ema.update()
    run.is_updating = False
    return StepResult(
        step=run.step,
        epoch=group.epoch,
        expert=trainee.plan.name,
        losses=losses,
        errors=errors,
        sigmas=torch.cat([torch.zeros(0), *(prepared.sigmas for prepared in group.counted)]),
        names=[name for prepared in group.counted for name in prepared.batch.names],
        grad_norm=norm,
        learning_rates=trainee.optimization.rates(),
        tokens=[n for prepared in group.counted for n in num_tokens(prepared.batch, run.plan.model.patch)],
        text_tokens=[len(text) for prepared in group.counted for text in prepared.batch.texts],
        image_tokens=max((_num_views(prepared.batch) for prepared in group.counted), default=0),
        num_scaled=num_scaled,
    )


def _gradients_anyhow(
    run: Run, trainee: Trainee, group: Group, passes: Sequence[Pass], interrupt: Interrupt
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `_gradients`, of nothing else; where memory is too small beside recorded graphs, without these."""
    try:
        trainee.optimization.zero_grad()
        return _gradients(run, trainee, group, passes, interrupt)
    except RuntimeError as error:
        if not (is_out_of_memory(error) and graphs.give_up()):
            raise
    return _gradients_anyhow(run, trainee, group, passes, interrupt)


def _gradients(
    run: Run, trainee: Trainee, group: Group, passes: Sequence[Pass], interrupt: Interrupt
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Add the step's gradients, of all processes, to those that are there.

    Returns:
        The losses and errors of this process's items; None when an interrupt came first.
    """
    losses, errors = [torch.zeros(0, device=run.device)], [torch.zeros(0, device=run.device)]
    for number, (together, counted) in enumerate(passes, 1):
        if trainee.sharded:
            trainee.sharded.is_last_pass = number == len(passes)
        if interrupt.requested and run.ranks.count == 1:
            return None
        loss, error = _there_and_back(run, trainee, together, counted, group.num_items)
        losses.append(loss)
        errors.append(error)
    if trainee.sharded:
        trainee.sharded.add_up()
    flat = trainee.optimization.flat
    run.ranks.add_up(flat.gradients[: flat.num_joint])
    return torch.cat(losses), torch.cat(errors)


def _there_and_back(
    run: Run, trainee: Trainee, together: list[Prepared], counted: int, num_items: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass: its gradients are added to those that are there, and nothing of it but its numbers outlives it.

    Returns:
        The losses and errors of the items that count.
    """
    keys = [key for prepared in together for key in prepared.keys]
    dropout = dropout_seed(keys, run.device) if trainee.transformer.training else contextlib.nullcontext()
    with dropout, fixed_order():
        loss, error = item_losses(run.kind, trainee.model, together, run.plan.options, run.device)
        if loss.requires_grad or not settings_of_flags(run.plan.options).module_dropout:  # it may leave all out
            (loss[:counted].sum() / num_items).backward()  # type: ignore[no-untyped-call]
    return loss[:counted].detach(), error[:counted].detach()


def _passes(group: Group, ranks: Ranks, *, pack: bool) -> list[Pass]:
    """The batches of a step by forward pass, and how many items of each pass, the first ones, count.

    Where first frames are given, tokens have timesteps of their own and are never one sequence with others: what each
    of those batches keeps for its backward pass would only lie there together. Processes in step go through the model
    equally often: they pack all or none, and one that has no batch of its own goes through its fillers.
    """
    apart = any(any(prepared.clean_frames) for prepared in group.batches)
    if pack and ranks.in_step:
        apart = ranks.any(apart)
    if pack and group.batches and not apart:
        return [(group.counted or group.batches, sum(len(prepared.keys) for prepared in group.counted))]
    return [
        ([prepared], len(prepared.keys) if number < group.num_own else 0)
        for number, prepared in enumerate(group.batches)
    ]


def item_losses(
    kind: Family, model: VelocityModel, together: Sequence[Prepared], options: Train, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each item as it is trained on, and its plain mean squared error, both (items,).

    Frames that are given stay clean, have timestep 0 and no part in the loss.

    Args:
        kind: the model's family.
        model: predicts velocities.
        together: batches that make one forward pass.
        options: the weighting scheme.
        device: where the model is.
    """
    timesteps = [1000 * prepared.sigmas for prepared in together]  # stay in host memory, where they are looked at
    there = [on_device(prepared, device) for prepared in together]
    passes = [_inputs(kind, prepared, times) for prepared, times in zip(there, timesteps, strict=True)]
    predictions = [_predicted(model, passes[0])] if len(passes) == 1 else model.packed(passes)
    losses, errors = [], []
    for prepared, predicted in zip(there, predictions, strict=True):
        error = _error(prepared, predicted)
        errors.append(error)
        losses.append(error * loss_weight(options.weighting_scheme, prepared.sigmas) * prepared.batch.weights)
    return torch.cat(losses), torch.cat(errors)


def item_errors(kind: Family, model: Velocity, prepared: Prepared, device: torch.device) -> torch.Tensor:
    """The plain mean squared error of each item of one forward pass, (B,), whatever the model is trained on."""
    timesteps, there = 1000 * prepared.sigmas, on_device(prepared, device)
    return _error(there, _predicted(model, _inputs(kind, there, timesteps)))


def _predicted(model: Velocity, one: Inputs) -> torch.Tensor:
    return model(one.latents, one.timesteps, one.texts, **one.given)


def _error(prepared: Prepared, predicted: torch.Tensor) -> torch.Tensor:
    """(B,), without the frames that are given."""
    batch, mask = prepared.batch, prepared.batch.loss_mask
    if any(prepared.clean_frames):
        mask = _without(prepared.clean_frames, batch.latents, mask)
    return flow_loss(predicted, velocity(batch.latents, prepared.noise), mask)


def _inputs(kind: Family, prepared: Prepared, timesteps: torch.Tensor) -> Inputs:
    """What the model gets of a batch: noisy latents, but for the frames that are given."""
    batch = prepared.batch
    latents = noised(batch.latents, prepared.noise, prepared.sigmas)
    if any(prepared.clean_frames):
        for row, (latent, number) in enumerate(zip(batch.latents, prepared.clean_frames, strict=True)):
            latents[row, :, :number] = latent[:, :number]
        timesteps = kind.timesteps_per_token(timesteps, latents, prepared.clean_frames)
    return Inputs(latents, timesteps, batch.texts, batch.condition, batch.image_tokens, batch.controls)


def _without(clean_frames: list[int], clean: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The mask of the loss (B, 1, F, h, w) with nothing on the frames that are given."""
    result = clean.new_ones(len(clean), 1, *clean.shape[2:]) if mask is None else mask.clone()
    for row, number in zip(result, clean_frames, strict=True):
        row[:, :number] = 0
    return result


def num_tokens(batch: Batch, patch: tuple[int, int, int]) -> list[int]:
    """Latent tokens of each item of a batch, with those of its control images."""
    controls = batch.controls or [[]] * len(batch.latents)
    return [
        sum(math.prod(size // by for size, by in zip(picture.shape[1:], patch, strict=True)) for picture in pictures)
        for pictures in ((latents, *own) for latents, own in zip(batch.latents, controls, strict=True))
    ]


def _num_views(batch: Batch) -> int:
    return 0 if batch.image_tokens is None else batch.image_tokens.shape[1]


@contextlib.contextmanager
def dropout_seed(keys: list[DrawKey], device: torch.device) -> Iterator[None]:
    """Make dropout a function of the batch: torch offers no generator for it, so the global one is lent a seed."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed_for("dropout", *(part for key in keys for part in key)))
        yield
