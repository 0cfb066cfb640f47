"""Optimizer and learning-rate schedule, from the flags."""

import ast
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from wangen.generator.errors import UsageError
from wangen.generator.steps import Train


def make_optimizer(options: Train, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `--optimizer_type` with `--optimizer_args`.

    Raises:
        UsageError: no such class, its package is missing, or an argument does not fit.
    """
    module, _, name = options.optimizer_type.rpartition(".")
    try:
        cls = getattr(import_module(module or "torch.optim"), name)
    except (ImportError, AttributeError):
        cure = f"pip install {module.split('.')[0]}" if module else "give AdamW or a dotted path"
        raise UsageError(f"there is no optimizer {options.optimizer_type}", cure=cure) from None
    try:
        optimizer = cls(parameters, lr=options.learning_rate, **_arguments(options.optimizer_args))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{options.optimizer_type}: {error}", where="--optimizer_args") from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{options.optimizer_type} is no torch optimizer")
    return optimizer


def make_schedule(options: Train, num_steps: int) -> Callable[[int], float]:
    """The factor on the learning rate at each step, a pure function of the step; diffusers' own schedules.

    `constant` with a warm-up is `constant_with_warmup`.

    Raises:
        UsageError: the warm-up is no number, share or percentage.
    """
    from diffusers.optimization import get_scheduler

    warmup = warmup_steps(options.lr_warmup_steps, num_steps)
    name = "constant_with_warmup" if options.lr_scheduler == "constant" and warmup else options.lr_scheduler
    probe = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=options.learning_rate)
    schedule = get_scheduler(
        name,
        probe,
        num_warmup_steps=warmup,
        num_training_steps=num_steps,
        num_cycles=options.lr_scheduler_num_cycles,
        power=options.lr_scheduler_power,
    )
    factor: Callable[[int], float] = schedule.lr_lambdas[0]
    return factor


def depends_on_length(options: Train) -> bool:
    """Whether the learning rate of a step depends on how long the run is."""
    share = options.lr_warmup_steps.endswith("%") or "." in options.lr_warmup_steps
    return share or not options.lr_scheduler.startswith("constant")


def warmup_steps(text: str, num_steps: int) -> int:
    """Steps of warm-up: `100` is steps, `0.05` or `5%` a share of the run.

    >>> warmup_steps("100", 400), warmup_steps("0.05", 400), warmup_steps("5%", 400)
    (100, 20, 20)
    """
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise UsageError(f"--lr_warmup_steps takes steps, a share or a percentage, got {text!r}") from None
    share = value / 100 if text.endswith("%") else value if 0 < value < 1 else None
    if value < 0 or (share is not None and share > 1):
        raise UsageError(f"--lr_warmup_steps {text} is outside the run")
    return int(value) if share is None else round(share * num_steps)


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """`weight_decay=0.01 betas=0.9,0.99` -> keyword arguments; values are Python literals or plain words."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--optimizer_args takes key=value, got {word!r}")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values
