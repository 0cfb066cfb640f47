"""Looking at a run changes no byte of it: validation, samples and logs."""

import json
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import TinyRun
from train_cases import EXPERTS, cut_off, make_cases, measured

from wangen.generator.errors import UsageError
from wangen.generator.steps import CacheText
from wangen.runtime import cache_text, train
from wangen.runtime.continuations import Quality
from wangen.runtime.lora_folder import told_by
from wangen.runtime.training import continuing, watching
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.throughput import Throughput
from wangen.runtime.training.validation import Validation, is_better


def test_a_run_that_is_looked_at_ends_with_the_same_bytes(tiny_run: TinyRun, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square --w 64 --h 64 --f 1 --s 2 --l 3\n")
    same = {"validation_items": 1, "network_dropout": 0.3, "ema_decay": 0.9, "max_train_steps": 4}
    weights = {"vae": tiny_run.weights["vae"], "t5": tiny_run.weights["t5"], "t5_dtype": "float32"}
    train.run(tiny_run.options(tmp_path / "quiet", **same, validation_timesteps=2, validate_every_n_steps=4))
    train.run(
        tiny_run.options(
            tmp_path / "watched",
            **same,
            **weights,
            validation_timesteps=3,
            validate_every_n_steps=1,
            keep_best=True,
            sample_prompts=prompts,
            sample_every_n_steps=2,
            sample_at_first=True,
            log_with=("tensorboard",),
        )
    )
    for name in ("lora.safetensors", "lora-ema.safetensors"):
        assert (tmp_path / "quiet" / name).read_bytes() == (tmp_path / "watched" / name).read_bytes()
    samples = sorted(path.name for path in (tmp_path / "watched" / "samples").glob("*.png"))
    assert samples == [f"lora-step{step:08d}-1.png" for step in (0, 2, 4)]
    lines = [json.loads(line) for line in (tmp_path / "watched" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    means = {line["step"]: line["validation"]["mean_adapter"] for line in lines if "validation" in line}
    assert sorted(means) == [0, 1, 2, 3, 4]
    assert (tmp_path / "watched" / "lora-best.safetensors").is_file()


def test_what_the_profiler_takes_is_no_time_of_a_step(tiny_run: TinyRun, tmp_path, monkeypatch):
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    def slow_step(self: torch.profiler.profile) -> None:
        nonlocal now
        now += 60  # as long as starting it and writing a trace may take
        step(self)

    step = torch.profiler.profile.step
    monkeypatch.setattr(torch.profiler.profile, "step", slow_step)
    monkeypatch.setattr(watching, "Throughput", partial(Throughput, clock=clock))
    speed = train.run(tiny_run.options(tmp_path, max_train_steps=3, profile=True)).result["speed"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(speed["s_per_step"], *(line["s_per_step"] for line in lines if "loss" in line)) < 1


@pytest.mark.parametrize(("loss", "average", "lowest"), [
    (0.5, 0.6, 0.5), (0.5, 0.4, 0.4), (0.5, 0.5, 0.5), (math.nan, 0.4, 0.4), (0.5, math.nan, 0.5), (0.5, None, 0.5),
])  # fmt: skip
def test_an_average_that_is_lower_counts_in_the_adapters_place(loss, average, lowest):
    found = Validation((), 1.0, loss, average, 1, loss - 1, None, 0)
    assert (found.lowest, found.is_average_better) == (lowest, lowest != loss)
    assert is_better(found, 0.45) is (lowest < 0.45)


@pytest.mark.parametrize(("rate", "wins"), [(1.0, True), (1e-3, False)])
def test_the_best_is_the_average_where_that_is_better(tiny_run, tmp_path, rate, wins):
    report = train.run(tiny_run.options(
        tmp_path, max_train_steps=6, validation_items=1, validation_timesteps=2, validate_every_n_steps=1,
        keep_best=True, ema_decay=0.9, save_every_n_steps=1, learning_rate=rate,
    ))  # fmt: skip
    judged = {
        (line["validation"][f"mean_{which}"], line["step"], which)
        for line in measured(tmp_path) if "validation" in line and line["step"] for which in ("adapter", "ema")
    }  # fmt: skip
    loss, step, which = min(judged)
    assert (which == "ema") is wins
    assert report.result["best"][""] == {"loss": loss, "step": step, "file": "lora-best.safetensors"}
    number, ending = f"-step{step:08d}" if step < 6 else "", "-ema" if wins else ""
    same = tmp_path / f"lora{number}{ending}.safetensors"
    best = load_file(tmp_path / "lora-best.safetensors")
    assert all(torch.equal(value, best[key]) for key, value in load_file(same).items())
    assert ("wangen.averaged" in told_by(tmp_path / "lora-best.safetensors")) is wins


@pytest.mark.slow
def test_the_base_is_measured_again_where_what_is_judged_changed(tmp_path):
    cases = make_cases(tmp_path / "cases")
    blocks = "[general]\nresolution = [64, 64]\n[[datasets]]\nimage_directory = '@/{}'\ncache_directory = '@/cache'\n"
    one, three = (cases.config(name, blocks.format(name)) for name in ("others", "media"))
    judged = {"validation_timesteps": 2, "validate_every_n_steps": 1, "learning_rate": 1e-9, "dataset_config": three}
    experts = {**EXPERTS, "expert_turn_steps": 10, "max_train_steps": 8, "save_state_every_n_steps": 1}
    cut_off(cases.options(tmp_path / "two", **judged, **experts, validation_config=one), 2)  # one has not begun
    train.run(cases.options(tmp_path / "two", **judged, **experts, validation_config=three))
    later = [line["validation"] for line in measured(tmp_path / "two") if "validation" in line and line["step"] > 2]
    assert {validation["num_items"] for validation in later} == {3}

    train.run(cases.options(tmp_path / "one", **judged, max_train_steps=2, validation_config=one))
    (tmp_path / "cases/others/other.txt").write_text("a red wall that moves", encoding="utf-8")
    text_encoder = {"t5": cases.weights["t5"], "t5_dtype": "float32"}
    cache_text.run(CacheText(dataset_config=one, **text_encoder, device="cpu", keep_cache=True))
    train.run(cases.options(tmp_path / "one", **judged, max_train_steps=4, validation_config=one))
    found = [line["validation"] for line in measured(tmp_path / "one") if "validation" in line]
    assert found[0]["mean_base"] != found[-1]["mean_base"]
    assert abs(found[-1]["delta"]) < 1e-6


def test_a_regularisation_set_is_not_judged_in_a_dataset_of_its_own_either(tmp_path):
    cases = make_cases(tmp_path)
    config = cases.config("judged", "[general]\nresolution = [64, 64]\n[[datasets]]\nimage_directory = '@/others'\n"
                                    "cache_directory = '@/cache'\nis_reg = true\n")  # fmt: skip
    with pytest.raises(UsageError, match="nothing but regularisation sets"):
        train.run(cases.options(tmp_path / "out", validation_config=config))


def test_each_clip_that_is_continued_has_its_own_reference_which_is_decoded_once(tmp_path, monkeypatch):
    decoded: list[str] = []

    def reference_of(clip: Any, _decoder: Any, _check: Any) -> Any:
        decoded.append(clip.name)
        return SimpleNamespace(vae=Quality((30.0 if clip.name == "a" else 20.0,), (1.0,)), copy=Quality((1.0,), (0.0,)))

    nothing: Any = lambda *_words: None  # noqa: E731
    for name, stand_in in (
        ("reference_of", reference_of), ("sampled", lambda *_words, **_named: {1: "latents", 2: "latents"}),
        ("Decoder", lambda *_words: SimpleNamespace(decode=nothing)), ("own_check", nothing), ("pixels_of", nothing),
        ("side_by_side", nothing), ("_write", nothing), ("quality_of", lambda *_words: Quality((10.0,), (0.5,))),
        ("Encoders", SimpleNamespace(of=nothing)),
    ):  # fmt: skip
        monkeypatch.setattr(continuing, name, stand_in)
    run: Any = SimpleNamespace(ranks=Ranks(), kind=None, device=SimpleNamespace(type="cpu"),
                               plan=SimpleNamespace(options=SimpleNamespace(sample_continuations=0)))  # fmt: skip
    made = continuing.Continuing(run.plan, run.ranks)
    made.clips = [SimpleNamespace(name=name, scene=None, source=None, given_frames=1) for name in "ab"]
    for _ in range(2):
        found = made.make(run, nothing)
        assert found
        assert [clip.vae.psnr[0] for clip in found.clips] == [30.0, 20.0]
    assert decoded == ["a", "b"]
