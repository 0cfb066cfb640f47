"""`train`: a LoRA on cached latents and embeddings, resumable at any moment to the same bytes.

The way of a step: an epoch's order -> batches from the cache, with noise and timesteps from seeds of their own -> the
family's velocity -> loss -> clipped gradient -> optimizer. Two experts are two such runs that take turns. The state
between steps is weights, optimizers, averages and the numbers of the steps.
"""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from wangen import profiles
from wangen.generator.errors import WRONG_USAGE, WangenError
from wangen.generator.files import remove_all_left
from wangen.generator.launch import launch
from wangen.generator.lock import LEASE_S, RUN_LOCK, hold
from wangen.generator.memory import memory_of
from wangen.generator.run_folder import BEGUN, TRAIN_REPORT
from wangen.generator.session import Report, write_beginning
from wangen.generator.steps import Train
from wangen.generator.workspace import require_writable
from wangen.runtime.devices import choose_device, free_bytes, set_precision
from wangen.runtime.interrupt import Interrupt
from wangen.runtime.loader import cache_use
from wangen.runtime.memory.allocator import keep_freed_memory
from wangen.runtime.models import family
from wangen.runtime.sources import digest_file
from wangen.runtime.training import checkpoint
from wangen.runtime.training.announcing import announce
from wangen.runtime.training.checkpoint import TrainingState
from wangen.runtime.training.facts import BEFORE, FIRST_LOSS, LAST_LOSS, LOOKED, SCHEDULE_FREE
from wangen.runtime.training.loading import is_crowded, load_trainee, require_room_to_save
from wangen.runtime.training.loop import train_to_end
from wangen.runtime.training.out_of_memory import enough_memory_for
from wangen.runtime.training.parallel import chosen_way, in_parts, mesh_of, require_parallel
from wangen.runtime.training.plan import Plan, dataset_digest, make_plan
from wangen.runtime.training.ranks import Ranks, joined, sum_of_bits
from wangen.runtime.training.refusals import for_its_steps, refuse, resolved
from wangen.runtime.training.resuming import (
    begun_by,
    changed_settings,
    compared,
    find_state,
    leave_as_it_is,
    not_looked_at,
    refuse_other_rank,
    require_own_files,
    trained_before,
)
from wangen.runtime.training.run import Run
from wangen.runtime.training.samples import read_training_samples
from wangen.runtime.training.saving import (
    drop_other_states,
    lost_best,
    save_loras,
    save_missed,
    save_state_as_loras,
)
from wangen.runtime.training.set_aside import set_other_ends_aside, set_other_epochs_aside
from wangen.runtime.training.show_timesteps import show, sizes_of_dataset
from wangen.runtime.training.throughput import in_words
from wangen.runtime.training.watching import Watching

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("wangen")

_EACH_ITS_OWN = ("device", "vae_device", "text_encoder_device", "max_data_loader_n_workers", "gpus", "vram")
"""Flags that processes which train together may have of their own."""
_TIMING = ("steps_this_run", "seconds_training", "speed")
"""What a report says of the time that a start took."""


def run(options: Train) -> Report:
    """Train to the end, from the newest state if there is one; together with the other processes that torchrun started.

    Raises:
        WangenError: flags contradict each other, the cache is incomplete, the weights are of another kind, settings
            changed since the last run, the loss is not finite, memory or the disk is full.
    """
    if options.starts_processes:
        from wangen.runtime.training.launcher import train_together

        return train_together(options)
    launched = launch()
    device = choose_device(options.device, launched.local_rank)
    with joined(launched, device) as ranks:
        # Every step's batches are shared out: it is the step of one process that does them one after the other.
        steps = options.gradient_accumulation_steps * ranks.count
        return _run(replace(options, gradient_accumulation_steps=steps), device, ranks)


def _run(options: Train, device: torch.device, ranks: Ranks) -> Report:
    model, asked, free = profiles.model(options.task), options, free_bytes(device)
    set_precision(deterministic=options.deterministic, tf32=options.cuda_allow_tf32)
    if device.type == "cpu":
        keep_freed_memory()
    try:
        options = alike(resolved(options, model, free, ranks.launch), free, ranks)
        refuse(options, model, device)
    except WangenError as error:
        if ranks.launch.count > 1:  # no launcher starts that again
            error.exit_code = WRONG_USAGE
        raise
    require_parallel(options, ranks.launch)
    if options.show_timesteps:
        return show(options, model, sizes_of_dataset(options, model))
    require_writable(options.output_dir)
    with _alone_in_folder(options, ranks):
        return _run_alone(options, asked, free, device, ranks)


@contextlib.contextmanager
def _alone_in_folder(options: Train, ranks: Ranks) -> Iterator[None]:
    """Only one run at a time trains into an output folder, whatever `--lock` says; its processes count as one.

    Raises:
        WangenError: another one does.
    """
    place = options.output_dir / RUN_LOCK
    held = options.lock_file is not None and options.lock_file.resolve() == place.resolve()
    # A job that is started again may find what its first process on another machine has left.
    wait_s = LEASE_S if ranks.launch.is_again else 0.0
    mine = place if ranks.is_first and not held else None
    with hold(mine, "trains into this folder", by_script=False, wait_s=wait_s):
        if ranks.is_first:  # half a checkpoint may be as large as a whole one
            remove_all_left(options.output_dir)
        yield


def _run_alone(options: Train, asked: Train, free: int | None, device: torch.device, ranks: Ranks) -> Report:
    model = profiles.model(options.task)
    plan = make_plan(options, model, *read_training_samples(options, model, ranks))
    plan = for_its_steps(plan, asked, free, ranks.launch)
    ranks.require_same("samples or settings", _settings(plan), exit_code=WRONG_USAGE)
    ranks.require_shared(options.output_dir)
    way = chosen_way(plan, ranks, device) if ranks.count > 1 else "ddp"
    mesh = mesh_of(way, ranks.launch, device)
    if mesh:
        plan, ranks = in_parts(plan, ranks.launch.shards(way)), ranks.marching()
    state = find_state(plan, ranks.launch)
    ranks.require_same("training states", {"step": state.step if state else None})
    changed = changed_settings(plan, state) if state else {}
    state = compared(plan, state, changed, ranks.count) if state else None
    require_own_files(plan, state)
    plan = replace(plan, trained_before=trained_before(plan, state))
    if state:
        done = [state.experts[expert.name].step for expert in plan.experts]
        if not plan.num_left(done) and LOOKED not in state.facts:
            return _done_before(plan, device, state, changed, ranks)
        refuse_other_rank(plan, state, changed)
    if plan.may_have_seen:
        log.warning("  what is held out now may have been trained on before, in an earlier part of the run or by the "
                    "LoRA that it starts from: its loss is no proof of what was learned")  # fmt: skip
    require_room_to_save(plan)
    log.info('  live in a browser: "%s" -m wangen.runtime watch --output_dir "%s"', sys.executable,
             options.output_dir.absolute())  # fmt: skip
    # Prompts are encoded before the model loads.
    with Watching(plan, device, state.step if state else 0, ranks) as watching:
        with enough_memory_for(plan, device, "loading the model"):
            training = _prepare(plan, device, state, ranks, mesh)
        if ranks.is_first:  # from here on nothing is refused
            set_other_epochs_aside(plan)
            if changed:
                set_other_ends_aside(plan)
            _say_what_begins(training, asked)
        if state and not changed:
            save_missed(training)
        state = None  # its tensors have been copied, and would stay in host memory
        start, started = training.step, time.monotonic()
        with Interrupt() as interrupt:
            if not train_to_end(training, watching, interrupt):
                raise KeyboardInterrupt
        for path in save_loras(training):  # before the logs are closed, which may wait for a network
            log.info("  saved %s", path)
    if ranks.is_first:
        _say_that_it_ended(options)
    for line in lost_best(plan, training.facts) if ranks.is_first else ():
        log.warning("  %s", line)
    speed = watching.speed()
    if speed:
        log.info("  %s", in_words(speed))
    timing = training.step - start, round(time.monotonic() - started, 3), speed
    return _report(plan, training.step, training.facts | dict(zip(_TIMING, timing, strict=True)))


def _say_what_begins(training: Run, asked: Train) -> None:
    """Leave the settings beside the numbers, for who looks at a run that goes on or was killed."""
    plan, each = training.plan, asked.gradient_accumulation_steps // training.ranks.launch.count
    write_beginning(
        replace(asked, gradient_accumulation_steps=each), plan.options.output_dir / BEGUN, _inputs(plan),
        output_name=plan.name, num_steps=training.num_steps,
    )  # fmt: skip


def _say_that_it_ended(options: Train) -> None:
    """The report follows."""
    (options.output_dir / BEGUN).unlink(missing_ok=True)


def _done_before(
    plan: Plan, device: torch.device, state: TrainingState, changed: Mapping[str, str], ranks: Ranks
) -> Report:
    """Of a run that came to its end before: its LoRAs, as the flags of saving want them now, unless others changed."""
    if ranks.is_first and not (changed or plan.options.resume) and state.folder:
        drop_other_states(plan, state.folder, state.step)  # a kill may have left some
    if changed:
        leave_as_it_is(plan, state, changed)
    elif ranks.is_first and state.facts.get(SCHEDULE_FREE):  # its optimizer knows what to save
        save_loras(_prepare(plan, device, state, Ranks()))
    elif ranks.is_first:  # flags of saving may have changed; equal bytes are written again
        save_state_as_loras(plan, state)
    if ranks.is_first:
        _say_that_it_ended(plan.options)
    for line in (*not_looked_at(plan, state), *lost_best(plan, state.facts)):
        log.warning("  %s", line)
    return _report(plan, state.step, {**state.facts, **_timing_before(plan.options)}, done_before=True)


def alike(options: Train, free: int | None, ranks: Ranks) -> Train:
    """The options with the memory flags of the process whose card has least free: `--vram auto` looks at each card."""
    if options.vram != "auto" or ranks.count == 1:
        return options
    return replace(options, **min(ranks.gathered((free or 0, memory_of(options))), key=lambda found: found[0])[1])


def _settings(plan: Plan) -> dict[str, Any]:
    """What has to be the same in all processes: what decides the result, and when they wait for each other."""
    flags = {name: value for name, value in vars(plan.options).items()
             if isinstance(value, bool | int | float | str) and name not in _EACH_ITS_OWN}  # fmt: skip
    prompts = plan.options.sample_prompts
    drawn = digest_file(prompts) if prompts else ""
    return {**flags, **plan.fingerprint, "held-out items": dataset_digest(plan.held_out), "--sample_prompts": drawn}


def _prepare(
    plan: Plan, device: torch.device, state: TrainingState | None, ranks: Ranks, mesh: "DeviceMesh | None" = None
) -> Run:
    """Load the transformers, add the adapters, and put the state in."""
    kind = family(plan.model)
    # What is split is read into host memory first.
    in_turns = mesh is not None and ranks.any(is_crowded(plan, ranks.launch))
    with ranks.one_at_a_time() if in_turns else contextlib.nullcontext():
        trainees = [
            load_trainee(plan, expert, kind, device, state.experts[expert.name] if state else None, mesh, ranks)
            for expert in plan.experts
        ]
    training = Run(plan, kind, device, trainees, ranks)
    if training.is_sharded:
        from wangen.runtime.training.sharded_state import ShardedStates

        training.states_in_parts = ShardedStates(plan.states, ranks, asynchronous=plan.options.async_save)
    sums = {
        f"{trainee.plan.name} sums of bits".strip(): [sum_of_bits(each) for each in flat.weights[: flat.num_joint]]
        for trainee in trainees
        for flat in [trainee.optimization.flat]
    }
    ranks.require_same("weights", sums)
    if state:
        training.facts = {**state.facts, **plan.facts}
        if state.folder and state.folder.parent.resolve() == plan.states.resolve():
            training.saved_step = state.step
    else:
        training.facts = plan.facts | ({BEFORE: plan.trained_before} if plan.trained_before else {})
    if plan.options.fresh and not state:
        begun = begun_by(ranks.launch)
        training.facts |= begun
        if begun and ranks.is_first:  # else a start by the same launcher could not tell which states are its own
            checkpoint.forget(plan.states)
        training.begins_anew = not begun
        if training.begins_anew:
            checkpoint.mark_begun_anew(plan.states)
    announce(training)
    return training


def _timing_before(options: Train) -> dict[str, Any]:
    """The times in the report of a run that had come to its end already, if it had the same memory flags as now."""
    with contextlib.suppress(OSError, ValueError, RecursionError, LookupError, TypeError):
        told = json.loads((options.output_dir / TRAIN_REPORT).read_bytes())
        if told["inputs"]["memory"] == memory_of(options):
            return {name: told["result"][name] for name in _TIMING}
    return {}


def _inputs(plan: Plan) -> dict[str, Any]:
    return {"dataset_config": plan.options.dataset, **plan.inputs, "memory": memory_of(plan.options)}


def _report(plan: Plan, step: int, facts: Mapping[str, Any], *, done_before: bool = False) -> Report:
    options, use = plan.options, cache_use(plan.samples)
    summary = f"already trained, {step} steps" if done_before else f"{step} steps"
    if not done_before and len(plan.experts) == 1:  # of two, the first and the last step may be other experts'
        summary += f", loss {facts[FIRST_LOSS]:.4f} at the first step, {facts[LAST_LOSS]:.4f} at the last"
    files = [plan.file(expert) for expert in plan.experts]
    return Report(
        folder=options.output_dir,
        summary=f"{summary}: {', '.join(map(str, files))}",
        inputs=_inputs(plan),
        counts={"from_cache": use.from_cache, "computed": use.computed, "steps": step},
        result={
            "cache_mode": use.mode(options.cache_mode),
            "share_from_cache": round(use.share, 4),
            "lora": files[0],
            "loras": files,
            "done_before": done_before,
            **facts,
        },
    )
