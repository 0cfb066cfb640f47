"""A training run in memory: for each expert its transformer, adapter, optimizer and averages."""

from dataclasses import dataclass, field
from typing import Any

import torch

from wangen.runtime.memory.swap import BlockSwap
from wangen.runtime.models import Family, VelocityModel
from wangen.runtime.training.ema import Ema
from wangen.runtime.training.optim import Optimization
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.ranks import Ranks


@dataclass
class Trainee:
    """One transformer that is being trained.

    Attributes:
        plan: what was known before.
        transformer: the base with the adapter.
        place: puts its frozen weights where they are needed.
        model: predicts velocities with it.
        parameters: the trainable parameters by name, sorted.
        optimization: the optimizer over them.
        ema: their average, when one is kept.
        pairs: for `--scale_weight_norms` the factors of every module and what their product is scaled by.
        step: optimizer steps done.
    """

    plan: ExpertPlan
    transformer: Any
    place: BlockSwap
    model: VelocityModel
    parameters: dict[str, torch.nn.Parameter]
    optimization: Optimization
    ema: Ema | None = None
    pairs: list[tuple[torch.Tensor, torch.Tensor, float]] = field(default_factory=list)
    step: int = 0


@dataclass
class Run:
    """A run in memory.

    Attributes:
        plan: what was known before.
        kind: the architecture's module.
        device: where.
        trainees: in the order of `plan.experts`.
        ranks: the processes that train together.
        saved_step: the step of the newest training state on disk, -1 for none.
        facts: small results that survive a restart.
        active: the number of the trainee that is on the device; None before the first.
    """

    plan: Plan
    kind: Family
    device: torch.device
    trainees: list[Trainee]
    ranks: Ranks = field(default_factory=Ranks)
    saved_step: int = -1
    facts: dict[str, Any] = field(default_factory=dict)
    active: int | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done, of all experts together."""
        return sum(trainee.step for trainee in self.trainees)

    def activate(self, number: int) -> Trainee:
        """The trainee of that number, on the device; with `--offload_inactive_dit` the others leave it first."""
        if number != self.active:
            if self.active is not None and self.plan.options.offload_inactive_dit:
                self.trainees[self.active].place.park()
            self.trainees[number].place.unpark()
            self.active = number
        return self.trainees[number]
