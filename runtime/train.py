"""`train`: a LoRA on cached latents and embeddings, resumable at any moment to the same bytes.

The way of a step: an epoch's order -> batches from the cache -> noise and sigma from seeds of their own -> the family's
velocity -> loss -> clipped gradient -> optimizer. The state between steps is weights, optimizer and the step's number.
"""

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from wangen import profiles
from wangen.generator import headers
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.session import Report
from wangen.generator.steps import DEFAULT_EPOCHS, Train, options as flags_of
from wangen.runtime import adapter, checkpoint
from wangen.runtime.cache import digest
from wangen.runtime.checkpoint import TrainingState
from wangen.runtime.devices import choose_device, set_attention
from wangen.runtime.flow import TimestepDistribution, flow_loss, noised, velocity
from wangen.runtime.loader import Batch, CachedSample, epoch_batches, find_entries, read_ahead
from wangen.runtime.models import Family, family
from wangen.runtime.optim import make_optimizer, make_schedule
from wangen.runtime.progress import progress
from wangen.runtime.randomness import generator_for, seed_for
from wangen.runtime.samples import read_samples

log = logging.getLogger("wangen")

SAVE_STATE_EVERY_S = 600.0
SAME_BYTES = {"gradient_checkpointing", "save_precision"}
"""Pinned flags that do not change what is learned."""


@dataclass
class Run:
    """A training run in memory.

    Attributes:
        options: the flags.
        kind: the architecture's module.
        transformer: the base with the adapter.
        parameters: the trainable parameters by name.
        optimizer: over them, in that order.
        samples: what is trained on.
        device: where.
        num_steps: optimizer steps in all.
        step: optimizer steps done.
        fingerprint: settings and digests that decide the result.
        facts: small results that survive a restart.
    """

    options: Train
    kind: Family
    transformer: Any
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    samples: list[CachedSample]
    device: torch.device
    num_steps: int
    step: int
    fingerprint: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def states(self) -> Path:
        """The folder of training states."""
        return state_folder(self.options)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        return steps_per_epoch(self.samples, self.options)


def run(options: Train) -> Report:
    """Train to the end, from the newest state if there is one.

    Raises:
        WangenError: the cache is incomplete, the weights are of another kind, settings changed since the last run,
            the loss is not finite, the disk is full.
    """
    _refuse(options)
    headers.expect(options.dit, "wan-transformer-t2v", "dit")
    model = profiles.model(options.task)
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
    with _Interrupt() as interrupt:
        _train(training, interrupt)
    if interrupt.requested:
        raise KeyboardInterrupt
    _save_final(training, final)
    timing = {"steps_this_run": training.step - start, "seconds_training": round(time.monotonic() - started, 3)}
    return _report(options, samples, training.step, training.facts | timing)


def steps_per_epoch(samples: list[CachedSample], options: Train) -> int:
    """Optimizer steps in an epoch; the last of an epoch may accumulate fewer batches."""
    return math.ceil(len(epoch_batches(samples, options.seed, 0)) / options.gradient_accumulation_steps)


def state_folder(options: Train) -> Path:
    """Where the run's training states live."""
    return options.output_dir / f"{options.output_name}-state"


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
    data = [[s.sample.name, s.latent.key, s.text.key, s.sample.entry.num_repeats, s.sample.entry.batch_size] for s in samples]
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
    changed = [f"{name}: {old.get(name)} -> {new.get(name)}" for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if changed and not options.resume_changed:
        listed = "\n".join(f"  - {line}" for line in changed)
        raise WangenError(
            f"an earlier run used other settings\n{listed}",
            where=str(state_folder(options)),
            cure="--fresh starts again from step 0; --resume_changed goes on with the new settings",
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
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state.adapter[name])
        checkpoint.restore_optimizer(optimizer, state)
        training = replace(training, step=state.step, facts=dict(state.facts))
    trainable = sum(parameter.numel() for parameter in parameters.values())
    total = sum(parameter.numel() for parameter in transformer.parameters())
    log.info("  %s: %.2f M of %.2f M parameters train, %s, attention %s", device, trainable / 1e6, total / 1e6,
             options.mixed_precision, kernel)  # fmt: skip
    log.info("  %d samples, %d steps per epoch, %d steps in all%s", len(samples), training.steps_per_epoch, num_steps,
             f", resuming at {training.step}" if training.step else "")  # fmt: skip
    return training


def _train(training: Run, interrupt: "_Interrupt") -> None:
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
                values = _step(training, epoch, group, interrupt)
                if values is None:
                    break
                training.step += 1
                training.facts.setdefault("first_loss", values["loss"])
                training.facts["last_loss"] = values["loss"]
                track(training.step, {**values, "lr": training.optimizer.param_groups[0]["lr"]})
                advance(1, f"loss {values['loss']:.4f}")
                due = time.monotonic() - saved_at > SAVE_STATE_EVERY_S
                if _save(training, state_due=due):
                    saved_at = time.monotonic()
                if training.step >= training.num_steps:
                    break
    save_state(training)


def _groups(training: Run, epoch: int, offset: int) -> Iterator[list[Batch]]:
    """The batches of one epoch in groups of one optimizer step each, from step `offset` on."""
    size = training.options.gradient_accumulation_steps
    batches = epoch_batches(training.samples, training.options.seed, epoch)[offset * size :]
    reader = read_ahead(training.samples, batches, training.options.max_data_loader_n_workers)
    with contextlib.closing(reader):
        for first in range(0, len(batches), size):
            yield [next(reader) for _ in batches[first : first + size]]


def _step(training: Run, epoch: int, group: list[Batch], interrupt: "_Interrupt") -> dict[str, float] | None:
    """One optimizer step over a group of batches; None when an interrupt came first, with nothing changed."""
    training.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for batch in group:
        if interrupt.requested:
            return None
        loss = batch_loss(training, epoch, batch)
        (loss / len(group)).backward()
        total += loss.item() / len(group)
    parameters = list(training.parameters.values())
    limit = training.options.max_grad_norm or math.inf
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
    options = training.options
    keys = [(options.seed, epoch, name, repeat) for name, repeat in zip(batch.names, batch.repeats, strict=True)]
    distribution = distribution_of(options)
    sigmas = torch.tensor([distribution.draw(generator_for("sigma", *key)) for key in keys])
    shape = batch.latents.shape[1:]
    noise = torch.stack([torch.randn(shape, generator=generator_for("noise", *key)) for key in keys])
    clean, noise = batch.latents.to(training.device), noise.to(training.device)
    texts = [text.to(training.device) for text in batch.texts]
    with _dropout_seed(options, keys), _offload(options, training.device), _autocast(options, training.device):
        predicted = training.kind.predict_velocity(
            training.transformer, noised(clean, noise, sigmas.to(training.device)), 1000 * sigmas, texts
        )
    losses = flow_loss(predicted, velocity(clean, noise), sigmas, options.weighting_scheme)
    if not losses.isfinite().all():
        raise _not_finite(training, "loss", [n for n, loss in zip(batch.names, losses, strict=True) if not loss.isfinite()])
    return losses.mean()


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
    newest = checkpoint.newest(training.states)
    last = f"the last good state is {newest}" if newest else "no state was saved yet"
    return WangenError(
        f"the {what} is not finite at step {training.step + 1}, on {', '.join(names)}; {last}",
        cure="look at these items; lower --learning_rate or use --mixed_precision no",
    )


def _save(training: Run, *, state_due: bool) -> bool:
    """Save what is due after a step; returns whether the training state was saved."""
    options, step = training.options, training.step
    epochs_done, rest = divmod(step, training.steps_per_epoch)
    saved = None
    if options.save_every_n_steps and step % options.save_every_n_steps == 0 and step < training.num_steps:
        saved = f"step{step:08d}"
    elif options.save_every_n_epochs and rest == 0 and epochs_done % options.save_every_n_epochs == 0:
        saved = f"{epochs_done:06d}" if step < training.num_steps else None
    every = options.save_state_every_n_steps
    if saved:
        _save_lora(training, options.output_dir / f"{options.output_name}-{saved}.safetensors")
        _drop_old_loras(training, epochs_done)
    if saved or state_due or (every and step % every == 0):
        state = save_state(training)
        if saved and options.save_state:
            (state / "keep").touch()
        return True
    return False


def save_state(training: Run) -> Path:
    """Write the training state and drop the older ones, except those that `--save_state` keeps."""
    tensors, numbers = checkpoint.optimizer_tensors(training.optimizer)
    state = TrainingState(
        step=training.step,
        adapter={name: parameter.detach() for name, parameter in training.parameters.items()},
        optimizer=tensors,
        numbers=numbers,
        fingerprint=training.fingerprint,
        facts=training.facts,
    )
    path = checkpoint.save(training.states, state)
    checkpoint.remove_others(training.states, {path, *(keep.parent for keep in training.states.glob("step-*/keep"))})
    return path


def _save_lora(training: Run, path: Path) -> list[Path]:
    lora = adapter.current_lora(training.transformer, training.options.network_alpha)
    header = adapter.metadata(training.options, step=training.step, fingerprint=training.fingerprint)
    return adapter.save_lora(path, lora, training.options, header)


def _save_final(training: Run, path: Path) -> None:
    for written in _save_lora(training, path):
        log.info("  saved %s", written)


def _drop_old_loras(training: Run, epochs_done: int) -> None:
    """Remove numbered LoRAs that fall out of `--save_last_n_epochs` or `--save_last_n_steps`."""
    options = training.options
    limits = {
        "[0-9]" * 6: epochs_done - options.save_last_n_epochs if options.save_last_n_epochs else -1,
        "step" + "[0-9]" * 8: training.step - options.save_last_n_steps if options.save_last_n_steps else -1,
    }
    for pattern, limit in limits.items():
        for path in options.output_dir.glob(f"{options.output_name}-{pattern}*.safetensors"):
            number = int(path.stem.removeprefix(f"{options.output_name}-").removeprefix("step").split("-")[0])
            if number <= limit:
                path.unlink(missing_ok=True)


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


class _Interrupt:
    """Ctrl-C or SIGTERM while training: the first asks the loop to stop at the next step, the second stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, _number: int, _frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        log.warning("  stopping after this step; the training state is saved (once more stops at once)")
