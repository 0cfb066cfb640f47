"""A training run in memory on the tiny dataset, as `train` makes it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny import TinyRun

from wangen import profiles
from wangen.generator.steps import CheckCache, Train
from wangen.runtime.loader import CachedSample, find_entries
from wangen.runtime.models import family
from wangen.runtime.samples import read_samples
from wangen.runtime.training.loading import load_trainee
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.run import Run

CPU = torch.device("cpu")
MODEL = profiles.model("t2v-1.3B")


def samples_of(tiny_run: TinyRun) -> list[CachedSample]:
    """The cached samples of the tiny dataset."""
    samples = read_samples(CheckCache(dataset_config=tiny_run.dataset_config), MODEL)
    return find_entries(tiny_run.options(tiny_run.folder), MODEL, samples)


def options_of(tiny_run: TinyRun, folder: Path, **changes: Any) -> Train:
    """Flags with what `train` would fill in."""
    options = tiny_run.options(folder, vae=tiny_run.weights["vae"], t5=tiny_run.weights["t5"], t5_dtype="float32")
    resolved = replace(options, checkpointing="none", quantize="none", blocks_to_swap=0, condition_frames=0, plain=True)
    return replace(resolved, **changes)


def make_run(options: Train, *, move_weights: float = 0.05) -> Run:
    """A run with its adapters moved away from the base, so that adapter and base differ."""
    model = profiles.model(options.task)
    if model.experts:
        options = replace(options, timestep_boundary=model.experts.boundary)
        ranges = {"high_noise": (model.experts.boundary, 1.0), "low_noise": (0.0, model.experts.boundary)}
    else:
        ranges = {"": (0.0, 1.0)}
    experts = tuple(
        ExpertPlan(name=name, dit=options.dit, start=None, low=low, high=high, share=0.5, num_steps=8)
        for name, (low, high) in ranges.items()
    )
    plan = Plan(options, model, [], [], 4, experts, {})
    trainees = [load_trainee(plan, expert, family(model), CPU, None) for expert in experts]
    for number, trainee in enumerate(trainees):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in trainee.parameters.values():
                parameter += move_weights * torch.randn(parameter.shape, generator=generator)
        trainee.step = 2
    return Run(plan, family(model), CPU, trainees)


def planned(tiny_run: TinyRun, folder: Path, **changes: object):
    from wangen import profiles
    from wangen.runtime.training.plan import make_plan
    from wangen.runtime.training.refusals import resolved
    from wangen.runtime.training.samples import read_training_samples

    options = tiny_run.options(folder, **changes)
    model = profiles.model(options.task)
    options = resolved(options, model, None)
    return make_plan(options, model, *read_training_samples(options, model))
