"""A training run in memory: for each expert its transformer, adapter, optimizer and averages."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from wangen.runtime.memory.swap import BlockSwap
from wangen.runtime.models import Family, VelocityModel
from wangen.runtime.training.ema import Ema
from wangen.runtime.training.optim import Optimization
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.ranks import Ranks

if TYPE_CHECKING:
    from wangen.runtime.training.sharded import ShardedWeights
    from wangen.runtime.training.sharded_state import ShardedStates


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
        sharded: the weights, where all train and each process holds a part; `parameters` are then its own parts.
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
    sharded: "ShardedWeights | None" = None
    pairs: list[tuple[torch.Tensor, torch.Tensor, float]] = field(default_factory=list)
    step: int = 0

    @property
    def num_trained(self) -> int:
        """The numbers that are trained, in all processes together."""
        if self.sharded:
            return self.sharded.num_weights
        return sum(parameter.numel() for parameter in self.parameters.values())


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
        begins_anew: the states of an earlier run are there until it saves its first one (`--fresh`).
        is_updating: weights, optimizer and averages are being changed, and are of no step.
        facts: small results that survive a restart.
        states_in_parts: writes its states, where its weights are in parts.
        active: the number of the trainee that is on the device; None before the first.
    """

    plan: Plan
    kind: Family
    device: torch.device
    trainees: list[Trainee]
    ranks: Ranks = field(default_factory=Ranks)
    saved_step: int = -1
    begins_anew: bool = False
    is_updating: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    states_in_parts: "ShardedStates | None" = None
    active: int | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a part of what is trained, so that all have to save."""
        return any(trainee.sharded for trainee in self.trainees)

    @property
    def step(self) -> int:
        """Optimizer steps done, of all experts together."""
        return sum(trainee.step for trainee in self.trainees)

    @property
    def num_steps(self) -> int:
        """Optimizer steps at the end of the run: those done and those to do."""
        return self.step + self.plan.num_left([trainee.step for trainee in self.trainees])

    def activate(self, number: int) -> Trainee:
        """The trainee of that number, on the device; with `--offload_inactive_dit` the others leave it first."""
        if number != self.active:
            if self.active is not None and self.plan.options.offload_inactive_dit:
                self.trainees[self.active].place.park()
            self.active = None  # so that one for which there is no room now is tried again
            self.trainees[number].place.unpark()
            self.active = number
        return self.trainees[number]
