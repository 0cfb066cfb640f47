"""Parameters, gradients and optimizers that several tests of the optimizers share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wangen.generator.steps import Train
from wangen.runtime.randomness import generator_for
from wangen.runtime.training.optim import Optimization

CPU = torch.device("cpu")
SHAPES = {
    "blocks.0.q.lora_A.default.weight": (4, 33),
    "blocks.0.q.lora_B.default.weight": (70, 4),
    "blocks.1.q.lora_A.default.weight": (16, 300),  # large enough for an 8-bit state, and no whole number of blocks
    "blocks.1.q.lora_B.default.weight": (300, 16),
    "blocks.1.q.lora_magnitude_vector.default.weight": (7,),
}


def options(**changes: Any) -> Train:
    folder = Path("folder")
    base = Train(dataset_config=folder / "a.toml", dit=folder / "dit", output_dir=folder, output_name="lora")
    return replace(base, **{"learning_rate": 1e-2, **changes})


def parameters() -> dict[str, torch.nn.Parameter]:
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator_for("weights", name)))
        for name, shape in SHAPES.items()
    }


def add_gradients(named: dict[str, torch.nn.Parameter], step: int) -> None:
    """A backward pass whose gradient is drawn for the step; every other one is too small to be clipped."""
    scale = 0.001 if step % 2 else 3.0
    loss = sum(
        (parameter * torch.randn(parameter.shape, generator=generator_for("gradient", name, step))).sum() * scale
        for name, parameter in named.items()
    )
    loss.backward()  # type: ignore[union-attr]


def train(optimization: Optimization, first: int, last: int) -> None:
    for step in range(first, last):
        optimization.zero_grad()
        add_gradients(optimization.flat.parameters, step)
        optimization.clip(1.0)
        optimization.step(1 / (1 + step), step)


def weights(named: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named.items()}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


class Counting(torch.optim.SGD):
    """Counts in its group, like Prodigy and the schedule-free optimizers, and looks at what it has counted."""

    def __init__(self, params: Any, lr: float, growth: float = 0.5) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["d"], group["history"], group["growth"] = 1.0, torch.zeros(2), growth

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] += group["growth"]
            group["history"] = group["history"].roll(1) + group["d"]
            group["lr"] *= group["d"] + float(group["history"][0])
        super().step()


class ScheduleFree(torch.optim.SGD):
    """Evaluates at an average, in the manner of the schedulefree package; its way there and back rounds."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["train_mode"] = False

    def train(self) -> None:
        self._lerp(-1.0, True)

    def eval(self) -> None:
        self._lerp(0.5, False)

    @torch.no_grad()
    def _lerp(self, weight: float, mode: bool) -> None:
        if self.param_groups[0]["train_mode"] != mode:
            for group in self.param_groups:
                group["train_mode"] = mode
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.param_groups[0]["train_mode"]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["z"] = state.get("z", p.detach()) - 2 * group["lr"] * p.grad
        super().step()


class ByHeart(torch.optim.SGD):
    """Keeps what it counts outside its state."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] *= self.count
        super().step()


class Replaces(torch.optim.SGD):
    """Gives its parameters new storage."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


class Hoards(torch.optim.SGD):
    """Keeps what is neither tensor nor number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["losses"] = [1.0]
        super().step()


class Lookahead(ByHeart):
    """Keeps a count outside its state that matters at every fifth step only."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] *= 1 + (self.count % 5 == 0)
        torch.optim.SGD.step(self)


class Packs(torch.optim.SGD):
    """Keeps the averages of large matrices as something else than a tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.numel() >= 4096:
                    self.state[p]["packed"] = [p.numel()]
        super().step()


class Matrices(torch.optim.SGD):
    """Takes nothing but vectors and matrices."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(p.ndim > 2 for group in self.param_groups for p in group["params"]):
            raise NotImplementedError("only vectors and matrices")
        super().step()


class Strange(torch.optim.SGD):
    """Fails with an error of its own."""

    class NoClosureError(Exception):
        pass

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise self.NoClosureError("step wants a closure")


class Draws(torch.optim.SGD):
    """Draws from PyTorch's global generator, in the manner of those that sample a basis."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)
        super().step()


OTHERS = (Counting, ScheduleFree, ByHeart, Replaces, Hoards, Lookahead, Packs, Matrices, Strange, Draws)

RESUMED = [
    {"optimizer_type": "AdamW"},
    {"optimizer_type": "AdamW", "loraplus_lr_ratio": 4.0},
    {"optimizer_type": "AdamW", "optimizer_args": ("amsgrad=True", "betas=0.9,0.99")},
    {"optimizer_type": "AdamW", "optimizer_args": ("foreach=True",)},
    {"optimizer_type": "Adafactor"},
    {"optimizer_type": "Adafactor", "optimizer_args": ("beta1=0.9", "scale_parameter=True")},
    {"optimizer_type": "Adafactor", "optimizer_args": ("relative_step=True", "warmup_init=True")},
    {"optimizer_type": "torch.optim.Adafactor"},
    {"optimizer_type": "sgd", "optimizer_args": ("momentum=0.9",), "loraplus_lr_ratio": 4.0},
    {"optimizer_type": "torch.optim.RAdam"},
    {"optimizer_type": "others.Counting"},
    {"optimizer_type": "others.ScheduleFree"},
    {"optimizer_type": "others.Matrices"},
    {"optimizer_type": "others.Draws"},
]
