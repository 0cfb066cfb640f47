"""The loop over optimizer steps: what is due is saved on the way, and before an error or a signal ends it."""

import contextlib
import logging
import traceback
from collections.abc import Iterator
from functools import partial

from wangen.generator.errors import WangenError
from wangen.runtime.ahead import StoppedError
from wangen.runtime.interrupt import Interrupt
from wangen.runtime.progress import progress
from wangen.runtime.training.facts import LOOKED
from wangen.runtime.training.out_of_memory import enough_memory_for, enough_memory_for_steps
from wangen.runtime.training.pace import patient
from wangen.runtime.training.prepared import groups
from wangen.runtime.training.run import Run
from wangen.runtime.training.saving import Saving, require_own_folder, save_loras, save_state, settle_state
from wangen.runtime.training.schedules import make_schedule
from wangen.runtime.training.step import optimizer_step
from wangen.runtime.training.watching import Watching

log = logging.getLogger("wangen")

_LOOKING = "validating or sampling"


def train_to_end(training: Run, watching: Watching, interrupt: Interrupt) -> bool:
    """The loop over optimizer steps, until the end or an interrupt; what is due is saved on the way.

    Returns:
        Whether the run came to its end.
    """
    plan, ranks, saving = training.plan, training.ranks, Saving(training)
    factors = [make_schedule(plan.options, expert.num_steps) for expert in plan.experts]
    pin = training.device.type == "cuda"
    stop = None if ranks.count > 1 else patient(lambda: interrupt.requested)  # others would wait for this one
    readers = [groups(plan, trainee.plan, trainee.step, ranks, pin=pin, stop=stop) for trainee in training.trainees]
    if not _begin(training, watching, interrupt):
        return False
    saved_first = partial(_saved_first, training, watching, training.step)
    at_end = False
    try:
        with progress("train", training.num_steps, training.step) as advance:
            for number in plan.turns([trainee.step for trainee in training.trainees]):
                if ranks.any(interrupt.requested):
                    break
                try:
                    with watching.waiting(), saved_first():
                        group = next(readers[number])
                except StoppedError:
                    break
                with enough_memory_for_steps(training, group), saved_first():
                    trainee = training.activate(number)
                    result = optimizer_step(training, trainee, group, factors[number](trainee.step), interrupt)
                if result is None:
                    break
                advance(1, watching.after(result))
                settle_state(training, wait=False)
                to_save = ranks.any(saving.due())
                looks = to_save or ranks.any(watching.due())  # the first may be the only one that samples
                if looks and not _look_and_save(training, watching, saving, due=to_save):
                    break
            else:
                at_end = True
            watching.settle()
        if training.saved_step != training.step and (training.step or not training.begins_anew):
            save_state(training)
        settle_state(training)
    finally:
        for reader in readers:  # which may wait for a disk that does not answer
            reader.close()
    ranks.meet()  # a launcher that sees one process end stops the others, also one that still saves
    return at_end


@contextlib.contextmanager
def _saved_first(training: Run, watching: Watching, start: int) -> Iterator[None]:
    """Before an error ends the run, in reading or in a step of which nothing is done, save what no state has yet.

    Not where several processes train: the others have gone on to the step, and save nothing with this one.

    Args:
        training: the run.
        watching: has numbers of it that are still on the device.
        start: its step when this process began.
    """
    failures = (WangenError, OSError, RuntimeError, MemoryError)  # as where memory is full, or cannot be pinned
    try:
        yield
    except failures as error:
        unsaved = training.step > start and training.saved_step != training.step
        if unsaved and training.ranks.count == 1 and not training.is_updating:
            traceback.clear_frames(error.__traceback__)  # which hold what the step had on the device
            with contextlib.suppress(*failures):  # the first error is the one to tell
                watching.settle()
                save_state(training)
                log.info("  the training state of step %d is saved", training.step)
        raise


def _look_and_save(training: Run, watching: Watching, saving: Saving, *, due: bool) -> bool:
    """Look at the model between two steps, and save where something is due.

    Returns:
        Whether no interrupt broke the looking off.
    """
    require_own_folder(training)
    watching.settle()
    at_end = training.step >= training.num_steps

    def before_samples() -> None:
        if training.plan.options.train_mode == "lora":  # else it is as large as the model
            saving.save_state_alone(owes=True)
            training.saved_step = -1  # it has not what will be seen

    with watching.paused():
        looked = False
        try:
            with enough_memory_for(training.plan, training.device, _LOOKING):
                # Samples take long, and what kills a process meanwhile, as a full host memory does, asks nobody.
                whole = watching.look(before_samples if due or at_end else None)
            looked = True
        finally:  # what goes wrong there does not cost what was trained, where one saves for all
            if due and (looked or not training.is_sharded):
                saving.save()
            elif not (looked or training.is_sharded or training.saved_step == training.step):
                save_state(training)
            if at_end and not (looked or training.is_sharded):
                save_loras(training)  # what is trained does not wait for what failed
        training.ranks.meet()  # no step's time is what one waits for another that saves
    return whole


def _begin(training: Run, watching: Watching, interrupt: Interrupt) -> bool:
    """Validate and sample before the first step, or finish what an interrupt left undone; False when one came."""
    again = LOOKED in training.facts
    with enough_memory_for(training.plan, training.device, _LOOKING):
        whole = watching.begin(training, interrupt)
    if again:  # else a start after this one would do once more what was left then
        with watching.paused():
            save_state(training)
            settle_state(training)
    if not whole:
        training.ranks.meet()  # as at the end of a run
    return whole
