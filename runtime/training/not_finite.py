"""Losses and gradients that are no numbers: what was trained on then, and what to do."""

import math
from collections.abc import Mapping
from typing import Any

from wangen.generator.errors import WangenError
from wangen.runtime.training import checkpoint
from wangen.runtime.training.plan import Plan


def refuse_not_finite(record: Mapping[str, Any], plan: Plan) -> None:
    """Stop at the first number that is none.

    Args:
        record: of a step, as `StepResult` has it.
        plan: of the run.

    Raises:
        WangenError: the items, their timesteps and the last good state.
    """
    bad = [
        f"{name} at timestep {1000 * sigma:.0f}"
        for name, sigma, loss in zip(record["names"], record["sigmas"], record["losses"], strict=True)
        if not math.isfinite(loss)
    ]
    if not bad and math.isfinite(record["grad_norm"]):
        return
    what = "loss" if bad else "gradient"
    named = ", ".join(bad or record["names"])
    newest = checkpoint.newest(plan.states)
    last = f"the last good state is {newest}" if newest else "no state was saved yet"
    first = ", and at --dit, which may be damaged" if record["step"] == 1 else ""
    exact = "" if plan.options.mixed_precision == "no" else " or use --mixed_precision no"
    again = ", with --resume_changed to go on from that state, or with --fresh" if newest else ", and start again"
    raise WangenError(f"the {what} is not finite at step {record['step']}, on {named}; {last}",
                      cure=f"look at these items{first}; lower --learning_rate{exact}{again}")  # fmt: skip
