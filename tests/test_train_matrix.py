"""Every way to save memory or time trains the same LoRA, and every kind of run goes on to the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_cases import EXPERTS, TRUTH, Cases, Changes, contents, cut_off, make_cases, make_ti2v, measured

from wangen.runtime import train
from wangen.runtime.training import checkpoint

pytestmark = pytest.mark.slow

pytest_plugins = ("optimizer_fixtures",)

SWAP: Changes = {"checkpointing": "full", "blocks_to_swap": 1}
DROPS: Changes = {"network_dropout": 0.3, "caption_dropout": 0.3}

GIVEN: Changes = {"task": "ti2v-5B", "condition_dropout": 0.4, "lora_targets": "attention"}

SAME: dict[str, Changes] = {
    "full checkpointing": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "offloaded": {"checkpointing": "full", "gradient_checkpointing_cpu_offload": True},
    "free block": {"checkpointing": "selective", "checkpointing_free_blocks": 1},
    "one block swapped": SWAP,
    "every block swapped through one buffer": {**SWAP, "blocks_to_swap": 2, "block_swap_ring_size": 1},
    "all at once": {
        "checkpointing": "selective", "blocks_to_swap": 1, "checkpointing_free_blocks": 1, "split_attn": True,
        "gradient_checkpointing_cpu_offload": True, "max_data_loader_n_workers": 3,
    },
    "items one by one": {"split_attn": True},
    "no thread": {"max_data_loader_n_workers": 0},
    "deterministic": {"deterministic": True},
}  # fmt: skip
CLOSE: dict[str, tuple[Changes, float]] = {
    "plain": ({"plain": True, "checkpointing": "full"}, 1e-4),
    "bf16": ({"mixed_precision": "bf16"}, 0.02),
    "fp8": ({"quantize": "fp8"}, 0.02),
    "int8": ({"quantize": "int8"}, 0.01),
    "nf4": ({"quantize": "nf4"}, 0.08),
}
"""How far the loss of a step may be from the plain run's, as a part of it."""

RESUMED: dict[str, Changes] = {
    "two experts, all kinds of chance, averages, validation": {
        **EXPERTS, **TRUTH, **DROPS, "ema_decay": 0.9, "gradient_accumulation_steps": 2, "num_timestep_buckets": 4,
        "noise_offset": 0.05, "loraplus_lr_ratio": 4.0, "scale_weight_norms": 0.5, "lr_scheduler": "cosine",
    },
    "every weight": {**TRUTH, "train_mode": "full", "ema_decay": 0.9, "learning_rate": 1e-4},
    "int8, swapped": {**SWAP, "quantize": "int8", "gradient_checkpointing_cpu_offload": True},
    "schedule-free": {**TRUTH, "optimizer_type": "others.ScheduleFree", "ema_decay": 0.9},
}  # fmt: skip
MORE_RESUMED: dict[str, Changes] = {
    **{f"adapter {name}": {**DROPS, **changes} for name, changes in {
        "dora": {"dora": True}, "rslora": {"rslora": True}, "swapped dora": {"dora": True, **SWAP},
        "ffn alone": {"lora_targets": "ffn"},
    }.items()},
    **{f"adapter {kind}": {"network_module": kind, "network_args": ("rank_dropout=0.2", "module_dropout=0.2"), **memory}
       for kind, memory in (("loha", {}), ("lokr", {"checkpointing": "full"}))},
    **{f"optimizer {name}": {"optimizer_type": name} for name in ("Adafactor", "SGD", "RMSprop", "NAdam", "Adagrad")},
    **{f"{name} of parts of the run": {"lr_scheduler": name, "lr_warmup_steps": "20%"} for name in (
        "linear", "cosine_with_restarts", "polynomial", "inverse_sqrt", "cosine_with_min_lr", "rex")},
    **{f"{form}, swapped, two experts": {**EXPERTS, **SWAP, "quantize": form} for form in ("fp8", "nf4")},
    "momentum": {"optimizer_type": "SGD", "optimizer_args": ("momentum=0.9", "nesterov=True")},
    "both experts on the device": {**EXPERTS, **TRUTH, "offload_inactive_dit": False},
    "swapped experts": {**EXPERTS, **TRUTH, **SWAP, "checkpointing": "selective"},
    "every weight of two experts": {**EXPERTS, **TRUTH, "train_mode": "full", "learning_rate": 1e-4},
    "every weight in bf16": {"train_mode": "full", "mixed_precision": "bf16", "checkpointing": "selective",
                             "pack": True, "gradient_accumulation_steps": 2, "learning_rate": 1e-4},
    "plain": {"plain": True, **DROPS}, "bf16": {"mixed_precision": "bf16", **DROPS},
    "stratified over uneven groups": {"num_timestep_buckets": 3, "gradient_accumulation_steps": 3},
    "packed": {**EXPERTS, **DROPS, "pack": True, "gradient_accumulation_steps": 3, "checkpointing": "selective"},
    "weighted": {"weighting_scheme": "sigma_sqrt", "timestep_sampling": "logsnr", "prior_loss_weight": 0.3},
}  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return make_cases(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def plain(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs without any saving of memory: of one transformer with dropouts, and of two experts."""
    folder = tmp_path_factory.mktemp("plain")
    train.run(cases.options(folder / "one", checkpointing="none", **DROPS))
    train.run(cases.options(folder / "two", checkpointing="none", **DROPS, **EXPERTS))
    train.run(cases.options(folder / "dora", checkpointing="none", dora=True, **DROPS))
    train.run(cases.options(folder / "bare", checkpointing="none"))
    return {name: folder / name for name in ("one", "two", "dora", "bare")}


def same_tensors(folder: Path, other: Path) -> bool:
    """Whether the trained files are the same but for their headers, which hold the flags."""
    assert contents(folder).keys() == contents(other).keys()
    pairs = [(load_file(folder / name), load_file(other / name)) for name in contents(other)]
    assert all(ours.keys() == theirs.keys() for ours, theirs in pairs)
    return all(torch.equal(ours[key], theirs[key]) for ours, theirs in pairs for key in theirs)


@pytest.mark.parametrize("name", SAME)
def test_saving_memory_changes_no_byte(cases: Cases, plain: dict[str, Path], tmp_path: Path, name: str):
    changes = {"checkpointing": "none", **DROPS, **SAME[name]}
    train.run(cases.options(tmp_path, **changes))
    assert same_tensors(tmp_path, plain["one"])


@pytest.mark.parametrize("targets", ["attention", "ffn"])
def test_swapped_blocks_whose_last_or_first_layers_have_no_adapter(cases: Cases, tmp_path: Path, targets: str):
    """The backward pass of a frozen layer needs its weight before anything asks for a recomputation."""
    for name, changes in {"plain": {"checkpointing": "none"}, "swapped": {**SWAP, "blocks_to_swap": 2}}.items():
        train.run(cases.options(tmp_path / name, max_train_steps=2, lora_targets=targets, **changes))
    assert same_tensors(tmp_path / "swapped", tmp_path / "plain")


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize(("kind", "given"), [("two", EXPERTS), ("dora", {"dora": True})])
def test_saving_memory_changes_no_byte_of_other_runs(
    cases: Cases, plain: dict[str, Path], tmp_path: Path, name: str, kind: str, given: Changes
):
    train.run(cases.options(tmp_path, **{"checkpointing": "none", **DROPS, **given, **SAME[name]}))
    assert same_tensors(tmp_path, plain[kind])


def test_where_the_idle_expert_waits_and_how_turns_are_taken_change_no_byte(
    cases: Cases, plain: dict[str, Path], tmp_path: Path
):
    for name, changes in {"device": {"offload_inactive_dit": False}, "turns": {"expert_turn_steps": 1}}.items():
        train.run(cases.options(tmp_path / name, **{"checkpointing": "none", **DROPS, **EXPERTS, **changes}))
        assert same_tensors(tmp_path / name, plain["two"]), name


@pytest.mark.parametrize("name", CLOSE)
def test_rounding_changes_the_loss_by_no_more_than_is_stated(
    cases: Cases, plain: dict[str, Path], tmp_path: Path, name: str
):
    changes, bound = CLOSE[name]
    train.run(cases.options(tmp_path, **{"checkpointing": "none", **changes}))
    ours, exact = losses(tmp_path), losses(plain["bare"])
    assert ours == pytest.approx(exact, rel=bound)
    assert name == "plain" or ours != exact  # with MKL the losses of the library's own modules are ours, bit by bit
    assert not same_tensors(tmp_path, plain["bare"])


def test_looking_changes_nothing_of_what_is_trained(cases: Cases, plain: dict[str, Path], tmp_path: Path):
    held_out = cases.config("held out", '[[datasets]]\nimage_directory = "@/others"\nresolution = [64, 64]\n'
                            'cache_directory = "@/cache"\n')  # fmt: skip
    truth = {**TRUTH, "validation_items": 0, "validation_config": held_out, "validate_every_n_steps": 1}
    train.run(cases.options(tmp_path, checkpointing="none", **DROPS, **EXPERTS, **truth))
    expected, found = contents(plain["two"]), contents(tmp_path)
    assert {name: found[name] for name in expected} == expected
    assert "lora_low_noise-best.safetensors" in found


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_is_cut_off_goes_on_to_the_same_bytes(cases: Cases, tmp_path: Path, dotted: ModuleType, name: str):
    cut_and_compare(cases, tmp_path, RESUMED[name], 5)


@pytest.mark.parametrize("name", MORE_RESUMED)
def test_more_kinds_of_runs_go_on_to_the_same_bytes(cases: Cases, tmp_path: Path, name: str):
    cut_and_compare(cases, tmp_path, MORE_RESUMED[name], 5)


@pytest.mark.parametrize("step", range(1, 7))
def test_wherever_it_is_cut_off(cases: Cases, tmp_path: Path, dotted: ModuleType, step: int):
    cut_and_compare(cases, tmp_path, RESUMED["two experts, all kinds of chance, averages, validation"], step)


def cut_and_compare(cases: Cases, folder: Path, changes: Changes, step: int) -> None:
    """Train to the end at once, and with a power cut after some steps: files and measured numbers are the same."""
    whole = cases.options(folder / "whole", max_train_steps=7, save_state_every_n_steps=2, **changes)
    train.run(whole)
    cut = replace(whole, output_dir=folder / "cut")
    cut_off(cut, step)
    report = train.run(cut)
    assert report.result["steps_this_run"] < 7 or step == 1
    assert contents(cut.output_dir) == contents(whole.output_dir)
    assert measured(cut.output_dir) == measured(whole.output_dir)


@pytest.fixture(scope="module")
def ti2v(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return make_ti2v(tmp_path_factory.mktemp("ti2v"))


def test_a_run_whose_first_frames_are_given_goes_on_to_the_same_bytes(ti2v: Cases, tmp_path: Path):
    cut_and_compare(ti2v, tmp_path, {**GIVEN, **TRUTH, **DROPS}, 5)


@pytest.mark.parametrize("name", ["none", "one block swapped", "every block swapped through one buffer"])
def test_packing_the_batches_of_a_step_changes_only_rounding(cases: Cases, ti2v: Cases, tmp_path: Path, name: str):
    """Also where batches whose first frames are given go one after the other, in one backward pass."""
    for kind, made, given in (("given", ti2v, GIVEN), ("alike", cases, {})):
        changes = {"checkpointing": "none", **given, **SAME.get(name, {}), "gradient_accumulation_steps": 3}
        for pack in (False, True):
            train.run(made.options(tmp_path / f"{kind} {pack}", **changes, pack=pack))
        one, other = (losses(tmp_path / f"{kind} {pack}") for pack in (False, True))
        assert other == pytest.approx(one, rel=1e-5), kind


def losses(folder: Path) -> list[float]:
    """Of every step."""
    return [line["loss"] for line in measured(folder) if "loss" in line]


@pytest.mark.parametrize("name", SAME)
def test_saving_memory_changes_no_byte_where_first_frames_are_given(ti2v: Cases, tmp_path: Path, name: str):
    train.run(ti2v.options(tmp_path / "plain", checkpointing="none", **GIVEN))
    train.run(ti2v.options(tmp_path / "saved", **{"checkpointing": "none", **GIVEN, **SAME[name]}))
    assert same_tensors(tmp_path / "saved", tmp_path / "plain")


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["one", "two experts"])
def test_batches_and_accumulation_of_any_sizes_are_one_large_batch(cases: Cases, tmp_path: Path, changes: Changes):
    """Three masked pictures and one that counts less: as one batch of 4, as 2 + 2, as 3 + 1, and as 4 of 1."""
    loras: list[dict[str, Any]] = []
    for sizes, accumulate in (((3, 1), 2), ((1, 1), 4), ((2, 1), 3)):
        config = cases.config(f"batches {sizes[0]}", RICH_PICTURES.replace("SIZE", str(sizes[0])))
        given = {"max_train_steps": 4, "optimizer_type": "SGD", "learning_rate": 0.1, "max_grad_norm": 0.0,
                 "prior_loss_weight": 0.3, "gradient_accumulation_steps": accumulate, **changes}  # fmt: skip
        folder = tmp_path / str(sizes[0])
        train.run(cases.options(folder, dataset_config=config, **given))
        loras.append({f"{path.name}/{key}": value for path in sorted(folder.glob("*.safetensors"))
                      for key, value in load_file(path).items()})  # fmt: skip
    first, *others = loras
    for key, value in first.items():
        for other in others:
            torch.testing.assert_close(other[key], value, rtol=1e-5, atol=1e-6, msg=key)
    assert any(value.abs().max() > 1e-3 for key, value in first.items() if "lora_B" in key)


RICH_PICTURES = """
[general]
resolution = [64, 64]
[[datasets]]
image_directory = "@/media"
cache_directory = "@/cache"
mask_directory = "@/masks"
batch_size = SIZE
[[datasets]]
image_directory = "@/others"
cache_directory = "@/cache"
is_reg = true
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX's")
def test_two_experts_with_averages_and_validation_survive_three_real_kills(cases: Cases, tmp_path: Path):
    changes = {**RESUMED["two experts, all kinds of chance, averages, validation"], "save_state_every_n_steps": 1}
    whole = cases.options(tmp_path / "whole", max_train_steps=40, **changes)
    killed = replace(whole, output_dir=tmp_path / "killed")
    train.run(whole)
    moments, kills = random.Random(11), 0
    for step in (3, 14, 27):
        process = subprocess.Popen(
            [sys.executable, "-m", "wangen.runtime", *killed.argv()],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},  # sums depend on it
        )
        wait_for(tmp_path / "killed/lora-state", step, process)
        time.sleep(moments.uniform(0, 0.2))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills == 3
    assert train.run(killed).result["steps_this_run"] < 40
    assert contents(killed.output_dir) == contents(whole.output_dir)
    assert measured(killed.output_dir) == measured(whole.output_dir)


def wait_for(states: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Until a state of that step or a later one is there."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        newest = checkpoint.newest(states)
        if newest and int(newest.name.removeprefix("step-")) >= step:
            return
        time.sleep(0.005)
