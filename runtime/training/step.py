"""One optimizer step: noise and sigma from their own seeds, the family's velocity, the loss, the clipped gradient."""

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from wangen.generator.errors import WangenError
from wangen.generator.steps import Train
from wangen.runtime.flow import TimestepDistribution, flow_loss, noised, velocity
from wangen.runtime.interrupt import Interrupt
from wangen.runtime.loader import Batch
from wangen.runtime.randomness import generator_for, seed_for
from wangen.runtime.training import checkpoint
from wangen.runtime.training.run import Run


def optimizer_step(training: Run, epoch: int, group: list[Batch], interrupt: Interrupt) -> dict[str, float] | None:
    """One optimizer step over a group of batches; None when an interrupt came first, with nothing changed.

    Raises:
        WangenError: loss or gradient is not finite, or the memory is full; the samples are named.
    """
    training.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for batch in group:
        if interrupt.requested:
            return None
        try:
            loss = batch_loss(training, epoch, batch)
            (loss / len(group)).backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError:
            raise _out_of_memory(training, batch) from None
        total += loss.item() / len(group)
    parameters = list(training.parameters.values())
    limit = training.plan.options.max_grad_norm or math.inf
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit).item()
    if not math.isfinite(norm):
        raise _not_finite(training, "gradient", [name for batch in group for name in batch.names])
    training.optimizer.step()
    return {"loss": total, "grad_norm": norm}


def batch_loss(training: Run, epoch: int, batch: Batch) -> torch.Tensor:
    """The mean loss of a batch, its noise and sigmas drawn for (seed, epoch, sample, repeat).

    Raises:
        WangenError: it is not finite; the samples are named.
    """
    options = training.plan.options
    keys = [(options.seed, epoch, key, repeat) for key, repeat in zip(batch.keys, batch.repeats, strict=True)]
    distribution = distribution_of(options)
    sigmas = torch.tensor([distribution.draw(generator_for("sigma", *key)) for key in keys])
    shape = batch.latents.shape[1:]
    noise = torch.stack([torch.randn(shape, generator=generator_for("noise", *key)) for key in keys])
    clean, noise = batch.latents.to(training.device), noise.to(training.device)
    texts = [text.to(training.device) for text in batch.texts]
    with _dropout_seed(options, keys), _offload(options, training.device), _autocast(options, training.device):
        predicted = training.kind.predict_velocity(
            training.transformer, noised(clean, noise, sigmas.to(training.device)), 1000 * sigmas, texts,
            condition=_on(batch.condition, training.device), image_tokens=_on(batch.image_tokens, training.device),
        )  # fmt: skip
    losses = flow_loss(
        predicted, velocity(clean, noise), sigmas, options.weighting_scheme, _on(batch.loss_mask, training.device)
    )
    if not losses.isfinite().all():
        raise _not_finite(
            training, "loss", [n for n, loss in zip(batch.names, losses, strict=True) if not loss.isfinite()]
        )
    return losses.mean()


def _on(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def distribution_of(options: Train) -> TimestepDistribution:
    """The distribution that the timestep flags describe."""
    return TimestepDistribution(
        sampling=options.timestep_sampling,
        shift=options.discrete_flow_shift,
        sigmoid_scale=options.sigmoid_scale,
        logit_mean=options.logit_mean,
        logit_std=options.logit_std,
        low=options.min_timestep / 1000,
        high=options.max_timestep / 1000,
        cut=options.preserve_distribution_shape,
    )


def _not_finite(training: Run, what: str, names: list[str]) -> WangenError:
    newest = checkpoint.newest(training.plan.states)
    last = f"the last good state is {newest}" if newest else "no state was saved yet"
    return WangenError(
        f"the {what} is not finite at step {training.step + 1}, on {', '.join(names)}; {last}",
        cure="look at these items; lower --learning_rate or use --mixed_precision no",
    )


def _out_of_memory(training: Run, batch: Batch) -> WangenError:
    size = "x".join(map(str, batch.latents.shape[2:]))
    return WangenError(
        f"out of memory at step {training.step + 1}, on {', '.join(batch.names)} (latents of {size})",
        cure="use --gradient_checkpointing, batch_size 1, a smaller resolution or fewer target_frames; "
        "the last saved state stays",
    )


def _autocast(options: Train, device: torch.device) -> AbstractContextManager[Any]:
    if options.mixed_precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def _offload(options: Train, device: torch.device) -> AbstractContextManager[Any]:
    if options.gradient_checkpointing_cpu_offload:
        return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
    return contextlib.nullcontext()


@contextlib.contextmanager
def _dropout_seed(options: Train, keys: list[tuple[int, int, str, int]]) -> Iterator[None]:
    """Make dropout a function of the batch: torch offers no generator for it, so the global one is lent a seed."""
    if not options.network_dropout:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed_for("dropout", *(part for key in keys for part in key)))
        yield
