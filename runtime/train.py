"""`train`: a LoRA on cached latents and embeddings, resumable at any moment to the same bytes.

The way of a step: an epoch's order -> batches from the cache -> noise and sigma from seeds of their own -> the family's
velocity -> loss -> clipped gradient -> optimizer. The state between steps is weights, optimizer and the step's number.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wangen import profiles
from wangen.generator import headers
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.session import Report
from wangen.generator.steps import DEFAULT_EPOCHS, Train
from wangen.generator.steps import options as flags_of
from wangen.generator.workspace import require_writable
from wangen.runtime import adapter, checkpoint
from wangen.runtime.cache import digest
from wangen.runtime.checkpoint import TrainingState
from wangen.runtime.devices import choose_device, set_attention
from wangen.runtime.interrupt import Interrupt
from wangen.runtime.loader import Batch, CachedSample, epoch_batches, find_entries, read_ahead
from wangen.runtime.models import family
from wangen.runtime.optim import make_optimizer, make_schedule
from wangen.runtime.progress import progress
from wangen.runtime.samples import read_samples
from wangen.runtime.training_run import Run, save_due, save_final, save_state, state_folder, steps_per_epoch
from wangen.runtime.training_step import optimizer_step

log = logging.getLogger("wangen")

SAVE_STATE_EVERY_S = 600.0
SAME_BYTES = {"gradient_checkpointing", "save_precision"}
"""Pinned flags that do not change what is learned."""


def run(options: Train) -> Report:
    """Train to the end, from the newest state if there is one.

    Raises:
        WangenError: the cache is incomplete, the weights are of another kind, settings changed since the last run,
            the loss is not finite, the disk is full.
    """
    _refuse(options)
    require_writable(options.output_dir)
    model = profiles.model(options.task)
    headers.expect(options.dit, model.kind_of("dit"), "--dit")
    samples = find_entries(read_samples(options.dataset_config, model), options.dataset_config)
    num_steps = _num_steps(options, samples)
    device = choose_device(options.device)
    if options.fresh:
        checkpoint.forget(state_folder(options))
    state = _find_state(options)
    final = options.output_dir / f"{options.output_name}.safetensors"
    fingerprint = _fingerprint(options, samples)
    if state:
        _compare(options, state.fingerprint, fingerprint)
        if state.step >= num_steps and final.is_file():
            return _report(options, samples, state.step, state.facts, done_before=True)
    training = _prepare(options, model, samples, device, num_steps, fingerprint, state)
    start, started = training.step, time.monotonic()
    with Interrupt() as interrupt:
        _train(training, interrupt)
    if interrupt.requested:
        raise KeyboardInterrupt
    save_final(training, final)
    timing = {"steps_this_run": training.step - start, "seconds_training": round(time.monotonic() - started, 3)}
    return _report(options, samples, training.step, training.facts | timing)


def _refuse(options: Train) -> None:
    """Everything that can be refused before a model loads."""
    numbers = {
        "network_dim": options.network_dim,
        "network_alpha": options.network_alpha,
        "learning_rate": options.learning_rate,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
    }
    for name, value in numbers.items():
        if value <= 0:
            raise UsageError(f"--{name} must be above 0, got {value}")
    if not 0 <= options.network_dropout < 1:
        raise UsageError(f"--network_dropout must be at least 0 and below 1, got {options.network_dropout}")
    if not 0 <= options.min_timestep < options.max_timestep <= 1000:
        raise UsageError(f"timesteps {options.min_timestep} to {options.max_timestep} are no range within 0 to 1000")
    if Path(options.output_name).name != options.output_name:
        raise UsageError(f"--output_name is a file name without folders, got {options.output_name!r}")


def _num_steps(options: Train, samples: list[CachedSample]) -> int:
    epochs = options.max_train_epochs
    if epochs is None and options.max_train_steps is not None:
        return options.max_train_steps
    return (DEFAULT_EPOCHS if epochs is None else epochs) * steps_per_epoch(samples, options)


def _fingerprint(options: Train, samples: list[CachedSample]) -> dict[str, Any]:
    """Settings by flag name, and digests of data and weights."""
    pinned = [option.name for option in flags_of(Train) if option.flag.pinned and option.name not in SAME_BYTES]
    settings = {name: getattr(options, name) for name in pinned}
    data = [
        [s.sample.name, s.latent.key, s.text.key, s.sample.entry.num_repeats, s.sample.entry.batch_size]
        for s in samples
    ]
    weights = options.network_weights
    return {
        **{name: str(value) for name, value in settings.items() if name != "network_weights"},
        "network_weights": headers.identity(weights) if weights else "",
        "dit": headers.identity(options.dit),
        "dataset": digest(data),
    }


def _find_state(options: Train) -> TrainingState | None:
    path = options.resume or checkpoint.newest(state_folder(options))
    return checkpoint.read(path) if path else None


def _compare(options: Train, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings, unless told to."""
    digests = {"dataset": "other samples or captions", "dit": "another file", "network_weights": "another file"}
    changed = [
        f"{name}: {digests.get(name) or f'{old.get(name)} -> {new.get(name)}'}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if changed and not options.resume_changed:
        listed = "\n".join(f"  - {line}" for line in changed)
        raise WangenError(
            f"an earlier run used other settings\n{listed}",
            where=str(state_folder(options)),
            cure="--fresh (or removing that folder) starts again from step 0; --resume_changed goes on with the new",
        )
    for line in changed:
        log.warning("  resuming with changed %s", line)


def _prepare(
    options: Train,
    model: profiles.Model,
    samples: list[CachedSample],
    device: torch.device,
    num_steps: int,
    fingerprint: dict[str, Any],
    state: TrainingState | None,
) -> Run:
    """Load the transformer, add the adapter, and put the state in."""
    kind = family(model)
    dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
    transformer = kind.load_transformer(options.dit, dtype=dtype, device=device)
    kernel = set_attention(transformer, options.attention, device, backward=True)
    parameters = adapter.add_lora(transformer, options, model.lora_targets)
    if options.gradient_checkpointing or options.gradient_checkpointing_cpu_offload:
        transformer.enable_gradient_checkpointing()
    transformer.train()  # checkpointing and dropout are on in this mode only
    optimizer = make_optimizer(options, list(parameters.values()))
    training = Run(options, kind, transformer, parameters, optimizer, samples, device, num_steps, 0, fingerprint)
    if state:
        checkpoint.restore(parameters, optimizer, state, state_folder(options))
        training = replace(training, step=state.step, facts=dict(state.facts))
    trainable = sum(parameter.numel() for parameter in parameters.values())
    total = sum(parameter.numel() for parameter in transformer.parameters())
    log.info("  %s: %.2f M of %.2f M parameters train, %s, attention %s", device, trainable / 1e6, total / 1e6,
             options.mixed_precision, kernel)  # fmt: skip
    log.info("  %d samples, %d steps per epoch, %d steps in all%s", len(samples), training.steps_per_epoch, num_steps,
             f", resuming at {training.step}" if training.step else "")  # fmt: skip
    return training


def _train(training: Run, interrupt: Interrupt) -> None:
    """The loop over epochs and optimizer steps, until the end or an interrupt; the state is saved on the way."""
    options = training.options
    factor = make_schedule(options, training.num_steps)
    saved_at = time.monotonic()
    with (
        _tracker(options, training.step) as track,
        progress("train", training.num_steps, training.step) as advance,
    ):
        while training.step < training.num_steps and not interrupt.requested:
            epoch, offset = divmod(training.step, training.steps_per_epoch)
            for group in _groups(training, epoch, offset):
                for param_group in training.optimizer.param_groups:
                    param_group["lr"] = options.learning_rate * factor(training.step)
                values = optimizer_step(training, epoch, group, interrupt)
                if values is None:
                    break
                training.step += 1
                training.facts.setdefault("first_loss", values["loss"])
                training.facts["last_loss"] = values["loss"]
                track(training.step, {**values, "lr": training.optimizer.param_groups[0]["lr"]})
                advance(1, f"loss {values['loss']:.4f}")
                due = time.monotonic() - saved_at > SAVE_STATE_EVERY_S
                if save_due(training, state_due=due):
                    saved_at = time.monotonic()
                if training.step >= training.num_steps:
                    break
    save_state(training)


def _groups(training: Run, epoch: int, offset: int) -> Iterator[list[Batch]]:
    """The batches of one epoch in groups of one optimizer step each, from step `offset` on."""
    size = training.options.gradient_accumulation_steps
    batches = epoch_batches(training.samples, training.options.seed, epoch)[offset * size :]
    reader = read_ahead(training.samples, batches, training.options.max_data_loader_n_workers)
    try:
        for first in range(0, len(batches), size):
            yield [next(reader) for _ in batches[first : first + size]]
    finally:
        reader.close()


def _report(
    options: Train, samples: list[CachedSample], step: int, facts: Mapping[str, Any], *, done_before: bool = False
) -> Report:
    final = options.output_dir / f"{options.output_name}.safetensors"
    losses = f"loss {facts['first_loss']:.4f} at the first step, {facts['last_loss']:.4f} at the last" if facts else ""
    summary = f"already trained, {step} steps" if done_before else f"{step} steps, {losses}"
    return Report(
        folder=options.output_dir,
        summary=f"{summary}: {final}",
        inputs={"dataset_config": options.dataset_config, "dit": options.dit, "samples": len(samples)},
        counts={"from_cache": 2 * len(samples), "computed": 0, "steps": step},
        result={"lora": final, "done_before": done_before, **facts},
    )


@contextlib.contextmanager
def _tracker(options: Train, step: int) -> Iterator[Any]:
    """Log numbers by step: TensorBoard through accelerate, or nothing."""
    if options.log_with == "none":
        yield lambda _step, _values: None
        return
    from accelerate import PartialState
    from accelerate.tracking import TensorBoardTracker

    PartialState()
    folder = options.logging_dir or options.output_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    # Steps after the state a run resumes from are written again: purge_step hides their first version.
    tracker = TensorBoardTracker(options.output_name, logging_dir=str(folder), purge_step=step + 1)
    tracker.start()
    try:
        yield lambda at, values: tracker.log({f"train/{name}": value for name, value in values.items()}, step=at)
    finally:
        tracker.finish()
