"""The learning rate over a run: its factor as a pure function of the step, so that resuming needs no state."""

from collections.abc import Callable

import torch

from wangen.generator.errors import UsageError
from wangen.generator.steps import Train
from wangen.generator.train_values import is_share, steps_of

Schedule = Callable[[int], float]
"""Optimizer steps done -> the factor on the learning rate of the next one."""

ENDLESS = {"constant", "constant_with_warmup", "inverse_sqrt", "adafactor"}
"""Schedules that do not look at the length of the run."""

REX_D = 0.9


def make_schedule(options: Train, num_steps: int) -> Schedule:
    """The factor on the learning rate at each step, by the library that has the schedule: diffusers, else transformers.

    `constant` with a warm-up is `constant_with_warmup`. `adafactor` is Adafactor's own schedule, so the factor is 1.

    Args:
        options: `--lr_scheduler` and the flags beside it.
        num_steps: optimizer steps in the whole run.

    Raises:
        UsageError: a flag that the schedule needs is missing or outside the run.
    """
    warmup = steps_of("lr_warmup_steps", options.lr_warmup_steps, num_steps)
    name: str = options.lr_scheduler
    if name == "constant" and warmup:
        name = "constant_with_warmup"
    if name in ("constant", "adafactor"):
        return lambda step: 1.0
    if name == "rex":
        return rex(num_steps, warmup, options.lr_scheduler_min_lr_ratio)
    if name in ("cosine_with_min_lr", "warmup_stable_decay", "inverse_sqrt"):
        return _of_transformers(name, options, num_steps, warmup)
    return _of_diffusers(name, options, num_steps, warmup)


def unfinished_warm_up(options: Train, num_steps: int) -> str | None:
    """What to say of a warm-up that lasts as long as the run or longer; a `--smoke` is always short.

    >>> from pathlib import Path
    >>> print(unfinished_warm_up(Train(output_dir=Path("out"), output_name="cats", lr_warmup_steps="500"), 400))
    the warm-up takes 500 steps of 400: the learning rate never reaches its value (--lr_warmup_steps)
    """
    warmup = steps_of("lr_warmup_steps", options.lr_warmup_steps, num_steps)
    if warmup < num_steps or options.smoke or options.lr_scheduler == "adafactor":
        return None
    return (f"the warm-up takes {warmup} steps of {num_steps}: the learning rate never reaches its value "
            "(--lr_warmup_steps)")  # fmt: skip


def rex(num_steps: int, warmup: int, floor: float) -> Schedule:
    """The reflected exponential schedule: z / ((1 - d) + d z) with z the share of the run that is left.

    Chen, Wolfe, Kyrillidis, "REX: Revisiting Budgeted Training with an Improved Schedule", 2021, arXiv:2107.04197, has
    d = 1/2. d = 0.9, which stays higher for longer, is what LoRA trainers use under this name (IvanVassi/REX_LR, and
    after it musubi-tuner, which goes down to 0.01 where it is told no floor). The warm-up is linear.

    Args:
        num_steps: optimizer steps in the whole run.
        warmup: steps that rise from `floor` to 1.
        floor: the factor at both ends.

    >>> factor = rex(100, 0, 0.0)
    >>> factor(0), round(factor(50), 4), factor(100)
    (1.0, 0.9091, 0.0)
    """

    def factor(step: int) -> float:
        if step < warmup:
            return floor + (1 - floor) * step / warmup
        left = min(max((num_steps - step) / max(num_steps - warmup, 1), 0.0), 1.0)
        return floor + (1 - floor) * left / (1 - REX_D + REX_D * left)

    return factor


def depends_on_length(options: Train) -> bool:
    """Whether the learning rate of a step depends on how long the run is."""
    if options.lr_scheduler == "adafactor":  # it has a warm-up of its own
        return False
    warms_by_share = is_share(options.lr_warmup_steps) and float(options.lr_warmup_steps.rstrip("%")) > 0
    return options.lr_scheduler not in ENDLESS or warms_by_share


def _of_diffusers(name: str, options: Train, num_steps: int, warmup: int) -> Schedule:
    from diffusers.optimization import get_scheduler

    try:
        schedule = get_scheduler(
            name,
            _probe(options),
            num_warmup_steps=warmup,
            num_training_steps=num_steps,
            num_cycles=options.lr_scheduler_num_cycles,
            power=options.lr_scheduler_power,
        )
    except ValueError as error:  # polynomial ends at 1e-7 and refuses to begin below
        raise UsageError(f"--lr_scheduler {name}: {error}") from None
    factor: Schedule = schedule.lr_lambdas[0]
    return factor


def _of_transformers(name: str, options: Train, num_steps: int, warmup: int) -> Schedule:
    """Schedules that diffusers lacks. A cycle of `--lr_scheduler_num_cycles` is one way down: half a cosine wave."""
    from transformers import optimization as library

    probe, waves, floor = _probe(options), options.lr_scheduler_num_cycles / 2, options.lr_scheduler_min_lr_ratio
    if name == "inverse_sqrt":
        schedule = library.get_inverse_sqrt_schedule(probe, warmup, timescale=options.lr_scheduler_timescale)
    elif name == "cosine_with_min_lr":
        schedule = library.get_cosine_with_min_lr_schedule_with_warmup(
            probe, warmup, num_steps, num_cycles=waves, min_lr_rate=floor
        )
    else:
        schedule = library.get_wsd_schedule(
            probe, warmup, _decay_steps(options, num_steps, warmup), num_steps, num_cycles=waves, min_lr_ratio=floor
        )
    factor: Schedule = schedule.lr_lambdas[0]
    return factor


def _decay_steps(options: Train, num_steps: int, warmup: int) -> int:
    decay = steps_of("lr_decay_steps", options.lr_decay_steps, num_steps)
    if warmup + decay == num_steps + 1 and is_share(options.lr_warmup_steps) and is_share(options.lr_decay_steps):
        decay -= 1  # two shares that make up the run, each of them rounded up
    if warmup + decay > num_steps:
        raise UsageError(f"a warm-up of {options.lr_warmup_steps} and a decay of {options.lr_decay_steps} are more "
                         "than the run", cure="give less of one of them, or more steps")  # fmt: skip
    return decay


def _probe(options: Train) -> torch.optim.Optimizer:
    """The libraries hang a schedule on an optimizer; only its function is wanted here."""
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=options.learning_rate)
