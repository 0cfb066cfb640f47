"""A training run: what is known before a model loads, what is in memory, and what it leaves on disk on its way."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from wangen import profiles
from wangen.generator.steps import Train
from wangen.runtime.loader import CachedSample, epoch_batches
from wangen.runtime.models import Family
from wangen.runtime.training import adapter
from wangen.runtime.training import checkpoint
from wangen.runtime.training.checkpoint import TrainingState

log = logging.getLogger("wangen")


@dataclass(frozen=True)
class Plan:
    """A run as it is known before a model loads.

    Attributes:
        options: the flags.
        model: the model profile.
        samples: what is trained on.
        steps_per_epoch: optimizer steps in an epoch.
        num_steps: optimizer steps in all.
        fingerprint: settings and digests that decide the result.
    """

    options: Train
    model: profiles.Model
    samples: list[CachedSample]
    steps_per_epoch: int
    num_steps: int
    fingerprint: Mapping[str, Any]

    @property
    def states(self) -> Path:
        """The folder of training states."""
        return self.options.output_dir / f"{self.options.output_name}-state"

    def lora_path(self, suffix: str = "") -> Path:
        """The finished LoRA, or with a suffix one of those saved on the way."""
        return self.options.output_dir / f"{self.options.output_name}{suffix}.safetensors"


@dataclass
class Run:
    """A run in memory.

    Attributes:
        plan: what was known before.
        kind: the architecture's module.
        transformer: the base with the adapter.
        parameters: the trainable parameters by name.
        optimizer: over them, in that order.
        device: where.
        step: optimizer steps done.
        saved_step: the step of the newest training state on disk, -1 for none.
        facts: small results that survive a restart.
    """

    plan: Plan
    kind: Family
    transformer: Any
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    device: torch.device
    step: int = 0
    saved_step: int = -1
    facts: dict[str, Any] = field(default_factory=dict)


def count_steps_per_epoch(samples: list[CachedSample], options: Train) -> int:
    """Optimizer steps in an epoch; the last of an epoch may accumulate fewer batches."""
    return math.ceil(len(epoch_batches(samples, options.seed, 0)) / options.gradient_accumulation_steps)


def save_due(run: Run, *, state_due: bool) -> bool:
    """Save what is due after a step; returns whether the training state was saved."""
    options, step = run.plan.options, run.step
    epochs_done, rest = divmod(step, run.plan.steps_per_epoch)
    suffixes = []
    if step < run.plan.num_steps:  # the finished LoRA has a name of its own
        if options.save_every_n_steps and step % options.save_every_n_steps == 0:
            suffixes.append(f"-step{step:08d}")
        if options.save_every_n_epochs and rest == 0 and epochs_done % options.save_every_n_epochs == 0:
            suffixes.append(f"-{epochs_done:06d}")
    for suffix in suffixes:
        save_lora(run.plan, run.parameters, step, suffix)
    if suffixes:
        _drop_old_loras(run.plan, step, epochs_done)
    every = options.save_state_every_n_steps
    if suffixes or state_due or (every and step % every == 0):
        save_state(run, keep=bool(suffixes) and options.save_state)
        return True
    return False


def save_state(run: Run, *, keep: bool = False) -> None:
    """Write the training state and drop the older ones, except kept ones and the one that `--resume` names."""
    tensors, numbers = checkpoint.optimizer_tensors(run.optimizer)
    state = TrainingState(
        step=run.step,
        adapter={name: parameter.detach() for name, parameter in run.parameters.items()},
        optimizer=tensors,
        numbers=numbers,
        fingerprint=run.plan.fingerprint,
        facts=run.facts,
    )
    path = checkpoint.save(run.plan.states, state, keep=keep)
    resumed_from = run.plan.options.resume
    checkpoint.remove_others(run.plan.states, {path, *([resumed_from.resolve()] if resumed_from else [])})
    run.saved_step = run.step


def save_lora(plan: Plan, parameters: Mapping[str, torch.Tensor], step: int, suffix: str = "") -> list[Path]:
    """Write the LoRA that these adapter parameters are, in every layout asked for."""
    options = plan.options
    lora = adapter.as_lora(parameters, options.network_alpha)
    header = adapter.metadata(options, step=step, fingerprint=plan.fingerprint)
    return adapter.save_lora(plan.lora_path(suffix), lora, options, header)


def _drop_old_loras(plan: Plan, step: int, epochs_done: int) -> None:
    """Remove the numbered LoRAs that fall out of `--save_last_n_epochs` or `--save_last_n_steps`; no other file."""
    options = plan.options
    limits = {
        "step": step - options.save_last_n_steps if options.save_last_n_steps else -1,
        "": epochs_done - options.save_last_n_epochs if options.save_last_n_epochs else -1,
    }
    name = re.compile(
        re.escape(options.output_name) + r"-(?:(step)(\d{8})|()(\d{6}))(?:-(?:comfyui|kohya|diffusers))?\.safetensors"
    )
    for path in options.output_dir.iterdir():
        if match := name.fullmatch(path.name):
            number = int(match[2] or match[4])
            if number <= limits[match[1] or ""]:
                path.unlink(missing_ok=True)
