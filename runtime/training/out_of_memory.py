"""What to say when the memory is full: what was being trained on, what it needs, and the cheapest changes that fit."""

import contextlib
from functools import partial

import torch

from wangen.generator.errors import WangenError
from wangen.generator.memory import GIB, memory_plan, packs, settings_of
from wangen.generator.memory_changes import cheapest_changes, shared_out
from wangen.generator.session import with_flag
from wangen.generator.steps import Train
from wangen.profiles import Model
from wangen.runtime.devices import out_of_memory_as
from wangen.runtime.loader import Batch
from wangen.runtime.training import checkpoint
from wangen.runtime.training.plan import Plan
from wangen.runtime.training.prepared import Group
from wangen.runtime.training.run import Run
from wangen.runtime.training.step import num_tokens


def enough_memory_for_steps(run: Run, group: Group) -> contextlib.AbstractContextManager[None]:
    """Answer a full memory, of the device or of the host, with one message.

    Raises:
        WangenError: in place of torch's own error.
    """
    return out_of_memory_as(partial(_out_of_memory, run, group))


def enough_memory_for(plan: Plan, device: torch.device, what: str) -> contextlib.AbstractContextManager[None]:
    """As `enough_memory_for_steps`, around what is done before and between the steps.

    Args:
        plan: of the run.
        device: where it computes.
        what: was being done, such as "loading the model".

    Raises:
        WangenError: in place of torch's own error.
    """
    return out_of_memory_as(partial(_out_of_memory_between, plan, device, what))


def _out_of_memory_between(plan: Plan, device: torch.device, what: str) -> WangenError:
    available = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    cure = _cure(plan, plan.most_tokens, plan.most_tokens, available)  # nothing is packed there
    return WangenError(f"out of memory {what}", cure=cure)


def _out_of_memory(run: Run, group: Group) -> WangenError:
    if not group.batches:  # of a short step's end: what was full is the room for gradients or the optimizer
        return _out_of_memory_between(run.plan, run.device, f"at step {run.step + 1}")
    largest = max(group.batches, key=lambda prepared: prepared.noise.numel())
    size = "x".join(map(str, largest.noise.shape[2:]))
    found = f"out of memory at step {run.step + 1}, on {', '.join(largest.batch.names)} (latents of {size})"
    tokens = [_tokens_of(one.batch, run.plan.model) for one in group.batches]
    available = None
    if run.device.type == "cuda":
        used = torch.cuda.max_memory_allocated(run.device)
        available = torch.cuda.get_device_properties(run.device).total_memory
        found += f"; {used / GIB:.1f} GiB of {available / GIB:.1f} were in use"
    return WangenError(found, cure=_cure(run.plan, sum(tokens), max(tokens), available))


def _tokens_of(batch: Batch, model: Model) -> int:
    """Of a batch, as they go through the blocks: a language model's rows of text do so as pictures do."""
    rows = sum(map(len, batch.texts)) if model.prompt else 0
    return sum(num_tokens(batch, model.patch)) + rows


def _cure(plan: Plan, together: int, alone: int, available: int | None) -> str:
    """What to change, where packed batches had so many tokens together, and the largest one so many."""

    def needed(options: Train) -> int:
        tokens = together if packs(options) else alone
        return memory_plan(plan.model, settings_of(options, plan.shards), tokens=tokens).device

    changes = cheapest_changes(shared_out(plan.options, plan.shards), plan.model, needed, available)
    if changes:
        told = " ".join(changes)
    else:
        told = "a smaller resolution, fewer target_frames or batch_size 1: no other change makes room enough"
    on = with_flag("train", "--resume_changed")
    stays = f"; the last saved state stays ({on} goes on with other settings)"
    return f"give {told}{stays if checkpoint.newest_known(plan.states) else ''}"
