"""How many files and training states a run keeps, by its flags."""

from wangen.generator.steps import Train


def num_kept(options: Train, epoch: int, num_steps: int) -> tuple[int, int]:
    """At most how many files of an expert, and how many training states, the flags keep on the way.

    Args:
        options: of training.
        epoch: optimizer steps of an epoch.
        num_steps: of the run.
    """
    state_windows = (options.save_last_n_steps_state or 0, (options.save_last_n_epochs_state or 0) * epoch)
    files = states = 0
    for every, window in (
        (options.save_every_n_steps or 0, options.save_last_n_steps or 0),
        ((options.save_every_n_epochs or 0) * epoch, (options.save_last_n_epochs or 0) * epoch),
    ):
        if every:
            saved = (num_steps - 1) // every
            files += min(_num_within(window, every, saved), (options.keep_last or saved) + 1)
            if options.save_state:
                states += min(_num_within(window, every, saved) for window in state_windows)
    return files, states


def _num_within(window: int, every: int, saved: int) -> int:
    """How many of what is saved every so many steps lie in the last `window` steps; the oldest goes after the newest
    came. 0 keeps all of them.

    >>> _num_within(100, 50, 40), _num_within(0, 50, 40)
    (3, 40)
    """
    return min(saved, -(-window // every) + 1) if window else saved
