"""`train`: a LoRA on cached latents and embeddings, resumable at any moment to the same bytes.

The way of a step: an epoch's order -> batches from the cache -> noise and sigma from seeds of their own -> the family's
velocity -> loss -> clipped gradient -> optimizer. The state between steps is weights, optimizer and the step's number.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from wangen import profiles
from wangen.generator import headers
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.kinds import expect
from wangen.generator.lora_config import lora_file, lora_identity
from wangen.generator.session import Report, with_flag
from wangen.generator.steps import DEFAULT_EPOCHS, Train
from wangen.generator.table import options as flags_of
from wangen.generator.tasks import require_supported
from wangen.generator.workspace import require_writable
from wangen.runtime.cache import digest
from wangen.runtime.devices import choose_device, set_attention
from wangen.runtime.interrupt import Interrupt
from wangen.runtime.loader import Batch, CachedSample, epoch_batches, find_entries, num_entries, read_ahead
from wangen.runtime.models import family
from wangen.runtime.progress import progress
from wangen.runtime.samples import read_samples
from wangen.runtime.training import adapter
from wangen.runtime.training import checkpoint
from wangen.runtime.training.optim import depends_on_length, make_optimizer, make_schedule
from wangen.runtime.training.run import Plan, Run, count_steps_per_epoch, save_due, save_lora, save_state
from wangen.runtime.training.checkpoint import TrainingState
from wangen.runtime.training.step import optimizer_step

log = logging.getLogger("wangen")

SAVE_STATE_EVERY_S = 600.0
SAME_BYTES = {"gradient_checkpointing", "save_precision", "lora_layout"}
"""Pinned flags that do not change what is learned."""

ABOVE_ZERO = (
    "network_dim", "network_alpha", "learning_rate", "gradient_accumulation_steps", "discrete_flow_shift",
    "max_train_steps", "max_train_epochs", "save_every_n_steps", "save_every_n_epochs", "save_state_every_n_steps",
)  # fmt: skip


def run(options: Train) -> Report:
    """Train to the end, from the newest state if there is one.

    Raises:
        WangenError: the cache is incomplete, the weights are of another kind, settings changed since the last run,
            the loss is not finite, memory or the disk is full.
    """
    _refuse(options)
    require_writable(options.output_dir)
    plan = _plan(options)
    device = choose_device(options.device)
    state = None if options.fresh else _find_state(plan)
    if state:
        _compare(plan, state)
        if state.step >= plan.num_steps:  # saving flags may have changed; equal bytes are written again
            save_lora(plan, state.adapter, state.step)
            return _report(plan, state.step, state.facts, done_before=True)
    training = _prepare(plan, device, state)
    start, started = training.step, time.monotonic()
    with Interrupt() as interrupt:
        _train(training, interrupt)
    if interrupt.requested:
        raise KeyboardInterrupt
    for path in save_lora(plan, training.parameters, training.step):
        log.info("  saved %s", path)
    timing = {"steps_this_run": training.step - start, "seconds_training": round(time.monotonic() - started, 3)}
    return _report(plan, training.step, training.facts | timing)


def _refuse(options: Train) -> None:
    """Flags that no run can have."""
    for name in ABOVE_ZERO:
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"--{name} must be above 0, got {value}")
    if not (options.max_grad_norm >= 0 and math.isfinite(options.max_grad_norm)):
        raise UsageError(f"--max_grad_norm must be 0 or above, got {options.max_grad_norm}")
    if not 0 <= options.network_dropout < 1:
        raise UsageError(f"--network_dropout must be at least 0 and below 1, got {options.network_dropout}")
    if not 0 <= options.caption_dropout <= 1:
        raise UsageError(f"--caption_dropout must be 0 to 1, got {options.caption_dropout}")
    if not 0 <= options.min_timestep < options.max_timestep <= 1000:
        raise UsageError(f"timesteps {options.min_timestep} to {options.max_timestep} are no range within 0 to 1000")
    if not options.output_name or Path(options.output_name).name != options.output_name:
        raise UsageError(f"--output_name is a file name without folders, got {options.output_name!r}")
    if not options.lora_layout:
        raise UsageError("--lora_layout is empty", cure="leave it out for comfyui")
    if options.fresh and options.resume:
        raise UsageError("--fresh and --resume contradict each other", cure="give one of them")


def _plan(options: Train) -> Plan:
    """All that is known before a model loads, with everything refused that can be refused by then."""
    model = profiles.model(options.task)
    require_supported(model, "training")
    expect(options.dit, model.kind_of("dit"), "--dit", options.task)
    if options.network_weights:
        expect(lora_file(options.network_weights), "lora", "--network_weights")
    samples = find_entries(options, model, read_samples(options, model))
    per_epoch = count_steps_per_epoch(samples, options)
    num_steps = _num_steps(options, per_epoch)
    make_schedule(options, num_steps)
    make_optimizer(options, [torch.nn.Parameter(torch.zeros(1))])
    return Plan(options, model, samples, per_epoch, num_steps, _fingerprint(options, samples, num_steps))


def _num_steps(options: Train, steps_per_epoch: int) -> int:
    epochs = options.max_train_epochs
    if epochs is None and options.max_train_steps is not None:
        return options.max_train_steps
    return (DEFAULT_EPOCHS if epochs is None else epochs) * steps_per_epoch


def _fingerprint(options: Train, samples: list[CachedSample], num_steps: int) -> dict[str, Any]:
    """Settings by flag name, and digests of data and weights. The length counts where the schedule depends on it."""
    pinned = [option.name for option in flags_of(Train) if option.flag.pinned and option.name not in SAME_BYTES]
    data = [
        [s.sample.name, *(entry.key for entry in s.entries), s.sample.entry.num_repeats, s.sample.entry.batch_size]
        for s in samples
    ]
    weights = options.network_weights
    return {
        **{name: str(getattr(options, name)) for name in pinned},
        "length of the schedule": num_steps if depends_on_length(options) else "any",
        "network_weights": lora_identity(weights) if weights else "",
        "dit": headers.identity(options.dit, "--dit"),
        "dataset": digest(data),
    }


def _find_state(plan: Plan) -> TrainingState | None:
    path = plan.options.resume or checkpoint.newest(plan.states)
    return checkpoint.read(path) if path else None


def _compare(plan: Plan, state: TrainingState) -> None:
    """Refuse to go on with other settings, unless told to."""
    old, new = state.fingerprint, plan.fingerprint
    digests = {"dataset": "other samples or captions", "dit": "another file", "network_weights": "another file"}
    changed = [
        f"{name}: {digests.get(name) or f'{old.get(name)} -> {new.get(name)}'}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if changed and not plan.options.resume_changed:
        listed = "\n".join(f"  - {line}" for line in changed)
        raise WangenError(
            f"an earlier run used other settings\n{listed}",
            where=str(plan.states),
            cure=f"{with_flag('train', '--fresh')} (or removing that folder) starts again from step 0; "
            f"{with_flag('train', '--resume_changed')} goes on with the new",
        )
    for line in changed:
        log.warning("  resuming with changed %s", line)


def _prepare(plan: Plan, device: torch.device, state: TrainingState | None) -> Run:
    """Load the transformer, add the adapter, and put the state in; only then `--fresh` forgets an earlier run."""
    options, kind = plan.options, family(plan.model)
    dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
    transformer = kind.load_transformer(options.dit, dtype=dtype, device=device)
    kernel = set_attention(transformer, options.attention, device, dtype, backward=True)
    parameters = adapter.add_lora(transformer, options, plan.model.lora_targets)
    if options.gradient_checkpointing or options.gradient_checkpointing_cpu_offload:
        transformer.enable_gradient_checkpointing()
    transformer.train()  # the adapter's dropout is on in this mode only
    optimizer = make_optimizer(options, list(parameters.values()))
    training = Run(plan, kind, transformer, parameters, optimizer, device)
    if state:
        checkpoint.restore(parameters, optimizer, state, plan.states)
        training.step, training.facts = state.step, dict(state.facts)
        if not options.resume:  # else the state may lie elsewhere
            training.saved_step = state.step
    elif options.fresh:
        checkpoint.forget(plan.states)
    trainable = sum(parameter.numel() for parameter in parameters.values())
    total = sum(parameter.numel() for parameter in transformer.parameters())
    log.info("  %s: %.2f M of %.2f M parameters train, %s, attention %s", device, trainable / 1e6, total / 1e6,
             {"bf16": "bfloat16", "no": "float32"}[options.mixed_precision], kernel)  # fmt: skip
    log.info("  %d samples, %d steps per epoch, %d steps in all%s", len(plan.samples), plan.steps_per_epoch,
             plan.num_steps, f", resuming at {training.step}" if training.step else "")  # fmt: skip
    return training


def _train(training: Run, interrupt: Interrupt) -> None:
    """The loop over epochs and optimizer steps, until the end or an interrupt; the state is saved on the way."""
    plan, options = training.plan, training.plan.options
    factor = make_schedule(options, plan.num_steps)
    saved_at = time.monotonic()
    with (
        _tracker(options, training.step) as track,
        progress("train", plan.num_steps, training.step) as advance,
    ):
        for epoch, group in _groups(plan, training.step):
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
            if save_due(training, state_due=time.monotonic() - saved_at > SAVE_STATE_EVERY_S):
                saved_at = time.monotonic()
    if training.saved_step != training.step:
        save_state(training)


def _groups(plan: Plan, step: int) -> Iterator[tuple[int, list[Batch]]]:
    """From `step` to the end: the epoch, and the batches of one optimizer step."""
    size = plan.options.gradient_accumulation_steps
    while step < plan.num_steps:
        epoch, offset = divmod(step, plan.steps_per_epoch)
        batches = epoch_batches(plan.samples, plan.options.seed, epoch, plan.options.caption_dropout)[offset * size :]
        groups = [batches[first : first + size] for first in range(0, len(batches), size)][: plan.num_steps - step]
        reader = read_ahead(
            plan.samples, [batch for group in groups for batch in group], plan.options.max_data_loader_n_workers
        )
        try:
            for group in groups:
                yield epoch, [next(reader) for _ in group]
        finally:
            reader.close()
        step += len(groups)


def _report(plan: Plan, step: int, facts: Mapping[str, Any], *, done_before: bool = False) -> Report:
    options = plan.options
    losses = f"loss {facts['first_loss']:.4f} at the first step, {facts['last_loss']:.4f} at the last"
    summary = f"already trained, {step} steps" if done_before else f"{step} steps, {losses}"
    return Report(
        folder=options.output_dir,
        summary=f"{summary}: {plan.lora_path()}",
        inputs={"dataset_config": options.dataset_config, "samples": len(plan.samples), **plan.fingerprint},
        counts={"from_cache": num_entries(plan.samples), "computed": 0, "steps": step},
        result={"lora": plan.lora_path(), "done_before": done_before, **facts},
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
