"""From a plan to what is in memory: the transformer, quantised or streamed where asked, its adapter and optimizer."""

import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from wangen.generator import headers
from wangen.generator.companions import sort_out
from wangen.generator.errors import WangenError, bytes_text
from wangen.generator.files import bytes_on_disk_of, nearest_existing
from wangen.generator.launch import Launch
from wangen.generator.plan.saves import most_bytes, num_kept, saved_bytes
from wangen.generator.run_folder import SAMPLES
from wangen.generator.small_steps import replays
from wangen.generator.steps import Train
from wangen.generator.workspace import require_writable
from wangen.runtime.fast.dit_blocks import lay_resident_groups
from wangen.runtime.fast.products import product_dtype
from wangen.runtime.lora_folder import written_by
from wangen.runtime.memory.quantize import quantize_blocks
from wangen.runtime.memory.swap import BlockSwap
from wangen.runtime.models import Family
from wangen.runtime.models.compute import Compute
from wangen.runtime.training.adapter import NAME, add_adapter, merge_base_weights
from wangen.runtime.training.adapter_config import (
    adapter_settings,
    changeable_weights,
    factor_shapes,
    linear_modules,
    select_modules,
)
from wangen.runtime.training.checkpoint import ExpertState
from wangen.runtime.training.ema import Ema
from wangen.runtime.training.full import trainable_parameters
from wangen.runtime.training.optim import Optimization
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.run import Trainee

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from wangen.runtime.memory.sharded import ShardedBlocks
    from wangen.runtime.training.sharded import ShardedWeights

log = logging.getLogger("wangen")

SMALL_FILES_BYTES = 1 << 20
"""For the headers and manifests of what a run saves."""


def compute_of(options: Train) -> Compute:
    """How the flags, with the presets filled in, want a step to run."""
    assert options.checkpointing is not None
    return Compute(
        attention=options.attention,
        checkpointing=options.checkpointing,
        free_blocks=options.checkpointing_free_blocks or 0,
        offload=bool(options.gradient_checkpointing_cpu_offload),
        split_attention=options.split_attn,
        compile=options.compile,
        graphs=replays(options),
        plain=options.plain,
    )


def load_trainee(
    plan: Plan,
    expert: ExpertPlan,
    kind: Family,
    device: torch.device,
    state: ExpertState | None,
    mesh: "DeviceMesh | None" = None,
    ranks: Ranks = Ranks(),  # noqa: B008 - of one process
) -> Trainee:
    """Load one transformer, make it trainable, and put a saved state in; with a mesh its blocks are split over it.

    Raises:
        WangenError: the weights, the adapter to start from or the state do not fit.
    """
    options, swapped = plan.options, plan.options.blocks_to_swap or 0
    transformer = load_base(plan, expert, kind, device, on_host=mesh is not None)
    full = options.train_mode == "full"
    weights = _weights_in_parts(transformer, mesh, device, options, ranks) if mesh and full else None
    if weights:
        parameters = weights.parameters
    elif full:
        parameters = trainable_parameters(transformer)
    else:
        parameters = add_adapter(transformer, options, plan.model, expert.name)
    # What drops out does so in this mode only; peft's LoHa and LoKr draw from global state in it, asked or not.
    transformer.train(options.train_mode == "lora" and adapter_settings(options, expert.name).draws)
    compute, parked = compute_of(options), options.offload_inactive_dit and len(plan.experts) > 1
    if parked and not compute.plain:
        lay_resident_groups(transformer, swapped, compute.free_blocks)
    sharded = weights or (_in_parts(transformer, mesh, device, ranks) if mesh else None)
    place = BlockSwap(
        transformer, swapped, device, free_blocks=compute.free_blocks, ring=options.block_swap_ring_size, parked=parked
    )
    swap = sharded or (place if swapped else None)
    model = kind.velocity_model(transformer, compute, device=device, dtype=computed_in(options), swap=swap)
    if weights:
        model = weights.gathering(model)
    optimization = Optimization(options, parameters, weights)
    ema = Ema(optimization.flat, options.ema_decay) if options.ema_decay else None
    pairs = _pairs(options, expert, parameters)
    trainee = Trainee(expert, transformer, place, model, parameters, optimization, ema, weights, pairs)
    if state:
        _restore(trainee, state, str(plan.states))
    return trainee


def is_crowded(plan: Plan, launch: Launch) -> bool:
    """Whether this machine's memory cannot hold what its processes read from their files at once."""
    import psutil

    files = [file for expert in plan.experts for file in headers.shards(expert.dit, expert.flag)]
    needed = launch.local_count * sum(file.stat().st_size for file in files)
    if plan.options.train_mode == "full" and plan.options.base_weights:  # in float32, of 16 bits at least
        needed *= 2
    return needed > int(psutil.virtual_memory().available)


def _in_parts(transformer: Any, mesh: "DeviceMesh", device: torch.device, ranks: Ranks) -> "ShardedBlocks":
    from wangen.runtime.memory.sharded import ShardedBlocks  # loads the compiler's libraries, which few runs need

    return ShardedBlocks(transformer, mesh, device, ranks.communication)


def _weights_in_parts(
    transformer: Any, mesh: "DeviceMesh", device: torch.device, options: Train, ranks: Ranks
) -> "ShardedWeights":
    from wangen.runtime.training.sharded import ShardedWeights

    dtype = product_dtype(computed_in(options), device)
    return ShardedWeights(transformer, mesh, device, ranks.communication, dtype)


def computed_in(options: Train) -> torch.dtype:
    """The dtype of the forward pass, by `--mixed_precision`."""
    return torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32


def load_base(plan: Plan, expert: ExpertPlan, kind: Family, device: torch.device, *, on_host: bool = False) -> Any:
    """Load what is trained on: the transformer with `--base_weights` merged in, quantised if asked, without adapters.

    What is streamed, merged into, or one of two experts is loaded into host memory, and all where it is asked for.

    Raises:
        WangenError: the weights or the adapters to merge do not fit.
    """
    options, quantize = plan.options, plan.options.quantize or "none"
    goes_over = not (on_host or options.blocks_to_swap or options.base_weights or len(plan.experts) > 1)
    file = headers.shards(expert.dit, expert.flag)[0]
    # What LoRAs are merged into is quantised after that, and what is trained as a whole is not.
    while_loading = None if options.base_weights or options.train_mode == "full" else quantize
    # Masters begin with every digit that the file has.
    dtype: torch.dtype | None = computed_in(options)
    if options.train_mode == "full":  # as in the file, but for a sum that 16 bits would round before there are masters
        dtype = torch.float32 if options.base_weights else None
    transformer = kind.load_transformer(
        file, dtype=dtype, device=device if goes_over else "cpu", quantize=while_loading, pack_on=device
    )
    if options.base_weights:
        merge_base_weights(transformer, options)
        quantize_blocks(transformer, quantize, device)
    return transformer


def _pairs(
    options: Train, expert: ExpertPlan, parameters: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """For `--scale_weight_norms` each module's two factors and what their product is scaled by."""
    if not options.scale_weight_norms:
        return []
    chosen = adapter_settings(options, expert.name)
    down, up = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"
    modules = [name.removesuffix(down) for name in parameters if name.endswith(down)]
    return [(parameters[name + down], parameters[name + up], chosen.scale(name)) for name in modules]


def _restore(trainee: Trainee, state: ExpertState, where: str) -> None:
    """Put a saved state into a fresh trainee."""
    state = as_here(state, trainee.plan.name, trainee.sharded)
    trainee.optimization.flat.load(state.adapter, where)
    trainee.optimization.load(state.optimizer, state.numbers, where)
    if trainee.ema and state.ema:
        trainee.ema.load(state.ema, state.ema_updates)
    elif trainee.ema:  # with --resume_changed
        log.warning("  no averages were kept so far: they begin now")
        trainee.ema.load(state.adapter, 0)
    trainee.step = state.step


def as_here(state: ExpertState, expert: str, sharded: "ShardedWeights | None") -> ExpertState:
    """An expert's state with its tensors, whoever saved them in parts or whole.

    Args:
        state: of the expert.
        expert: its name.
        sharded: the weights of which this process holds parts; None gives whole tensors.
    """
    if state.in_parts:
        from wangen.runtime.training.sharded_state import read

        return read(state, expert, sharded)
    if sharded is None:
        return state
    own = sharded.own
    return replace(
        state,
        adapter={name: own(name, value) for name, value in state.adapter.items()},
        optimizer={name: own(name.rpartition("/")[0], value) for name, value in state.optimizer.items()},
        ema={name: own(name, value) for name, value in state.ema.items()},
    )


def require_room_to_save(plan: Plan, to_cache: Mapping[Path, int] = MappingProxyType({})) -> None:
    """Refuse a disk that cannot hold what the run will save, and folders of it that cannot be written.

    Args:
        plan: of the run.
        to_cache: for each folder the bytes that are written into it before.

    Raises:
        WangenError: the need and what is free, or the folder.
    """
    for folder in filter(Path.is_dir, (plan.states, plan.options.output_dir / SAMPLES)):
        require_writable(folder)  # another user may have made them
    options, needed = plan.options, room_needed(plan)
    free = shutil.disk_usage(nearest_existing(options.output_dir) or options.output_dir).free
    beside = bytes_on_disk_of(options.output_dir, to_cache)
    if free < needed + beside:
        smaller = "lower --network_dim" if options.train_mode == "lora" else "give --save_precision bfloat16"
        if options.keep_last != 1 and max(num_kept(options, plan.steps_per_epoch, plan.num_steps)) > 1:
            smaller += ", keep fewer (--keep_last)"
        raise WangenError(
            f"the checkpoints need up to {bytes_text(needed)}"
            f"{f', the cache {bytes_text(beside)}' if beside else ''}, and {bytes_text(free)} are free",
            where=str(options.output_dir),
            cure=f"free space, {smaller}, or give another --output_dir",
        )


def room_needed(plan: Plan) -> int:
    """At most the bytes that a run saves beside what of it lies there already."""
    sizes = saved_bytes(plan.options, sum(_num_trained(plan, expert) for expert in plan.experts))
    most = most_bytes(plan.options, plan.steps_per_epoch, plan.num_steps, sizes)
    return SMALL_FILES_BYTES + most - _bytes_there(plan)


def _num_trained(plan: Plan, expert: ExpertPlan) -> int:
    """The numbers that are trained in an expert, by the headers."""
    options, header = plan.options, headers.read_header(expert.dit, expert.flag)
    if options.train_mode == "full":
        return sum(math.prod(info.shape) for info in sort_out(header).weights.values())
    chosen, weights = adapter_settings(options, expert.name), changeable_weights(header)
    modules = select_modules(linear_modules(weights), options, plan.model, expert.name)
    count = sum(weights[module].shape[0] for module in modules) if chosen.dora else 0
    shapes = (factor_shapes(chosen, module, *weights[module].shape).values() for module in modules)
    return count + sum(math.prod(shape) for factors in shapes for shape in factors)


def _bytes_there(plan: Plan) -> int:
    """What an earlier part of the run has saved."""
    there = list(plan.states.rglob("*"))
    for expert in plan.experts:
        named = written_by(plan.file(expert).stem)
        there += [path for path in plan.options.output_dir.glob("*.safetensors") if named.fullmatch(path.name)]
    return sum(path.stat().st_size for path in there if path.is_file())
