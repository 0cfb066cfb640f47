"""What a run leaves on disk on its way: LoRAs, training states, and which older ones go."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wangen.generator.errors import WangenError, in_line
from wangen.generator.files import remove
from wangen.generator.lock import RUN_LOCK, require_own
from wangen.generator.plan.saves import has_state_windows, windows
from wangen.generator.run_names import AVERAGE, BEST, at_epoch, at_step
from wangen.runtime.lora import cast
from wangen.runtime.lora_folder import numbered
from wangen.runtime.models import family
from wangen.runtime.training import adapter_files, checkpoint, full
from wangen.runtime.training.checkpoint import ExpertState, TrainingState
from wangen.runtime.training.facts import BEST_SO_FAR, OWED, SCHEDULE_FREE
from wangen.runtime.training.loading import as_here
from wangen.runtime.training.metadata import metadata
from wangen.runtime.training.not_finite import require_finite_weights
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.run import Run, Trainee
from wangen.runtime.training.set_aside import set_old_average_aside, set_old_best_aside

log = logging.getLogger("wangen")

_SECONDS_AT_WILL = 1.0
"""A state that is written as fast is written at every epoch's end."""
_TIMES_OF_WRITING = 10
"""One that takes longer is written there only when so many times its seconds have passed since the last."""


class Saving:
    """Saves what is due after a step.

    LoRAs are saved every `--save_every_n_steps` and `--save_every_n_epochs`; the training state with each of them, at
    an epoch's end, every `--save_state_every_n_steps` and every `--save_state_every_n_minutes`. Epochs can be short, so
    at their ends no more than a tenth of the time goes into saving.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._saved_at = time.monotonic()
        self._seconds = 0.0  # that the last saving took

    def due(self) -> bool:
        """Whether something is to be saved after this step."""
        return bool(self._suffixes()) or self._state_due()

    def missed(self) -> bool:
        """Whether LoRAs that are due at this step are not there, though the state of it is."""
        run = self._run
        files = (run.plan.file(trainee.plan, suffix) for trainee in run.trainees for suffix in self._suffixes())
        is_own = run.step > 0 and run.saved_step == run.step
        owed = run.facts.get(OWED) or not all(file.is_file() for file in files)
        return run.ranks.any(run.ranks.is_first and is_own and owed)

    def _suffixes(self) -> list[str]:
        """The endings, in the file's name, of the LoRAs that are due at this step."""
        plan, step = self._run.plan, self._run.step
        options = plan.options
        if step >= self._run.num_steps:  # the finished LoRA has a name of its own
            return []
        suffixes = []
        epochs_done, rest = divmod(step, plan.steps_per_epoch)
        if options.save_every_n_steps and step % options.save_every_n_steps == 0:
            suffixes.append(at_step(step))
        if options.save_every_n_epochs and rest == 0 and epochs_done % options.save_every_n_epochs == 0:
            suffixes.append(at_epoch(epochs_done))
        return suffixes

    def _state_due(self) -> bool:
        options, step = self._run.plan.options, self._run.step
        every = options.save_state_every_n_steps
        passed = time.monotonic() - self._saved_at
        pays = self._seconds < _SECONDS_AT_WILL or passed > _TIMES_OF_WRITING * self._seconds
        due = passed > 60 * options.save_state_every_n_minutes or (step % self._run.plan.steps_per_epoch == 0 and pays)
        # The first process writes, so only its clock knows what that takes; the others go by what it finds due.
        return (due and self._run.ranks.is_first) or bool(every and step % every == 0)

    def save(self) -> None:
        """Save the LoRAs that are due, and the state, also where a LoRA fails and one process saves for all."""
        began, run = time.monotonic(), self._run
        suffixes, done = self._suffixes(), False
        try:
            for suffix in suffixes:
                save_loras(run, suffix)
            if suffixes and run.ranks.is_first:
                drop_old_loras(run.plan, run.step)
            done = True
        finally:
            if done or not run.is_sharded:
                self.save_state_alone(owes=not done)
        self._saved_at = time.monotonic()
        self._seconds = self._saved_at - began

    def save_state_alone(self, *, owes: bool) -> None:
        """Save the state alone; where it owes the LoRAs that are due, a start from it writes them first."""
        due = bool(self._suffixes())
        if owes and due:
            self._run.facts[OWED] = True
        else:
            self._run.facts.pop(OWED, None)
        save_state(self._run, keep=due and self._run.plan.options.save_state)


def save_missed(run: Run) -> None:
    """Save the numbered LoRAs that a state owes, or that fall due where a shorter run ended with a finished one."""
    saving = Saving(run)
    if saving.missed():
        saving.save()


def save_state(run: Run, *, keep: bool = False) -> None:
    """Write the training state and drop the older ones, except kept ones and the one that `--resume` names.

    The first process does, and all of them have to ask; those that hold parts write them, too. What `--fresh` begins
    anew takes the place of an earlier run here.

    Raises:
        WangenError: the weights are not finite, another run has taken the folder over, or the disk refuses.
    """
    require_own_folder(run)
    settle_state(run)  # by its own step
    require_finite_weights(run)
    run.saved_step = run.step
    if run.states_in_parts:
        if run.begins_anew:  # the others write there, too
            if run.ranks.is_first:
                checkpoint.forget(run.plan.states)
            run.ranks.meet()
        weights = {trainee.plan.name: trainee.sharded for trainee in run.trainees if trainee.sharded}
        run.states_in_parts.save(state_of(run), weights, keep=keep)
        if not run.plan.options.async_save:
            settle_state(run)
    elif run.ranks.is_first:
        newest = checkpoint.save(run.plan.states, state_of(run), keep=keep)
        if run.begins_anew:
            checkpoint.remove_others(run.plan.states, {newest}, lambda _: set())
        drop_other_states(run.plan, newest, run.saved_step)
    run.begins_anew = False


def require_own_folder(run: Run) -> None:
    """See that no other run has taken the output folder over before the first process writes into it.

    Raises:
        TakenOverError: one has.
    """
    if run.ranks.is_first:
        require_own(run.plan.options.output_dir / RUN_LOCK)


def settle_state(run: Run, *, wait: bool = True) -> None:
    """Finish the state that is being written, if there is one; without `wait` only if that takes no time."""
    writing = run.states_in_parts
    if writing and (wait or writing.is_written):
        require_own_folder(run)
        path = writing.settle()
        if path:
            drop_other_states(run.plan, path, run.saved_step)


def drop_other_states(plan: Plan, newest: Path, step: int) -> None:
    """Remove the states beside the newest one, of this step, that nothing keeps.

    What `--resume` names stays, and with `--save_state` what its flags keep.
    """
    spared = {newest, *([plan.options.resume.resolve()] if plan.options.resume else [])}
    last = min(step, plan.num_steps - 1)  # the end of a run saves no numbered LoRA
    checkpoint.remove_others(plan.states, spared, partial(_staying, plan, last))


def state_of(run: Run) -> TrainingState:
    """The training state of a run as it stands."""
    experts = {}
    if any(trainee.optimization.is_schedule_free for trainee in run.trainees):
        run.facts[SCHEDULE_FREE] = True
    for trainee in run.trainees:
        tensors, numbers = trainee.optimization.state()
        experts[trainee.plan.name] = ExpertState(
            step=trainee.step,
            adapter={name: parameter.detach() for name, parameter in trainee.parameters.items()},
            optimizer=tensors,
            numbers=numbers,
            ema=trainee.ema.weights() if trainee.ema else {},
            ema_updates=trainee.ema.num_updates if trainee.ema else 0,
        )
    return TrainingState(experts, run.plan.fingerprint, run.facts)


def _staying(plan: Plan, last: int, steps: list[int]) -> set[int]:
    """Those of the steps of kept states that are still kept, as their LoRAs are.

    Ones of other flags always are, and ones of later steps, which are another line's: they neither count nor go.
    """
    kinds = [window for window in windows(plan.options, plan.steps_per_epoch, states=True) if window.every]
    stay, counted = set[int](), list[int]()
    for step in steps:
        own = [window for window in kinds if step % window.every == 0]
        if step > last or not own:
            stay.add(step)
        elif any(window.keeps(step, last) for window in own):
            counted.append(step)
    most = 0 if has_state_windows(plan.options) else plan.options.keep_last or 0
    return stay.union(counted[-most:])


def save_loras(run: Run, suffix: str = "") -> list[Path]:
    """Write the LoRA of every expert, in every layout asked for, and the averages where they are kept."""
    require_own_folder(run)
    written = []
    for trainee in run.trainees:
        written += save_trained(run, trainee, suffix)
        if trainee.ema:
            written += save_trained(run, trainee, suffix + AVERAGE, averaged=True)
        elif not suffix and run.ranks.is_first:
            set_old_average_aside(run.plan, trainee.plan)
    return written


def save_trained(run: Run, trainee: Trainee, suffix: str, judged_at: str = "", *, averaged: bool = False) -> list[Path]:
    """Write what an expert has learned; the first process does, and all of them have to ask.

    Args:
        run: whose steps stand in the header.
        trainee: the expert.
        suffix: of the file's name.
        judged_at: of a best one, a digest of the points at which it was judged.
        averaged: its average in place of the weights as they are.
    """
    with _as_saved(trainee, averaged=averaged) as parameters:
        if trainee.sharded:
            dtype = getattr(torch, run.plan.options.save_precision)
            whole: dict[str, torch.Tensor] = {}
            for name, value in trainee.sharded.gathered(parameters):
                if run.ranks.is_first:
                    whole[name] = cast(value.detach().cpu(), dtype, name)
            parameters = whole
        if not run.ranks.is_first:
            return []
        steps = trainee.step, run.step
        return save_lora(run.plan, trainee.plan, parameters, steps, suffix, judged_at, averaged=averaged)


@contextmanager
def _as_saved(trainee: Trainee, *, averaged: bool) -> Iterator[Mapping[str, torch.Tensor]]:
    """Within: the parameters of an expert as its optimizer has them saved, or their average."""
    if averaged:
        assert trainee.ema
        yield trainee.ema.weights()
        return
    with trainee.optimization.evaluating():
        yield trainee.parameters


def save_best(run: Run, trainee: Trainee, judged_at: str, *, anew: bool, averaged: bool) -> bool:
    """Write an expert's best; False where the system refuses, as while a program has it open, which is told.

    Args:
        run: whose steps stand in the header.
        trainee: the expert.
        judged_at: a digest of the points at which it was judged.
        anew: there is none yet that was judged at these points; one of others is set aside.
        averaged: its average is what is best.
    """
    refused = False
    try:
        if anew and run.ranks.is_first:
            set_old_best_aside(run.plan, trainee.plan, judged_at)
        save_trained(run, trainee, BEST, judged_at, averaged=averaged)
    except (WangenError, OSError) as error:
        if run.is_sharded:  # the others may wait for this one's part
            raise
        refused = True
        log.warning("  the best so far is not saved, and sought on: %s", in_line(error))
    return not run.ranks.any(refused)


def save_state_as_loras(plan: Plan, state: TrainingState) -> list[Path]:
    """Write the finished LoRAs of a run that was done before: what they are saved as may have changed.

    Not for a schedule-free optimizer, which trains other weights than those that are saved.
    """
    written: list[Path] = []
    for expert in plan.experts:
        saved = as_here(state.experts[expert.name], expert.name, None)
        steps = saved.step, state.step
        written += save_lora(plan, expert, saved.adapter, steps)
        if saved.ema:
            written += save_lora(plan, expert, saved.ema, steps, AVERAGE, averaged=True)
        else:
            set_old_average_aside(plan, expert)
    return written


def lost_best(plan: Plan, facts: Mapping[str, Any]) -> list[str]:
    """What to say at a run's end of each best that somebody took away, of which no better one came since."""
    told = facts.get(BEST_SO_FAR, {}) if plan.options.keep_best else {}
    return [
        f"{file.name}, the best so far, saved at step {told[expert.name]['step']}, is not there any more"
        for expert in plan.experts
        if expert.name in told and not (file := plan.file(expert, BEST)).is_file()
    ]


def save_lora(
    plan: Plan,
    expert: ExpertPlan,
    parameters: Mapping[str, torch.Tensor],
    steps: tuple[int, int],
    suffix: str = "",
    judged_at: str = "",
    *,
    averaged: bool = False,
) -> list[Path]:
    """Write what these parameters of an expert are after so many own and common steps, in every layout asked for."""
    step, run_step = steps
    header = metadata(plan, expert.name, step=step, run_step=run_step, judged_at=judged_at, averaged=averaged)
    if plan.options.train_mode == "full":
        tensors = family(plan.model).saved_tensors(parameters, expert.dit)
        return full.save(plan.file(expert, suffix), tensors, plan.options, header)
    return adapter_files.save(plan.file(expert, suffix), parameters, plan.options, header, expert=expert.name)


def drop_old_loras(plan: Plan, step: int) -> None:
    """Remove the numbered LoRAs that fall out of `--keep_last`, `--save_last_n_epochs` or `--save_last_n_steps`.

    Those of later steps are an earlier run's, which `--fresh` or `--resume` left behind: they neither count nor go. Nor
    does the LoRA of another run that is called like one of these, which has states of its own.
    """
    options = plan.options
    by_step, by_epoch = windows(options, plan.steps_per_epoch)
    for expert in plan.experts:
        name = numbered(options.output_name + expert.suffix)
        there: dict[int, list[Path]] = {}
        for path in options.output_dir.iterdir():
            match = name.fullmatch(path.name)
            if match and not path.with_name(f"{path.stem}-state").exists():
                window = by_step if match["step"] else by_epoch
                saved = int(match["step"] or int(match["epoch"]) * plan.steps_per_epoch)
                if not window.keeps(saved, step):
                    _drop(path)
                elif saved <= step:
                    there.setdefault(saved, []).append(path)
        for old in sorted(there)[: -options.keep_last] if options.keep_last else ():
            for path in there[old]:
                _drop(path)


def _drop(path: Path) -> None:
    """Remove a LoRA that has fallen out; one that a program has open, say, is tried again with the next."""
    try:
        remove(path)
    except OSError as error:
        log.warning("  %s cannot be removed, and stays: %s", path, error.strerror or error)
