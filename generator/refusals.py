"""What is wrong with a step's flags wherever it runs: asked where scripts are made and checked, long before it does."""

from wangen import profiles
from wangen.generator.errors import UsageError
from wangen.generator.experts import choose_boundary
from wangen.generator.generate_step import DEFAULT_TASK
from wangen.generator.sampling_refusals import refuse_judging, refuse_sampling, require_tile
from wangen.generator.steps import CacheLatents, Evaluate, Generate, Train
from wangen.generator.table import AnyStep
from wangen.generator.train_refusals import choose_condition_frames, refuse_experts, refuse_flags, refuse_more_blocks


def judged(step: AnyStep, *, has_weights: bool = True) -> AnyStep:
    """A step as it is, if its flags can go together on any machine.

    Args:
        step: any.
        has_weights: what it works with must be named; else the user is told to add it.

    Raises:
        UsageError: no run can have its flags.
    """
    if isinstance(step, Train):
        model = profiles.model(step.task)
        refuse_flags(step)
        refuse_more_blocks(step, model.transformer.num_layers)
        choose_condition_frames(step.condition_frames, model)
        choose_boundary(step.timestep_boundary, model)
        if has_weights:
            refuse_experts(step, model)
    elif isinstance(step, CacheLatents):
        require_tile(step.vae_tile)
    elif has_weights and isinstance(step, Generate | Evaluate):
        model = profiles.model(step.task or DEFAULT_TASK)
        if isinstance(step, Generate):
            refuse_sampling(step, model)
        else:
            refuse_judging(step, model)
        most = model.transformer.num_layers
        if (step.blocks_to_swap or 0) > most:
            raise UsageError(f"--blocks_to_swap {step.blocks_to_swap}: {model.name} has {most} blocks",
                             cure=f"give 0 to {most}")  # fmt: skip
    return step
