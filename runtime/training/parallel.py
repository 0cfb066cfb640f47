"""`--parallel`: whether each of several processes holds the whole model, or a part of its frozen weights."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from wangen.generator.errors import UsageError
from wangen.generator.launch import Launch
from wangen.generator.memory import GIB, memory_plan, memory_settings
from wangen.generator.steps import Train
from wangen.runtime.devices import free_bytes
from wangen.runtime.training.optimizer_class import optimizer_class
from wangen.runtime.training.plan import Plan
from wangen.runtime.training.ranks import TIMEOUT, Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("wangen")

Way = Literal["ddp", "fsdp", "hsdp"]


def require_parallel(options: Train, launch: Launch) -> None:
    """Refuse `--parallel` where nothing is shared out, or beside what keeps weights elsewhere.

    Raises:
        UsageError: weights cannot be split so.
    """
    way = options.parallel
    if way in ("auto", "ddp"):
        return
    if launch.count == 1:
        raise UsageError(f"--parallel {way}: this is one process", cure="leave it out, or start several with --gpus")
    if way == "hsdp" and launch.local_count == launch.count:
        raise UsageError("--parallel hsdp splits within each machine, and this is one", cure="give --parallel fsdp")
    if _trains_whole_matrices(options):
        raise UsageError(
            f"--parallel {way} with --train_mode full splits matrices; {options.optimizer_type} may look at them whole",
            cure="give --optimizer_type AdamW or Adam, or --parallel ddp",
        )
    for wrong, flag in (
        (options.plain, "--plain"),
        (bool(options.blocks_to_swap), "--blocks_to_swap"),
        (options.checkpointing == "none", "--checkpointing none"),
    ):
        if wrong:
            raise UsageError(f"--parallel {way} and {flag} do not go together in this version", cure="leave one out")


def _trains_whole_matrices(options: Train) -> bool:
    """Whether the optimizer may look at weights as the matrices that they are, which splitting takes from it."""
    return options.train_mode == "full" and not optimizer_class(options).is_by_element


def chosen_way(plan: Plan, ranks: Ranks, device: torch.device) -> Way:
    """How the processes hold the model, the same for all of them, with the reason in the log.

    `auto` splits the frozen weights where a whole copy does not fit one of the devices by the formula of the presets.

    Raises:
        UsageError: parts within each machine would not be the same on all, or parts are needed and cannot be.
    """
    options, way = plan.options, plan.options.parallel
    sizes = set(ranks.gathered(ranks.launch.local_count))
    if way == "hsdp" and len(sizes) > 1:
        found = " and ".join(map(str, sorted(sizes)))
        raise UsageError(f"--parallel hsdp splits alike within each machine, and these have {found} processes",
                         cure="start equally many on each, or give --parallel fsdp")  # fmt: skip
    if way != "auto":
        return way
    known = [free for free in ranks.gathered(free_bytes(device)) if free is not None]
    if len(known) < ranks.count or _trains_whole_matrices(options) or options.plain or options.blocks_to_swap:
        return "ddp"
    tokens = plan.tokens_of_a_pass(ranks.count)
    needed, free = memory_plan(plan.model, memory_settings(options), tokens=tokens).device, min(known)
    whole = f"a whole copy takes about {needed / GIB:.1f} GiB and {free / GIB:.1f} are free on every card"
    if needed <= free:
        log.info("  --parallel auto: ddp, for %s", whole)
        return "ddp"
    if options.checkpointing == "none":
        raise UsageError(f"{whole}; in parts it does not go together with --checkpointing none in this version",
                         cure="give --checkpointing full, or free memory")  # fmt: skip
    split: Way = "hsdp" if sizes != {ranks.count} and len(sizes) == 1 else "fsdp"
    log.info("  --parallel auto: %s, for %s", split, whole)
    return split


def mesh_of(way: Way, launch: Launch, device: torch.device) -> "DeviceMesh | None":
    """The processes that hold the parts: all, or with `hsdp` those of each machine; None where each holds all."""
    if way == "ddp":
        return None
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # loads the compiler's libraries

    if way == "fsdp":
        return init_device_mesh(device.type, (launch.count,))
    numbers = torch.arange(launch.count).view(-1, launch.local_count)
    # Groups that a mesh makes itself give up after half an hour.
    shard, _ = dist.new_subgroups_by_enumeration(numbers.tolist(), timeout=TIMEOUT)  # type: ignore[no-untyped-call]
    replicate, _ = dist.new_subgroups_by_enumeration(numbers.T.tolist(), timeout=TIMEOUT)  # type: ignore[no-untyped-call]
    return DeviceMesh.from_group([replicate, shard], device.type, mesh=numbers, mesh_dim_names=("replicate", "shard"))


def in_parts(plan: Plan, shards: int) -> Plan:
    """The plan of a run whose weights so many processes share out: no expert is parked, its parts are small."""
    return replace(plan, options=replace(plan.options, offload_inactive_dit=False), shards=shards)
