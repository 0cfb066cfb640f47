"""What a run goes on from: the state that an earlier start left, if its settings are those of this one."""

import ast
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from glob import escape
from itertools import chain
from typing import Any

from wangen.generator import headers
from wangen.generator.adapter_settings import settings_of_flags
from wangen.generator.errors import UsageError, WangenError, many, some
from wangen.generator.header_keys import FINGERPRINT
from wangen.generator.launch import Launch
from wangen.generator.lora_config import lora_file
from wangen.generator.run_folder import SAMPLES
from wangen.generator.run_names import at_step
from wangen.generator.session import with_flag
from wangen.generator.steps import Train
from wangen.generator.table import options as flags_of
from wangen.runtime.lora_folder import numbered, told_by
from wangen.runtime.trained_on import DATA, HELD_OUT, Part, fingerprints
from wangen.runtime.training import checkpoint
from wangen.runtime.training.adapter_config import start_flag
from wangen.runtime.training.checkpoint import TrainingState
from wangen.runtime.training.facts import (
    ASPECTS,
    BEFORE,
    BEST_SO_FAR,
    JOB,
    ORIGIN,
    SLURM_JOB,
    TOLD,
    VALIDATION,
    VALIDATION_BASE,
)
from wangen.runtime.training.flat import OTHER_ADAPTER
from wangen.runtime.training.plan import SHARE, SIZES_OF_ADAPTERS, Plan, dataset_aspects, reads_share
from wangen.runtime.training.timesteps import HIGH, LOW

log = logging.getLogger("wangen")

ACCUMULATION = "gradient_accumulation_steps"
_SHAPES = {"train_mode", "network_module", "network_dim", "dora", "lokr_factor", "lora_targets", "include_patterns",
           "exclude_patterns", "dim_from_weights"}  # fmt: skip
"""Settings that make other weights to train, into which those of a state do not fit."""
_SHAPES_OF_ARGUMENTS = ("dora", "factor", "decompose_both", "include", "exclude", "spared")
"""What of `AdapterSettings` does so, and may stand in `--network_args`."""
_BASE = ("dit", "base_weights", "quantize", "mixed_precision")
"""Settings that make another model of the base, by how their names begin."""


def find_state(plan: Plan, launched: Launch) -> TrainingState | None:
    """The newest state; with `--resume` the one it names, or the newest that a run of these settings has saved since.

    With `--fresh` there is none, unless the launcher has started the job again: then the newest that it has saved.
    """
    given = plan.options.resume
    if plan.options.fresh:
        path = checkpoint.newest(plan.states, _begun_before(launched)) if launched.is_again else None
        return checkpoint.read(path) if path else None
    if given is None or given.resolve().parent == plan.states.resolve():
        checkpoint.require_own_format(plan.states)
    if given is None:
        path = checkpoint.newest(plan.states)
        if path and checkpoint.take_mark(plan.states):
            log.warning("  the last start was given --fresh and saved nothing: this one goes on with the run before; "
                        "%s begins anew", with_flag(Train.command, "--fresh"))  # fmt: skip
        return checkpoint.read(path) if path else None
    origin = checkpoint.identity(given)
    since = checkpoint.newest(plan.states, {ORIGIN: origin})
    state = checkpoint.read(since or given)
    if since and changed_settings(plan, state):  # another line began there, too
        since, state = None, checkpoint.read(given)
    best: dict[str, Any] = {} if since else {BEST_SO_FAR: {}}  # its file is another line's, or elsewhere
    return replace(state, facts={**state.facts, **best, ORIGIN: origin})


def begun_by(launched: Launch) -> dict[str, str]:
    """The facts by which a start that `--fresh` began is known again, when its launcher or Slurm repeats it."""
    jobs = {JOB: launched.job, SLURM_JOB: launched.slurm_job}
    return {name: job for name, job in jobs.items() if job}


def _begun_before(launched: Launch) -> dict[str, str]:
    """What the states of a job have that is started again; after a requeue torchrun's name for it is new."""
    return {SLURM_JOB: launched.slurm_job} if launched.requeues else {JOB: launched.job}


def require_own_files(plan: Plan, state: TrainingState | None) -> None:
    """Refuse to start where a run of other experts keeps its LoRA under this name; of the same experts it is told.

    Args:
        plan: of the run.
        state: that it goes on from, if there is one.

    Raises:
        WangenError: there is such a run, which has written there since if this one had begun before, and `--fresh` is
            not given.
    """
    if plan.options.fresh:
        return
    begun = checkpoint.newest(plan.states)
    own = {expert.name for expert in plan.experts}
    for suffix in ("", f"_{HIGH}", f"_{LOW}"):
        folder = plan.options.output_dir / f"{plan.options.output_name}{suffix}-state"
        path = checkpoint.newest(folder) if folder != plan.states else None
        experts, fingerprint = checkpoint.experts_of(path) if path else ((), {})
        if own.isdisjoint(experts) or (begun and not _were_saved_with(plan, fingerprint)):
            continue
        cure = "give --experts as before, or another --output_name; --fresh writes over it"
        if begun:
            cure = f"go on under another name with --output_name … --resume {begun}; --fresh starts again over it"
        raise WangenError("a run of other experts has its LoRA under this name, and this one would write over it",
                          where=str(folder), cure=cure)  # fmt: skip
    if begun:
        return
    there = [file.name for file in map(plan.file, plan.experts) if file.is_file()]
    files = sorted(plan.options.output_dir.iterdir()) if plan.options.output_dir.is_dir() else []
    for expert in plan.experts:
        there += [file.name for file in files if numbered(plan.file(expert).stem).fullmatch(file.name)]
    if there:
        log.warning("  no training state is in %s: beginning at step %d, and %s of an earlier run will be written over "
                    "as it comes to them", plan.states, state.step if state else 0, some(there))  # fmt: skip


def _were_saved_with(plan: Plan, fingerprint: Mapping[str, Any]) -> bool:
    """Whether a run of this fingerprint wrote the LoRA of an expert; where that is not there, one on its way."""
    told, folder = json.dumps(fingerprint, sort_keys=True), plan.options.output_dir
    for path in map(plan.file, plan.experts):
        on_the_way = (file for file in folder.glob("*.safetensors") if numbered(path.stem).fullmatch(file.name))
        if any(told_by(file).get(FINGERPRINT) == told for file in ([path] if path.is_file() else on_the_way)):
            return True
    return False


def changed_settings(plan: Plan, state: TrainingState) -> dict[str, str]:
    """The settings that decide the result and are others now than in the state: by name what each was and is."""
    # A flag that the state's version did not have yet did what is its default now.
    defaults = {option.name: str(option.default) for option in flags_of(Train) if option.flag.pinned}
    old, new = defaults | dict(state.fingerprint), plan.fingerprint
    names = {*state.fingerprint, *new}
    if plan.options.train_mode == "full":  # states of earlier versions have them
        names -= SIZES_OF_ADAPTERS
    if not reads_share(plan.options, len(plan.experts)):  # states of earlier versions tell it nevertheless
        names.discard(SHARE)
    found = {
        name: _difference(name, old.get(name), new.get(name))
        for name in sorted(names)
        if old.get(name) != new.get(name)
    }
    if "dataset" in found:
        found["dataset"] = _other_data(state.facts.get(ASPECTS, {}), dataset_aspects(plan.samples))
    return found


def compared(plan: Plan, state: TrainingState, changed: Mapping[str, str], num_processes: int) -> TrainingState:
    """The state as this run can use it.

    Args:
        plan: what is to be trained.
        state: where the run before stands.
        changed: the settings that are others now, as `changed_settings` gives them.
        num_processes: that share the batches of a step.

    Raises:
        UsageError: its settings were others, and `--resume_changed` is not given.
    """
    _refuse_other_experts(plan, state)
    if changed and not plan.options.resume_changed:
        listed = "\n".join(f"  - {name}: {words}" for name, words in changed.items())
        raise UsageError(
            f"an earlier run used other settings\n{listed}",
            where=str(plan.options.resume or plan.states),
            cure=_same_batches(state, changed, num_processes)
            + f"{with_flag('train', '--fresh')} (or removing that folder) starts again from step 0"
            + _go_on(plan, state, changed),
        )  # fmt: skip
    for name, words in changed.items():
        log.warning("  resuming with changed %s: %s", name, words)
    if changed.keys() & {"dataset", "validation_items", "gradient_accumulation_steps"}:
        log.warning("  if an epoch has other steps now, epochs are counted as if it always had: draws may come again")
    if changed.keys() & {"dataset", "validation_items"}:
        before = _together(plan, [*state.facts.get(BEFORE, ()), state.facts.get(TOLD, state.fingerprint)])
        state = replace(state, facts={**state.facts, BEFORE: before})
    if any(name.startswith(_BASE) for name in changed):  # what it was judged by was another model's
        state = replace(state, facts={**state.facts, VALIDATION_BASE: {}, BEST_SO_FAR: {}})
    return state


def refuse_other_rank(plan: Plan, state: TrainingState, changed: Mapping[str, str]) -> None:
    """Refuse to train an adapter of another rank than that of a state, before a model loads.

    What else does not fit is found when the adapter is there (`wangen.runtime.training.flat`).

    Raises:
        UsageError: it has another one, whatever `--resume_changed` says.
    """
    options, others = plan.options, {"train_mode", "network_module", "dim_from_weights"}
    sized_otherwise = options.train_mode == "full" or options.network_module == "lokr" or options.dim_from_weights
    if "network_dim" in changed and not sized_otherwise and not others & changed.keys():
        raise UsageError(f"the training state is of an adapter of another rank: {changed['network_dim']}",
                         where=str(state.folder or plan.states), cure=OTHER_ADAPTER)  # fmt: skip


def _go_on(plan: Plan, state: TrainingState, changed: Mapping[str, str]) -> str:
    """How a run goes on with other settings, if it can."""
    if _trains_others(plan, state, changed):
        return ""
    flag, done = with_flag("train", "--resume_changed"), [state.experts[expert.name].step for expert in plan.experts]
    return f"; {flag} goes on with the new" if plan.num_left(done) else f"; more steps and {flag} go on with the new"


def _refuse_other_experts(plan: Plan, state: TrainingState) -> None:
    """A state goes on with the experts that it has."""
    wanted = {expert.name for expert in plan.experts}
    if wanted == set(state.experts):
        return
    flags = " and ".join(map(start_flag, sorted(wanted & set(state.experts))))
    starts = f", or leave --resume out and start from its LoRA with {flags}" if plan.options.resume and flags else ""
    raise UsageError(
        f"this training state is of {_experts_in_words(state.experts)}, and {_experts_in_words(wanted)} would go on",
        where=str(plan.options.resume or plan.states), cure=f"give --experts as before{starts}",
    )  # fmt: skip


def _experts_in_words(names: Collection[str]) -> str:
    if len(names) > 1:
        return "both experts"
    (name,) = names
    return f"the {name.replace('_', '-')} expert" if name else "a model with one transformer"


def trained_before(plan: Plan, state: TrainingState | None) -> list[Part]:
    """The other data that the weights of a run were trained on: in an earlier part of it, or where it starts from."""
    if state:
        return list(state.facts.get(BEFORE, ()))
    starts = dict.fromkeys(expert.start for expert in plan.experts if expert.start)
    told = [fingerprints(headers.read_header(lora_file(start)).metadata) for start in starts]
    return _together(plan, chain(*told))


def _together(plan: Plan, told: Iterable[Part]) -> list[Part]:
    """The data of parts, each once and without those of the plan."""
    known, found = [_data(plan.fingerprint)], list[Part]()
    for each in told:
        if (data := _data(each)) not in known:
            known.append(data)
            found.append(data | {name: each[name] for name in (HELD_OUT,) if name in each})
    return found


def _data(told: Part) -> dict[str, Any]:
    return {name: told.get(name) for name in DATA}


def _trains_others(plan: Plan, state: TrainingState, changed: Mapping[str, str]) -> bool:
    """Whether the changed settings make other weights to train, into which those of the state do not fit."""
    if _SHAPES & changed.keys() or "network_args" not in changed:
        return bool(_SHAPES & changed.keys())
    words: tuple[str, ...] = ast.literal_eval(state.fingerprint.get("network_args", "()"))
    was, now = (
        settings_of_flags(replace(plan.options, network_args=each)) for each in (words, plan.options.network_args)
    )
    return any(getattr(was, name) != getattr(now, name) for name in _SHAPES_OF_ARGUMENTS)


def _same_batches(state: TrainingState, changed: Mapping[str, str], num_processes: int) -> str:
    """How another number of processes goes on with the batches that a step had, if it can."""
    batches = int(state.fingerprint.get(ACCUMULATION, "1"))
    if ACCUMULATION not in changed:
        return ""
    if batches % num_processes:
        return f"start as many processes as before, or a number that divides the {batches} batches of its steps; "
    flag = with_flag("train", f"--{ACCUMULATION} {batches // num_processes}")
    before = many(batches, "batch", "batches")
    return f"{flag} with {many(num_processes, 'process', 'processes')} makes steps of {before}, as before; "


def _difference(name: str, old: Any, new: Any) -> str:
    if name.startswith(("dit", "network_weights")) or name == "base_weights":
        return "another file"
    return f"{old} -> {new}"


def _other_data(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What of the dataset is other now, as far as a state tells; where samples are, all the rest is in their order."""
    if not old:
        return "other samples, captions, num_repeats, batch_size or is_reg"
    if old["samples"] != new["samples"]:
        if old["files"] == new["files"]:
            return "the same files, encoded otherwise: by other weights, or in another size or precision"
        return f"other samples ({old['number']} -> {new['number']})"
    return f"other {', '.join(name for name, value in new.items() if old.get(name) != value)}"


def leave_as_it_is(plan: Plan, state: TrainingState, changed: Mapping[str, str]) -> None:
    """Say that nothing is left to do of a run whose settings are others now, `changed` by name.

    Raises:
        UsageError: its LoRA is not there: it was interrupted beyond the steps wanted now, or somebody moved it.
    """
    fresh = f"start again with --fresh{' in place of --resume' if plan.options.resume else ''}"
    new = fresh if _trains_others(plan, state, changed) else f"give more steps to go on with the new ones, or {fresh}"
    if not all(plan.file(expert).is_file() for expert in plan.experts):
        raise UsageError(
            f"nothing is left to train: the run stands at step {state.step}, with other settings, and "
            f"{plan.num_steps} are wanted; its LoRA is not there",
            where=str(plan.states),
            cure=f"give the settings before to have it written, or {new}",
        )
    log.warning("  nothing is trained or written: this run came to its end with the settings before; %s", new)


def not_looked_at(plan: Plan, state: TrainingState) -> list[str]:
    """What the flags ask for, and was not made before a run came to its end: a line for each."""
    lines = []
    if plan.held_out and VALIDATION not in state.facts:
        lines.append("the run came to its end without a validation: wangen evaluate makes one"
                     + (", and there is no best of it" if plan.options.keep_best else ""))  # fmt: skip
    made = (plan.options.output_dir / SAMPLES).glob(f"{escape(plan.name)}{at_step(state.step)}-[0-9]*")
    if plan.options.sample_prompts and not any(made):
        lines.append("the run came to its end without samples: wangen generate --prompt_file makes them")
    return lines
