"""Losses, gradients and weights that are no numbers: what was trained on then, and what to do."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from wangen.generator.errors import WRONG_USAGE, WangenError
from wangen.runtime.training import checkpoint
from wangen.runtime.training.run import Run


def refuse_not_finite(record: Mapping[str, Any], run: Run) -> None:
    """Stop at the first number that is none.

    Args:
        record: of a step, as `StepResult` has it.
        run: that it is of.

    Raises:
        WangenError: the items, their timesteps and the last good state.
    """
    items = [
        f"{name} at timestep {1000 * sigma:.0f}" for name, sigma in zip(record["names"], record["sigmas"], strict=True)
    ]
    bad = [item for item, loss in zip(items, record["losses"], strict=True) if not math.isfinite(loss)]
    if not bad and math.isfinite(record["grad_norm"]):
        return
    what = "loss" if bad else "gradient"
    named = ", ".join(bad or items)
    last, again = _last_good(run)
    first = ", and at --dit, which may be damaged" if record["step"] == 1 else ""
    exact = "" if run.plan.options.mixed_precision == "no" else " or use --mixed_precision no"
    raise WangenError(f"the {what} is not finite at step {record['step']}, on {named}; {last}",
                      cure=f"look at these items{first}; lower --learning_rate{exact}{again}",
                      exit_code=_exit_code(run))  # fmt: skip


def require_finite_weights(run: Run) -> None:
    """Refuse to save what is trained, or its average, where it is broken: the state before it is the one to keep.

    An optimizer can break weights in a step whose loss and gradient are numbers.

    Raises:
        WangenError: the last good state, and what to do.
    """
    # A norm of this kind needs no room, which a device that was just full has not.
    broken = not all(
        torch.linalg.vector_norm(numbers.detach(), math.inf).isfinite()
        for trainee in run.trainees
        for numbers in (*trainee.optimization.flat.weights, *(trainee.ema.weights().values() if trainee.ema else ()))
        if numbers.numel()
    )
    if run.ranks.any(broken) if run.is_sharded else broken:  # what is not in parts is the same in all
        last, again = _last_good(run)
        raise WangenError(f"the weights are not finite after step {run.step}, and are not saved; {last}",
                          cure=f"lower --learning_rate, or take other --optimizer_args{again}",
                          exit_code=_exit_code(run))  # fmt: skip


def _exit_code(run: Run) -> int:
    """Of several processes one with which no launcher starts them again: the same steps would come to the same."""
    return WRONG_USAGE if run.ranks.count > 1 else 1


def _last_good(run: Run) -> tuple[str, str]:
    """Which state to go on from, and how."""
    newest = None if run.begins_anew else checkpoint.newest_known(run.plan.states)
    if newest:
        return f"the last good state is {newest}", ", with --resume_changed to go on from that state, or with --fresh"
    return "no state was saved yet", ", and start again"
