"""What stays of the files and training states that a run saves on the way, counted as musubi-tuner counts."""

from dataclasses import dataclass

from wangen.generator.cache_sizes import width_of
from wangen.generator.memory import moment_bytes
from wangen.generator.steps import Train


@dataclass(frozen=True)
class Window:
    """What is saved on the way under one of two flags, and how much of it is kept.

    Attributes:
        every: steps between two savings; 0 saves nothing.
        span: the last so many steps are kept, and what lies just as far back; 0 keeps all.
    """

    every: int
    span: int

    def keeps(self, saved: int, step: int) -> bool:
        """Whether what was saved at one step is still kept at another."""
        return not self.span or saved >= step - self.span

    def num_kept(self, num_steps: int) -> int:
        """At most how much lies there at once in a run of so many steps; the oldest goes after the newest came.

        >>> Window(every=50, span=100).num_kept(2000), Window(every=50, span=0).num_kept(2000)
        (4, 39)
        """
        saved = (num_steps - 1) // self.every if self.every else 0
        return min(saved, self.span // self.every + 2) if self.span and self.every else saved


def windows(options: Train, epoch: int, *, states: bool = False) -> tuple[Window, Window]:
    """Those of `--save_every_n_steps` and of `--save_every_n_epochs`.

    `--save_last_n_steps N` keeps what is at most N steps old, `--save_last_n_epochs N` the last N of what is saved
    every so many epochs. States have the same windows unless they are given their own.

    Args:
        options: of training.
        epoch: optimizer steps of an epoch.
        states: those of training states, in place of the files'.
    """
    steps, epochs = options.save_last_n_steps or 0, options.save_last_n_epochs or 0
    if states:
        steps, epochs = options.save_last_n_steps_state or steps, options.save_last_n_epochs_state or epochs
    every = (options.save_every_n_epochs or 0) * epoch
    return Window(options.save_every_n_steps or 0, steps), Window(every, max(epochs * every - 1, 0))


def has_state_windows(options: Train) -> bool:
    """Whether kept training states have windows of their own; else each goes when its LoRA does."""
    return bool(options.save_last_n_steps_state or options.save_last_n_epochs_state)


def saved_bytes(options: Train, trained: int) -> tuple[int, int]:
    """Of a training state (weights, averages and what the optimizer keeps), and of a saved file in all its layouts,
    with averages.

    Args:
        options: of training.
        trained: numbers that are trained.
    """
    averages = options.ema_decay is not None
    layouts = len(options.lora_layout) if options.train_mode == "lora" else 1
    state = (4 + moment_bytes(options) + 4 * averages) * trained
    return state, width_of(options.save_precision) * trained * (1 + averages) * layouts


def most_bytes(options: Train, epoch: int, num_steps: int, sizes: tuple[int, int]) -> int:
    """At most what lies there of states and files of these sizes.

    Two training states lie side by side while one replaces the other, and so do two files of one name.
    """
    num_files, num_states = num_kept(options, epoch, num_steps)
    state, file = sizes
    return (2 + num_states) * state + (2 + options.keep_best + num_files) * file


def num_kept(options: Train, epoch: int, num_steps: int) -> tuple[int, int]:
    """At most how many files of an expert, and how many training states, the flags keep on the way.

    Args:
        options: of training.
        epoch: optimizer steps of an epoch.
        num_steps: of the run.
    """
    files = sum(
        min(window.num_kept(num_steps), (options.keep_last or num_steps) + 1) for window in windows(options, epoch)
    )
    most = num_steps if has_state_windows(options) else (options.keep_last or num_steps) + 1
    states = min(most, sum(window.num_kept(num_steps) for window in windows(options, epoch, states=True)))
    return files, states if options.save_state else 0
