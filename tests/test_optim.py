"""Optimizers: equal to torch's arithmetic, and refused early where they cannot work."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from optimizers import CPU, RESUMED, add_gradients, assert_equal, options, parameters, train, weights
from transformers.optimization import Adafactor

from wangen.generator.commands import parse
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import Train
from wangen.runtime.training.flat import ALIGNMENT, FlatParameters
from wangen.runtime.training.optim import Optimization, try_out

pytest_plugins = ("optimizer_fixtures",)


@pytest.mark.parametrize("ratio", [None, 16.0])
@pytest.mark.parametrize(("name", "cls"), [("AdamW", torch.optim.AdamW), ("Adam", torch.optim.Adam)])
def test_flat_adamw_equals_torchs_own_on_every_tensor(name: str, cls: Any, ratio: float | None) -> None:
    ours = Optimization(options(optimizer_type=name, optimizer_args=("weight_decay=0.1",), loraplus_lr_ratio=ratio),
                        parameters())  # fmt: skip
    plain = parameters()
    reference = cls(
        [{"params": [p], "lr": 1e-2 * (ratio or 1) if "lora_B" in n else 1e-2} for n, p in plain.items()],
        weight_decay=0.1, foreach=False, fused=False,
    )  # fmt: skip
    rates = [group["lr"] for group in reference.param_groups]
    for step in range(12):
        ours.zero_grad()
        reference.zero_grad(set_to_none=True)
        add_gradients(ours.flat.parameters, step)
        add_gradients(plain, step)
        norm = ours.clip(1.0)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.values(), 1.0), rtol=1e-6, atol=0)
        for group, rate in zip(reference.param_groups, rates, strict=True):
            group["lr"] = rate / (1 + step)
        ours.step(1 / (1 + step))
        reference.step()
    for key, parameter in plain.items():
        torch.testing.assert_close(ours.flat.parameters[key], parameter, rtol=2e-6, atol=2e-7)


def test_the_flat_buffers_are_the_parameters() -> None:
    optimization = Optimization(options(), parameters())
    start = parameters()
    assert_equal(weights(optimization.flat.parameters), weights(start))  # moving keeps the values
    add_gradients(optimization.flat.parameters, 0)
    add_gradients(optimization.flat.parameters, 2)  # accumulates
    total = sum(float(gradient.square().sum()) for gradient in optimization.flat.gradients)
    add_gradients(start, 0)
    add_gradients(start, 2)
    expected = sum(float(parameter.grad.square().sum()) for parameter in start.values() if parameter.grad is not None)
    assert math.isclose(total, expected, rel_tol=1e-5)
    assert all(place.start % ALIGNMENT == 0 for place in optimization.flat.places.values())
    optimization.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in optimization.flat.parameters.values())


def test_clipping_off_leaves_the_gradient_and_still_tells_its_norm() -> None:
    optimization = Optimization(options(), parameters())
    add_gradients(optimization.flat.parameters, 0)
    before = [gradient.clone() for gradient in optimization.flat.gradients]
    norm = optimization.clip(0)
    assert norm > 10
    assert all(map(torch.equal, before, optimization.flat.gradients))
    assert optimization.clip(1.0) == norm
    assert torch.isclose(optimization.clip(0), torch.tensor(1.0), rtol=1e-5)
    optimization.clip(4.0)  # above the norm, which stays
    assert torch.isclose(optimization.clip(0.25), torch.tensor(1.0), rtol=1e-5)
    assert torch.isclose(optimization.clip(0), torch.tensor(0.25), rtol=1e-5)


def test_the_rate_that_is_logged_is_the_one_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prodigy and its like raise theirs for the next step while they take one."""
    optimization = Optimization(options(learning_rate=1.0), parameters())
    (group, *_) = optimization.optimizer.param_groups
    group["d"] = 1e-3
    monkeypatch.setattr(optimization.optimizer, "step", lambda: group.update(d=5e-3))
    for used in (1e-3, 5e-3):
        optimization.step(0.5)
        assert optimization.rates()["d*lr"] == 0.5 * used


def test_an_argument_of_that_name_is_no_estimate_and_a_warm_up_of_its_own_is_logged(monkeypatch):
    threshold = Optimization(options(optimizer_type="torch.optim.Adafactor", optimizer_args=("d=2.0",)), parameters())
    for gradient in threshold.flat.gradients:
        gradient.fill_(1.0)
    threshold.step(1.0)
    assert threshold.rates() == {"lr": 1e-2}
    free = Optimization(options(), parameters())
    (group, *_) = free.optimizer.param_groups
    monkeypatch.setattr(free.optimizer, "step", lambda: group.update(scheduled_lr=2e-3))
    free.step(1.0)
    assert free.rates() == {"lr": 2e-3}


def test_parameters_that_were_replaced_are_noticed() -> None:
    for replace in (lambda p: setattr(p, "data", p.data.clone()), lambda p: setattr(p, "grad", None),
                    lambda p: setattr(p, "grad", p.grad.clone())):  # fmt: skip
        optimization = Optimization(options(), parameters())
        train(optimization, 0, 1)
        replace(optimization.flat.parameters["blocks.0.q.lora_B.default.weight"])  # as Module.to and zero_grad do
        with pytest.raises(AssertionError, match="replaced"):
            optimization.step(1.0)


def step_both(
    ours: Optimization, reference: torch.optim.Optimizer, plain: dict[str, torch.nn.Parameter], num_steps: int
) -> None:
    """Steps of an optimizer and of another one on parameters of its own, with the same gradients."""
    for step in range(num_steps):
        ours.zero_grad()
        reference.zero_grad()
        add_gradients(ours.flat.parameters, step)
        add_gradients(plain, step)
        ours.step(1.0)
        reference.step()


@pytest.mark.filterwarnings("default")
def test_joined_8bit_adamw_equals_bitsandbytes_on_every_tensor() -> None:
    library = pytest.importorskip("bitsandbytes")
    ours, plain = Optimization(options(optimizer_type="AdamW8bit"), parameters()), parameters()
    assert ours.name == "bitsandbytes.AdamW8bit"
    reference = library.optim.AdamW8bit(list(plain.values()), lr=1e-2)
    step_both(ours, reference, plain, 6)
    assert_equal(weights(ours.flat.parameters), weights(plain))
    state, _ = ours.state()
    assert state["blocks.1.q.lora_A.default.weight/state1"].dtype == torch.uint8
    assert state["blocks.0.q.lora_A.default.weight/state1"].dtype == torch.float32  # too small to be quantised


def test_8bit_adamw_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wangen.runtime.training.optimizer_class.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        try_out(options(optimizer_type="AdamW8bit"), CPU)
    assert "bitsandbytes or torchao" in caught.value.found
    assert "pip install bitsandbytes" in caught.value.cure


def test_lora_plus_raises_what_starts_at_zero() -> None:
    names = ["a.lora_A.x.weight", "a.lora_B.x.weight", "b.lora_A.x.weight", "b.lora_B.x.weight"]
    named = {name: torch.nn.Parameter(torch.zeros(2, 2)) for name in names}
    optimization = Optimization(options(optimizer_type="SGD", loraplus_lr_ratio=16.0), named)
    for parameter in named.values():
        assert parameter.grad is not None
        parameter.grad.fill_(1.0)
    optimization.step(0.5)
    moved = {name: -round(parameter[0, 0].item() / 1e-2, 3) for name, parameter in named.items()}
    assert moved == dict(zip(names, [0.5, 8.0, 0.5, 8.0], strict=True))
    assert optimization.rates() == {"lr": 0.005, "lr_loraplus": 0.08}
    with pytest.raises(UsageError, match="nothing here starts at zero"):
        Optimization(options(loraplus_lr_ratio=16.0), {"proj.weight": torch.nn.Parameter(torch.zeros(2))})


@pytest.mark.parametrize("spelled", ["adafactor", "AdaFactor", "ADAFACTOR"])
def test_adafactor_in_any_case_is_not_torch_s_own(spelled: str) -> None:
    words = ["--optimizer_type", spelled, "--output_dir", "out", "--output_name", "x", "--dataset_config", "a"]
    assert parse(Train, words).optimizer_type == "Adafactor"
    assert type(Optimization(options(optimizer_type=spelled), parameters()).optimizer) is Adafactor


def test_an_optimizer_of_another_package_has_a_short_name() -> None:
    words = ["--optimizer_type", "Prodigy", "--output_dir", "out", "--output_name", "x", "--dataset_config", "a"]
    assert parse(Train, words).optimizer_type == "prodigyopt.Prodigy"


def test_adafactor_takes_the_learning_rate_unless_told_otherwise() -> None:
    ours = Optimization(options(optimizer_type="Adafactor"), parameters())
    plain = parameters()
    reference = Adafactor([plain[name] for name in sorted(plain)], lr=1e-2, scale_parameter=False, relative_step=False)
    step_both(ours, reference, plain, 3)
    assert_equal(weights(ours.flat.parameters), {name: p.detach() for name, p in sorted(plain.items())})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer_type": "NoSuch"}, "there is no optimizer NoSuch"),
        (
            {"optimizer_type": "no_such_package.Optimizer"},
            "or install the package no_such_package if that is what you mean",
        ),
        ({"optimizer_type": "torch.optim.no_such.Optimizer"}, "mend the path"),
        ({"optimizer_type": ".others.Counting"}, "mend the path"),
        ({"optimizer_type": "others.NoSuch"}, "there is no optimizer others.NoSuch"),
        ({"optimizer_type": "torch.nn.Linear"}, "no torch optimizer"),
        ({"optimizer_type": "lr_scheduler"}, "no torch optimizer"),
        ({"optimizer_type": "LBFGS"}, "cannot take a step"),
        ({"optimizer_type": "Muon", "dora": True}, "choose another class"),
        ({"optimizer_type": "Muon", "train_mode": "full"}, "choose another class"),
        ({"optimizer_type": "SparseAdam"}, "cannot take a step"),
        ({"optimizer_type": "others.ByHeart"}, "cannot be resumed exactly"),
        ({"optimizer_type": "others.Replaces"}, "replaces its parameters"),
        ({"optimizer_type": "others.Hoards"}, "keeps a list"),
        ({"optimizer_type": "others.Lookahead"}, "cannot be resumed exactly"),
        ({"optimizer_type": "others.Packs"}, "keeps a list"),
        ({"optimizer_type": "others.Matrices", "train_mode": "full"}, "only vectors and matrices"),
        ({"optimizer_type": "others.Strange"}, "step wants a closure"),
        ({"optimizer_args": ("weight_decay",)}, "key=value"),
        ({"optimizer_args": ("speed=3",)}, "speed"),
        ({"optimizer_args": ("betas=2,3",)}, "beta"),
    ],
)
def test_what_cannot_work_is_refused_early(changes: dict[str, Any], words: str, dotted: ModuleType) -> None:
    with pytest.raises(WangenError) as caught:
        try_out(options(**changes), CPU)
    assert words in f"{caught.value.found} {caught.value.cure}"


@pytest.mark.parametrize("changes", RESUMED, ids=lambda c: "-".join(map(str, c.values())))
def test_what_works_is_not_refused(changes: dict[str, Any], dotted: ModuleType) -> None:
    try_out(options(**changes), CPU)


@pytest.mark.parametrize("word", ["False", "false", "FALSE"])
def test_words_for_no_mean_no(word: str) -> None:
    given = (f"relative_step={word}", f"scale_parameter={word}")
    ours = Optimization(options(optimizer_type="Adafactor", optimizer_args=given), parameters())
    usual = Optimization(options(optimizer_type="Adafactor"), parameters())
    for optimization in (ours, usual):
        train(optimization, 0, 3)
    assert_equal(weights(ours.flat.parameters), weights(usual.flat.parameters))


def test_flat_parameters_need_one_type() -> None:
    with pytest.raises(AssertionError):
        FlatParameters({"a": torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))}, [["a"]])


def test_a_rate_that_the_optimizer_holds_as_a_tensor_follows_the_schedule() -> None:
    """As torchao's do, and torch's own that are captured."""
    held, plain = (Optimization(options(), parameters()) for _ in range(2))
    for group in held.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    for one in (held, plain):
        train(one, 0, 3)
    assert held.rates()["lr"] == pytest.approx(plain.rates()["lr"]) == pytest.approx(1e-2 / 3)


def test_what_an_optimizer_draws_follows_from_the_seed_of_its_step_alone(dotted: ModuleType) -> None:
    found = []
    for seed, before in ((1, 7), (1, 8), (2, 7)):
        one = Optimization(options(optimizer_type="others.Draws"), parameters())
        with torch.random.fork_rng():
            torch.manual_seed(before)
            one.step(1.0, seed)
        found.append(one.flat.weights[0].clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_each_group_of_loraplus_logs_the_warm_up_that_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Optimization(options(loraplus_lr_ratio=4.0), parameters())
    first, second = free.optimizer.param_groups
    monkeypatch.setattr(free.optimizer, "step", lambda: (first.update(scheduled_lr=1e-3),
                                                         second.update(scheduled_lr=4e-3)))  # fmt: skip
    free.step(1.0)
    assert free.rates() == {"lr": 1e-3, "lr_loraplus": 4e-3}


def test_an_optimizer_that_forgets_something_of_one_group_alone_is_refused(dotted: ModuleType) -> None:
    class Forgets(torch.optim.SGD):
        count = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.count += 1
            self.param_groups[-1]["lr"] *= self.count
            super().step()

    dotted.Forgets = Forgets  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="cannot be resumed exactly"):
        try_out(options(optimizer_type="others.Forgets", loraplus_lr_ratio=4.0), CPU)
