"""An optimizer's state: exact to resume, by parameter, refused where it is another's."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from optimizers import CPU, RESUMED, SHAPES, assert_equal, options, parameters, train, weights

from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import Train
from wangen.generator.train_values import OPTIMIZERS
from wangen.runtime.safetensors_file import write
from wangen.runtime.training.optim import Optimization, try_out

pytest_plugins = ("optimizer_fixtures",)


def resumed(settings: Train, optimization: Optimization, folder: Path) -> Optimization:
    """The same in a new process: fresh parameters, the state through its files."""
    from safetensors.torch import load_file

    tensors, numbers = optimization.state()
    write(folder / "optimizer.safetensors", tensors, {})
    write(folder / "adapter.safetensors", weights(optimization.flat.parameters), {})
    fresh = Optimization(settings, {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})
    fresh.flat.load(load_file(folder / "adapter.safetensors"), "state")
    fresh.load(load_file(folder / "optimizer.safetensors"), numbers, "state")
    return fresh


def expect_exact_resume(settings: Train, folder: Path) -> None:
    """Five steps and seven after a restart end with the bytes of twelve, in the weights and in the state."""
    whole, half = Optimization(settings, parameters()), Optimization(settings, parameters())
    train(whole, 0, 12)
    train(half, 0, 5)
    rest = resumed(settings, half, folder)
    train(rest, 5, 12)
    assert_equal(weights(rest.flat.parameters), weights(whole.flat.parameters))
    (tensors, numbers), (other_tensors, other_numbers) = rest.state(), whole.state()
    assert_equal(tensors, other_tensors)
    assert numbers == other_numbers
    start = parameters()
    assert all(not torch.equal(whole.flat.parameters[name], start[name]) for name in SHAPES)


@pytest.mark.parametrize("changes", RESUMED, ids=lambda c: "-".join(map(str, c.values())))
def test_a_resumed_run_ends_with_the_same_bytes(changes: dict[str, Any], dotted: ModuleType, tmp_path: Path) -> None:
    expect_exact_resume(options(**changes), tmp_path)


INSTALLED = ["bitsandbytes.optim.AdamW8bit", *sorted({path for path in OPTIMIZERS.values() if "." in path})]


@pytest.mark.parametrize("path", INSTALLED)
@pytest.mark.filterwarnings("default")
def test_optimizers_of_other_packages_resume_exactly(path: str, tmp_path: Path) -> None:
    pytest.importorskip(path.split(".")[0])
    settings = options(optimizer_type=path, learning_rate=1.0 if "Prodigy" in path else 1e-2)
    try_out(settings, CPU)
    expect_exact_resume(settings, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_torchaos_8bit_adamw_resumes_exactly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "wangen.runtime.training.optimizer_class.find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    settings = options(optimizer_type="AdamW8bit")
    assert Optimization(settings, parameters()).name == "torchao.AdamW8bit"
    expect_exact_resume(settings, tmp_path)


def test_the_state_does_not_tell_how_the_parameters_lay() -> None:
    """One buffer, or two of them for LoRA+: the state's parts are the same."""
    one = Optimization(options(), parameters())
    train(one, 0, 3)
    tensors, numbers = one.state()
    assert {name.split("/")[1] for name in tensors} == {"step", "exp_avg", "exp_avg_sq"}
    assert tensors["blocks.0.q.lora_B.default.weight/exp_avg"].shape == SHAPES["blocks.0.q.lora_B.default.weight"]
    split = Optimization(options(loraplus_lr_ratio=1.0), parameters())
    split.load(tensors, numbers, "state")
    assert_equal(split.state()[0], tensors)
    split.flat.load(weights(one.flat.parameters), "state")
    for other in (one, split):
        train(other, 3, 4)
    for name, parameter in one.flat.parameters.items():  # the norm of the gradient is summed in another order
        torch.testing.assert_close(split.flat.parameters[name], parameter, rtol=1e-6, atol=1e-7)


def test_changed_arguments_win_over_the_saved_state(tmp_path: Path) -> None:
    """What the optimizer counts is resumed; what the command line sets is not."""
    trained = Optimization(options(), parameters())
    train(trained, 0, 2)
    changed = options(optimizer_args=("weight_decay=0.5",), learning_rate=0.5)
    fresh = resumed(changed, trained, tmp_path)
    assert fresh.optimizer.param_groups[0]["weight_decay"] == 0.5
    fresh.step(0.1)
    assert fresh.rates() == {"lr": 0.05}


def test_the_state_of_another_optimizer_is_refused_unless_told(caplog: pytest.LogCaptureFixture) -> None:
    trained = Optimization(options(), parameters())
    train(trained, 0, 2)
    with pytest.raises(WangenError, match=r"made with the optimizer torch\.AdamW, here it is torch\.SGD"):
        Optimization(options(optimizer_type="SGD"), parameters()).load(*trained.state(), "state")
    caplog.set_level("WARNING", "wangen")
    other = Optimization(options(optimizer_type="SGD", resume_changed=True), parameters())
    other.load(*trained.state(), "state")
    assert "start anew" in caplog.text
    train(other, 0, 1)


@pytest.mark.parametrize("missing", ["blocks.0.q.lora_A.default.weight/exp_avg", None])
def test_the_state_of_another_adapter_is_refused(missing: str | None) -> None:
    trained = Optimization(options(), parameters())
    train(trained, 0, 1)
    tensors, numbers = trained.state()
    if missing:
        del tensors[missing]
    else:
        tensors["blocks.0.q.lora_A.default.weight/exp_avg"] = torch.zeros(8, 33)
    with pytest.raises(WangenError, match="optimizer's state is of other") as caught:
        Optimization(options(), parameters()).load(tensors, numbers, "the state")
    assert caught.value.where == "the state"
    with pytest.raises(WangenError, match="other modules or another rank"):
        trained.flat.load({"blocks.0.q.lora_A.default.weight": torch.zeros(4, 33)}, "the state")


def test_norms_are_not_scaled_where_other_weights_are_saved(dotted: ModuleType) -> None:
    given = options(optimizer_type="others.ScheduleFree", scale_weight_norms=1.0)
    with pytest.raises(UsageError, match=r"--scale_weight_norms: others\.ScheduleFree averages weights"):
        try_out(given, torch.device("cpu"))
    try_out(options(optimizer_type="others.ScheduleFree"), torch.device("cpu"))


def test_evaluating_shows_a_schedule_free_average_and_leaves_no_trace(dotted: ModuleType) -> None:
    seen, blind = (Optimization(options(optimizer_type="others.ScheduleFree"), parameters()) for _ in range(2))
    train(seen, 0, 3)
    before = weights(seen.flat.parameters)
    with seen.evaluating():
        assert not torch.equal(next(iter(seen.flat.parameters.values())), next(iter(before.values())))
    assert_equal(weights(seen.flat.parameters), before)
    train(seen, 3, 5)
    train(blind, 0, 5)
    assert_equal(weights(seen.flat.parameters), weights(blind.flat.parameters))
    plain = Optimization(options(), parameters())
    with plain.evaluating():
        assert_equal(weights(plain.flat.parameters), weights(parameters()))
