"""A training run in memory, and what it leaves on disk on its way: LoRAs and training states."""

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from wangen.generator.steps import Train
from wangen.runtime import adapter, checkpoint
from wangen.runtime.checkpoint import TrainingState
from wangen.runtime.loader import CachedSample, epoch_batches
from wangen.runtime.models import Family

log = logging.getLogger("wangen")


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


def steps_per_epoch(samples: list[CachedSample], options: Train) -> int:
    """Optimizer steps in an epoch; the last of an epoch may accumulate fewer batches."""
    return math.ceil(len(epoch_batches(samples, options.seed, 0)) / options.gradient_accumulation_steps)


def state_folder(options: Train) -> Path:
    """Where the run's training states live."""
    return options.output_dir / f"{options.output_name}-state"


def save_due(training: Run, *, state_due: bool) -> bool:
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


def save_final(training: Run, path: Path) -> None:
    """Write the finished LoRA."""
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
