"""What to say when the memory is full: what was being trained on, what it needs, and the cheapest changes that fit."""

import contextlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import psutil
import torch

from wangen.generator.errors import WangenError
from wangen.generator.headers import num_blocks, read_header
from wangen.generator.memory import GIB, memory_plan, memory_settings, packs
from wangen.generator.memory_changes import cheapest_changes, shared_out
from wangen.generator.session import with_flag
from wangen.generator.steps import Train
from wangen.profiles import Model
from wangen.runtime.devices import is_of_host, out_of_memory_as
from wangen.runtime.loader import Batch
from wangen.runtime.training import checkpoint
from wangen.runtime.training.adapter_refusals import trained_transformers
from wangen.runtime.training.plan import Plan
from wangen.runtime.training.prepared import Group
from wangen.runtime.training.run import Run
from wangen.runtime.training.step import num_tokens
from wangen.runtime.training.throughput import peak_memory_bytes

CPU = torch.device("cpu")

ON_THE_HOST = ("blocks_to_swap", "gradient_checkpointing_cpu_offload")
"""Flags that make room on a card by what they keep in the host's memory."""


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


def _out_of_memory_between(plan: Plan, device: torch.device, what: str, error: Exception) -> WangenError:
    cure = _cure(plan, plan.most_tokens, plan.most_tokens, device, error)  # nothing is packed there
    return WangenError(f"out of memory {what}{_measured(device, error)}", cure=cure)


def _out_of_memory(run: Run, group: Group, error: Exception) -> WangenError:
    if not group.batches:  # of a short step's end: what was full is the room for gradients or the optimizer
        return _out_of_memory_between(run.plan, run.device, f"at step {run.step + 1}", error)
    largest = max(group.batches, key=lambda prepared: prepared.noise.numel())
    size = "x".join(map(str, largest.noise.shape[2:]))
    found = f"out of memory at step {run.step + 1}, on {', '.join(largest.batch.names)} (latents of {size})"
    tokens = [_tokens_of(one.batch, run.plan.model) for one in group.batches]
    cure = _cure(run.plan, sum(tokens), max(tokens), run.device, error)
    return WangenError(found + _measured(run.device, error), cure=cure)


def _measured(device: torch.device, error: Exception) -> str:
    """What the run has used of the memory that is full."""
    if is_of_host(error, device):
        used, total = peak_memory_bytes(CPU), psutil.virtual_memory().total
    elif device.type == "cuda":
        used, total = peak_memory_bytes(device), torch.cuda.get_device_properties(device).total_memory
    else:
        return ""
    whose = "the host's " if is_of_host(error, device) else ""
    return f"; {used / GIB:.1f} GiB of {whose}{total / GIB:.1f} were in use" if used else ""


def _tokens_of(batch: Batch, model: Model) -> int:
    """Of a batch, as they go through the blocks: a language model's rows of text do so as pictures do."""
    rows = sum(map(len, batch.texts)) if model.prompt else 0
    return sum(num_tokens(batch, model.patch)) + rows


def _cure(plan: Plan, together: int, alone: int, device: torch.device, error: Exception) -> str:
    """What to change, where packed batches had so many tokens together, and the largest one so many."""
    on_host = is_of_host(error, device)
    if on_host and device.type != "cpu":
        told = " or ".join(("close other programs", *_less_on_the_host(plan.options)))
    else:
        changes = _changes(plan, together, alone, device, fixed=ON_THE_HOST if on_host else ())
        told = "a smaller resolution, fewer target_frames or batch_size 1: no other change makes room enough"
        told = f"give {' '.join(changes) or told}"
    on = with_flag("train", "--resume_changed")
    stays = f"; the last saved state stays ({on} goes on with other settings)"
    return f"{told}{stays if checkpoint.newest_known(plan.states) else ''}"


def _less_on_the_host(options: Train) -> Iterator[str]:
    """What of a run with a GPU waits in the host's memory, and how less of it does."""
    if options.blocks_to_swap:
        yield f"give --blocks_to_swap less than {options.blocks_to_swap}"
    if options.gradient_checkpointing_cpu_offload:
        yield "give --no_gradient_checkpointing_cpu_offload"


def _changes(plan: Plan, together: int, alone: int, device: torch.device, fixed: Collection[str]) -> list[str]:
    model = plan.model
    with suppress(WangenError, OSError, MemoryError):  # weights may have fewer blocks than the model
        own = min(
            num_blocks(read_header(getattr(plan.options, name)))
            for name in trained_transformers(plan.options, plan.model)
        )
        model = replace(model, transformer=replace(model.transformer, num_layers=own or model.transformer.num_layers))

    def needed(options: Train) -> int:
        tokens = together if packs(options) else alone
        return memory_plan(model, memory_settings(options, plan.shards), tokens=tokens).device

    available = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return cheapest_changes(shared_out(plan.options, plan.shards), model, needed, available, fixed)
