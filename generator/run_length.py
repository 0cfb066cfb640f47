"""How many steps a training has, from its flags."""

from wangen.generator.step_parts import DEFAULT_EPOCHS
from wangen.generator.steps import Train


def goes_by_steps(options: Train) -> bool:
    """Whether `--max_train_steps` says how long a run is; epochs win over it, and without either there is a default."""
    return options.max_train_epochs is None and options.max_train_steps is not None


def num_steps_of(options: Train, steps_per_epoch: int) -> int:
    """Optimizer steps in all."""
    if goes_by_steps(options):
        return options.max_train_steps or 0
    return (DEFAULT_EPOCHS if options.max_train_epochs is None else options.max_train_epochs) * steps_per_epoch
