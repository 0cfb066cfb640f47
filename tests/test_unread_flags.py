"""Flags that nothing reads: what is said of them is what the schedules and distributions do with them."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from tiny import TinyRun

from wangen import profiles
from wangen.generator.commands import parse
from wangen.generator.errors import UsageError
from wangen.generator.steps import Train
from wangen.generator.train_values import LrScheduler, TimestepSampling
from wangen.generator.unread_flags import READERS, unread
from wangen.runtime import train
from wangen.runtime.training.schedules import make_schedule
from wangen.runtime.training.timesteps import distribution_of

OTHER: dict[str, Any] = {
    "lr_warmup_steps": "10", "lr_decay_steps": "40", "lr_scheduler_num_cycles": 3, "lr_scheduler_power": 2.0,
    "lr_scheduler_min_lr_ratio": 0.2, "lr_scheduler_timescale": 77, "discrete_flow_shift": 2.5, "sigmoid_scale": 0.7,
    "logit_mean": 0.3, "logit_std": 0.8, "mode_scale": 0.5, "preserve_distribution_shape": True,
    "validation_timesteps": 3, "validate_every_n_steps": 5, "save_last_n_steps": 9, "save_last_n_epochs": 2,
    "keep_last": 2, "save_last_n_steps_state": 9, "save_last_n_epochs_state": 2, "block_swap_ring_size": 3,
    "checkpointing_free_blocks": 1, "high_noise_share": 0.3, "expert_turn_steps": 3, "offload_inactive_dit": False,
    "save_state": True, "async_save": True, "max_restarts": 2, "pack": True, "logging_dir": Path("logs"),
    "log_tracker_name": "cats", "wandb_run_name": "cats", "training_comment": "third try",
    "learning_rate": 0.5, "compile": True, "split_attn": True, "vae_dtype": "float16", "vae_cache_cpu": True,
    "t5_dtype": "float16", "fp8_t5": True, "tokenizer": Path("umt5"), "vae_device": "cpu", "text_encoder_device": "cpu",
    "decoder": "pyav", "clip": Path("clip.pth"), "network_dim": 8, "network_alpha": 4.0,
    "base_weights_multiplier": (1.0,),
}  # fmt: skip
OF_TIMESTEPS = ["discrete_flow_shift", "sigmoid_scale", "logit_mean", "logit_std", "mode_scale",
                "preserve_distribution_shape"]  # fmt: skip
DRAWING = [*get_args(TimestepSampling), "sigma, logit_normal", "sigma, mode", "shift, 100 to 900"]
NUM_STEPS = 100


def options(**changes: Any) -> Train:
    return Train(output_dir=Path("out"), output_name="cats", task="t2v-1.3B", **changes)


def factors(given: Train) -> list[float]:
    """Of the learning rate, over the run."""
    return list(map(make_schedule(given, NUM_STEPS), range(NUM_STEPS)))


def quantiles(given: Train) -> list[float]:
    return [distribution_of(given, 256).quantile(number / 20) for number in range(1, 20)]


def drawing(name: str) -> dict[str, Any]:
    """The flags of a way to draw timesteps, which may be cut or have a weighting scheme."""
    sampling, _, more = name.partition(", ")
    if more == "100 to 900":
        return {"timestep_sampling": sampling, "min_timestep": 100, "max_timestep": 900}
    return {"timestep_sampling": sampling, **({"weighting_scheme": more} if more else {})}


@pytest.mark.parametrize("schedule", get_args(LrScheduler))
@pytest.mark.parametrize("flag", [name for name in READERS if name.startswith("lr_")])
def test_a_schedule_that_reads_a_flag_changes_with_it_and_no_other_does(schedule: str, flag: str):
    given = {"lr_scheduler": schedule, "lr_warmup_steps": "0" if flag == "lr_warmup_steps" else "20",
             "lr_decay_steps": "30" if schedule == "warmup_stable_decay" else "0"}  # fmt: skip
    if schedule == "adafactor":
        given |= {"lr_warmup_steps": "0", "optimizer_type": "Adafactor"}
    changed = options(**{**given, flag: OTHER[flag]})
    assert (factors(changed) != factors(options(**given))) == (unread(changed) == [])


@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.parametrize("flag", OF_TIMESTEPS)
def test_timesteps_that_read_a_flag_change_with_it_and_no_others_do(name: str, flag: str):
    given = drawing(name)
    changed = options(**{**given, flag: OTHER[flag]})
    assert (quantiles(changed) != quantiles(options(**given))) == (unread(changed) == [])


@pytest.mark.parametrize("task", profiles.model_names())
def test_a_model_as_it_comes_has_no_such_flag(task: str):
    words = ["--dataset_config", "a.toml", "--task", task, "--output_dir", "out", "--output_name", "cats"]
    assert unread(parse(Train, words)) == []
    assert unread(parse(Train, [*words, "--timestep_sampling", "uniform"])) == []


@pytest.mark.parametrize("flag", READERS)
def test_what_is_not_used_is_named_with_what_would_read_it(flag: str):
    beside = {
        "learning_rate": {"optimizer_type": "Adafactor", "optimizer_args": ("relative_step=True",)},
        "lr_warmup_steps": {"optimizer_type": "Adafactor", "lr_scheduler": "adafactor"},
        "network_dim": {"train_mode": "full"},
        "network_alpha": {"train_mode": "full"},
        "compile": {"plain": True},
        "split_attn": {"plain": True},
        "discrete_flow_shift": {"timestep_sampling": "sigma"},
        "sigmoid_scale": {"timestep_sampling": "uniform"},
        "checkpointing_free_blocks": {"checkpointing": "none"},
        "logging_dir": {"log_with": ("none",)},
        "training_comment": {"no_metadata": True},
    }
    (line,) = unread(options(**beside.get(flag, {}), **{flag: OTHER[flag]}))
    assert line == f"--{flag} is not used: it is read with {READERS[flag][1]}"


@pytest.mark.parametrize(
    "given",
    [
        {"save_last_n_epochs_state": 1, "save_state": True, "save_every_n_steps": 1},
        {"save_last_n_steps_state": 1, "save_state": True, "save_every_n_epochs": 1},
        {"pack": True, "gradient_accumulation_steps": 2, "plain": True},
    ],
)
def test_what_reads_a_flag_elsewhere_does_not_read_it_here(given: dict[str, Any]):
    (line,) = unread(options(**given))
    assert line.startswith(f"--{next(iter(given))} is not used")


@pytest.mark.parametrize(
    ("flag", "readers"),
    [
        ("vae_dtype", [{"cache_mode": "auto"}, {"sample_prompts": Path("p.txt")}, {"sample_continuations": 1}]),
        ("t5_dtype", [{"cache_mode": "realtime"}, {"sample_prompts": Path("p.txt")}]),
        ("decoder", [{"cache_mode": "auto"}, {"cache_latents": True}, {"cache_latents_to_disk": True}]),
    ],
)
def test_what_encodes_here_reads_how(flag: str, readers: list[dict[str, Any]]):
    assert len(unread(options(**{flag: OTHER[flag]}))) == 1
    assert not any(unread(options(**{flag: OTHER[flag]}, **reader)) for reader in readers)


def test_no_block_that_is_free_is_none_too_many_where_nothing_is_computed_again():
    """With `--checkpointing none` a preset leaves none of the others."""
    assert unread(options(checkpointing="none", checkpointing_free_blocks=0)) == []


def test_a_rank_of_convolutions_is_read_by_nothing():
    (line,) = unread(options(network_args=("conv_dim=4", "loraplus_lr_ratio=4")))
    assert line == "--network_args conv_dim= is not used: no layer that gets an adapter is a convolution"


@pytest.mark.parametrize("flag", ["high_noise_share", "expert_turn_steps", "offload_inactive_dit"])
def test_what_two_experts_read_one_does_not(flag: str):
    both = replace(options(**{flag: OTHER[flag]}), task="t2v-A14B")
    assert unread(both) == []
    assert len(unread(replace(both, experts="high"))) == 1


def test_the_trainer_says_so(tiny_run: TinyRun, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "wangen")
    with pytest.raises(UsageError, match="--dit"):
        train.run(tiny_run.options(tmp_path, lr_scheduler_power=2.0, dit=None))
    assert caplog.text == ""
    train.run(tiny_run.options(tmp_path, lr_scheduler_power=2.0, lr_warmup_steps="3", max_train_steps=3))
    lines = [record.message.strip() for record in caplog.records]
    assert lines == [
        "--lr_scheduler_power is not used: it is read with --lr_scheduler polynomial",
        "the warm-up takes 3 steps of 3: the learning rate never reaches its value (--lr_warmup_steps)",
    ]


def test_the_script_for_slurm_gives_restarts_whatever_its_gpus_are(monkeypatch):
    given = options(max_restarts=2)
    assert unread(given) == ["--max_restarts is not used: it is read with --gpus"]
    monkeypatch.setenv("WANGEN_SUBMITTED_BY", "train_cats.sbatch")
    assert unread(given) == []
