"""What a training can be refused for before its dataset is cached, which may take hours."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from wangen import profiles
from wangen.generator.run_length import num_steps_of
from wangen.generator.steps import Train
from wangen.runtime.training.loading import require_room_to_save
from wangen.runtime.training.optim import try_out
from wangen.runtime.training.plan import Plan, plan_experts
from wangen.runtime.training.refusals import MANY_STEPS, refuse_anywhere, resolved
from wangen.runtime.training.schedules import make_schedule


def require_trainable(options: Train, num_batches: int, to_cache: Mapping[Path, int]) -> None:
    """Refuse what training would refuse on any card, and a disk that cannot hold its checkpoints.

    Args:
        options: as they were given.
        num_batches: of an epoch, at least.
        to_cache: for each cache folder the bytes that caching will write, which may need the same disk.

    Raises:
        WangenError: as for `refuse` and `require_room_to_save`.
    """
    model = profiles.model(options.task)
    options = resolved(replace(options, vram=None), model, None)
    refuse_anywhere(options, model)
    if options.max_train_steps and options.max_train_epochs is None:  # else the dataset decides
        make_schedule(options, options.max_train_steps)
    if options.device == "cpu" or torch.cuda.is_available():  # a node from which jobs are sent may have no GPU
        try_out(options, torch.device(options.device or "cuda"))
    steps_per_epoch = max(1, num_batches // options.gradient_accumulation_steps)
    num_steps = num_steps_of(options, steps_per_epoch)
    # How the experts share the steps depends on the dataset, and does not matter for the room.
    experts = (
        replace(expert, num_steps=0 if number else num_steps)
        for number, expert in enumerate(plan_experts(options, model, MANY_STEPS))
    )
    require_room_to_save(Plan(options, model, [], [], steps_per_epoch, tuple(experts), {}), to_cache)
