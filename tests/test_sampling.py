"""Samples on the way: exact by seed, by both experts, with everything written down, and nothing of the run changed."""

import contextlib
import json
from dataclasses import replace

import av
import numpy as np
import pytest
import torch
from PIL import Image
from runs import CPU, MODEL, make_run, options_of

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.generator.sample_prompts import read_prompts
from wangen.generator.steps import Generate
from wangen.runtime import generate
from wangen.runtime.sampling import scenes
from wangen.runtime.sampling.videos import Expert, _stages
from wangen.runtime.training.adapter import replaced
from wangen.runtime.training.sampling import (
    cut_samples,
    list_samples,
    make_samples,
    sample_settings,
    samples_due,
    training_scenes,
)

pytest_plugins = ("optimizer_fixtures",)

LINES = (
    "a red square --w 64 --h 80 --f 5 --s 3 --l 3 --n a blue wall\na red square --w 64 --h 64 --f 1 --s 2 --l 1 --d 9\n"
)


def scenes_of(run, folder, text=LINES):
    path = folder / "prompts.txt"
    path.write_text(text)
    model = run.plan.model
    return training_scenes(model, read_prompts(path, model, 42), run.plan.options, CPU)


def pixels(path):
    if path.suffix == ".png":
        return np.asarray(Image.open(path))
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_samples_are_files_with_all_settings_and_nothing_of_the_run_changes(tiny_run, tmp_path):
    run = make_run(options_of(tiny_run, tmp_path, network_dropout=0.5))
    scenes = scenes_of(run, tmp_path)
    trainee = run.trainees[0]
    before = {name: parameter.detach().clone() for name, parameter in trainee.parameters.items()}
    modes = [module.training for module in trainee.transformer.modules()]
    state = torch.get_rng_state()
    video, image = make_samples(run, scenes)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in trainee.transformer.modules()] == modes
    assert any(modes)
    assert all(torch.equal(parameter, before[name]) for name, parameter in trainee.parameters.items())
    assert all(parameter.requires_grad for parameter in trainee.parameters.values())

    assert (video.name, image.name) == ("lora-step00000002-1.mp4", "lora-step00000002-2.png")
    assert video.parent == tmp_path / "samples"
    assert pixels(video).shape == (5, 80, 64, 3)
    assert pixels(image).shape == (64, 64, 3)
    lines = [json.loads(line) for line in (tmp_path / "samples" / "samples.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == [video.name, image.name]
    first = lines[0]
    assert (first["step"], first["seed"], first["guidance"], first["shift"], first["fps"]) == (2, 42, 3.0, 5.0, 16)
    assert first["negative_prompt"] == "a blue wall"
    assert lines[1]["negative_prompt"] == ""
    assert len(first["sigmas"]) == 4
    assert first["comfyui"] == {
        "sampler_name": "uni_pc", "scheduler": "simple", "shift": 5.0, "steps": 3, "cfg": 3.0, "noise_seed": 42,
        "strength_model": 1.0,
    }  # fmt: skip
    with av.open(str(video)) as container:
        assert {"file": video.name, **json.loads(container.metadata["wangen"])} == first
    assert str(tmp_path) not in json.dumps(lines)

    content = video.read_bytes()
    make_samples(run, scenes)  # as after a resume
    assert video.read_bytes() == content
    assert len((tmp_path / "samples" / "samples.jsonl").read_text().splitlines()) == 2


def test_a_sample_of_an_untrained_adapter_is_what_generate_makes_of_the_same_settings(tiny_run, tmp_path):
    run = make_run(options_of(tiny_run, tmp_path), move_weights=0.0)
    text = "a red square --w 64 --h 80 --f 1 --s 3 --l 3 --n a blue wall\n"
    (path,) = make_samples(run, scenes_of(run, tmp_path, text))
    for trainee in run.trainees:
        assert not any(p.any() for name, p in trainee.parameters.items() if "lora_B" in name)
    generate.run(
        Generate(
            **tiny_run.weights,
            task="t2v-1.3B",
            prompt="a red square",
            negative_prompt="a blue wall",
            video_size=(80, 64),
            video_length=1,
            infer_steps=3,
            guidance_scale=3.0,
            save_path=tmp_path / "g.png",
            device="cpu",
        )
    )
    difference = np.abs(pixels(path).astype(int) - pixels(tmp_path / "g.png").astype(int))
    assert difference.max() <= 1  # the transformers' forwards differ by rounding


@pytest.mark.slow
def test_averages_are_sampled_with_where_they_are_kept(tiny_run, tmp_path):
    run = make_run(options_of(tiny_run, tmp_path, ema_decay=0.9))
    scenes = scenes_of(run, tmp_path)
    trainee = run.trainees[0]
    assert trainee.ema is not None  # they began at other values than the parameters have now
    run.trainees[0] = replace(trainee, ema=None)
    (_, plain) = make_samples(run, scenes)
    before = pixels(plain)
    run.trainees[0] = trainee
    (_, averaged) = make_samples(run, scenes)
    assert not np.array_equal(before, pixels(averaged))
    with Image.open(averaged) as image:
        assert json.loads(image.text["wangen"])["averaged_weights"] is True


@pytest.mark.slow
def test_both_experts_sample_each_from_the_boundary_on_with_its_own_guidance(tiny_run, tmp_path):
    options = options_of(tiny_run, tmp_path, task="t2v-A14B", dit_high_noise=tiny_run.weights["dit"])
    run = make_run(options)
    scenes = scenes_of(run, tmp_path, "a red square --w 64 --h 64 --f 1 --s 6 --l 3 --lh 2\n")
    (path,) = make_samples(run, scenes)
    settings = json.loads((tmp_path / "samples" / "samples.jsonl").read_text())
    assert settings["experts"] == ["high_noise", "low_noise"]
    assert (settings["guidance"], settings["guidance_high_noise"], settings["boundary"]) == (3.0, 2.0, 0.875)
    sigmas = settings["sigmas"][:-1]
    assert settings["comfyui"]["steps_high_noise"] == sum(round(1000 * sigma) >= 875 for sigma in sigmas)
    assert 0 < settings["comfyui"]["steps_high_noise"] < 6
    both = pixels(path)
    for number, trainee in enumerate(run.trainees):  # each of the two has its part in the picture
        with replaced(trainee.parameters, {n: torch.zeros_like(p) for n, p in trainee.parameters.items()}):
            assert not np.array_equal(both, pixels(make_samples(run, scenes)[0])), number
    run.trainees, run.active = run.trainees[1:], None
    assert not np.array_equal(both, pixels(make_samples(run, scenes)[0]))
    last = (tmp_path / "samples" / "samples.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["experts"] == ["low_noise"]


@pytest.mark.slow
def test_comfyui_is_told_the_guidance_that_was_used_and_what_is_merged(tiny_run, tmp_path, caplog):
    options = options_of(tiny_run, tmp_path, task="t2v-A14B", dit_high_noise=tiny_run.weights["dit"])
    run = make_run(options)
    (scene, below) = scenes_of(run, tmp_path, "a square --w 64 --h 64 --f 1 --s 2 --l 3 --lh 2\n"
                                              "a square --w 64 --h 64 --f 1 --s 2 --l 0.5 --n a wall\n")  # fmt: skip
    assert "guidance below 1 is as 1" in caplog.text
    assert "--n decides nothing without guidance" in caplog.text
    both, run.trainees = run.trainees, run.trainees[:1]
    assert sample_settings(run, scene.prompt)["comfyui"]["cfg"] == 2.0, "the expert for high noise alone"
    run.trainees = both[1:]
    assert sample_settings(run, scene.prompt)["comfyui"]["cfg"] == 3.0
    assert sample_settings(run, below.prompt)["comfyui"]["cfg"] == 1.0, "ComfyUI would mix with less"
    assert "base_weights" not in sample_settings(run, below.prompt)
    merged = replace(run.plan.options, base_weights=(tmp_path / "a.safetensors",), base_weights_multiplier=(0.5,))
    run.plan = replace(run.plan, options=merged)
    told = sample_settings(run, scene.prompt)
    assert told["base_weights"] == told["comfyui"]["base_weights"] == [{"file": "a.safetensors", "strength": 0.5}]


def test_samples_of_later_steps_leave_the_list_when_a_run_begins_anew(tmp_path):
    def listed():
        return [json.loads(line)["file"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]

    own = [f"lora-step0000000{step}-1.png" for step in (0, 2, 4)]
    files = [*own, "lora-step00000004-continuation-1.mp4", "lora_low_noise-step00000004-1.png", "other.png"]
    list_samples(tmp_path, {file: {"seed": 1} for file in files})
    cut_samples(tmp_path, "lora", 2, keep=True)
    assert listed() == [own[0], own[1], files[4], files[5]]
    cut_samples(tmp_path, "lora", 0, keep=True)
    assert listed() == [own[0], files[4], files[5]]
    cut_samples(tmp_path, "lora", 0, keep=False)
    assert listed() == files[4:]
    cut_samples(tmp_path / "nowhere", "lora", 0, keep=False)


def test_an_expert_that_samples_alone_is_announced(tiny_run, tmp_path, caplog):
    options = options_of(tiny_run, tmp_path, task="t2v-A14B", experts="low")
    (tmp_path / "prompts.txt").write_text("a red square --w 64 --h 64 --f 1")
    model = profiles.model("t2v-A14B")
    training_scenes(model, read_prompts(tmp_path / "prompts.txt", model, 1), options, CPU)
    assert "the low-noise expert alone" in caplog.text


def test_a_sample_that_is_not_finite_is_left_out_and_training_goes_on(tiny_run, tmp_path, caplog):
    run = make_run(options_of(tiny_run, tmp_path))
    with torch.no_grad():
        next(iter(run.trainees[0].parameters.values())).fill_(float("nan"))
    assert make_samples(run, scenes_of(run, tmp_path)) == []
    assert "sample 1 is left out" in caplog.text
    assert not (tmp_path / "samples").exists()


def test_weights_of_another_model_are_named_before_anything_is_encoded(tiny_run, tmp_path):
    options = options_of(tiny_run, tmp_path, t5=tiny_run.weights["vae"])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square --w 64 --h 64 --f 1")
    with pytest.raises(WangenError, match="--t5"):
        training_scenes(MODEL, read_prompts(prompts, MODEL, 1), options, CPU)


def test_a_picture_is_encoded_once_and_in_float32_where_it_leaves_float16(tiny_run, tmp_path, monkeypatch, caplog):
    Image.new("RGB", (64, 64), "red").save(tmp_path / "first.png")
    words = f"a cat --w 64 --h 64 --i {tmp_path / 'first.png'} --f"
    (tmp_path / "prompts.txt").write_text(f"{words} 5\n{words} 5 --s 3 --d 7 --l 2\n{words} 9\n")
    model, encoded = profiles.model("i2v-A14B"), []
    original = scenes.first_frame_condition
    monkeypatch.setattr(scenes, "first_frame_condition", lambda latents: encoded.append(latents) or original(latents))
    monkeypatch.setattr(scenes, "choose_vae_dtype", lambda *_: "float16")
    load = scenes._vae_in

    def overflowing(*words):
        vae = load(*words)
        return lambda dtype: vae("float32") if dtype == "float32" else Overflowing(vae("float32"))

    monkeypatch.setattr(scenes, "_vae_in", overflowing)
    options = options_of(tiny_run, tmp_path, task="i2v-A14B", experts="low")
    made = training_scenes(model, read_prompts(tmp_path / "prompts.txt", model, 1), options, CPU)
    assert len(encoded) == 2, "of five and of nine frames"
    assert made[0].given.condition is made[1].given.condition
    assert all(scene.given.condition.isfinite().all() for scene in made)
    assert caplog.text.count("first.png leaves the range of float16") == 2


class Overflowing:
    """A VAE whose numbers become too large."""

    def __init__(self, vae) -> None:
        self.vae = vae

    def encode_condition(self, *words, **how):
        return self.vae.encode_condition(*words, **how) + torch.inf


def test_first_frames_become_what_each_model_takes(tiny_run, tmp_path, monkeypatch):
    from parity import VAE22

    Image.new("RGB", (90, 70), (200, 30, 30)).save(tmp_path / "first.png")
    (tmp_path / "prompts.txt").write_text("a red square --w 64 --h 64 --f 5 --i first.png\n")
    options = options_of(tiny_run, tmp_path)
    found = {}
    for task in ("i2v-A14B", "ti2v-5B"):
        model = profiles.model(task)
        vae = VAE22 if task == "ti2v-5B" else tiny_run.weights["vae"]
        prompts = read_prompts(tmp_path / "prompts.txt", model, 42)
        (scene,) = training_scenes(model, prompts, replace(options, task=task, vae=vae), CPU)
        found[task] = scene.given
    condition = found["i2v-A14B"].condition
    assert condition.shape == (1, 20, 2, 8, 8)
    assert condition[:, :4, 0].eq(1).all()
    assert not condition[:, :4, 1:].any()
    assert found["ti2v-5B"].clean.shape == (1, 48, 1, 4, 4)
    assert found["ti2v-5B"].condition is None


def test_samples_are_due_at_intervals_before_the_first_step_when_asked_and_always_at_the_end(tiny_run, tmp_path):
    options = options_of(tiny_run, tmp_path, sample_prompts=tmp_path / "p.txt", sample_every_n_epochs=2)
    due = [step for step in range(20) if samples_due(options, step, 4, 19)]
    assert due == [8, 16, 19]
    due = [step for step in range(8) if samples_due(replace(options, sample_every_n_steps=3), step, 4, 19)]
    assert due == [3, 6]
    assert samples_due(replace(options, sample_at_first=True), 0, 4, 19)
    assert not samples_due(replace(options, sample_prompts=None), 8, 4, 19)


def test_a_list_of_samples_that_was_damaged_stops_no_training(tmp_path):
    (tmp_path / "samples.jsonl").write_bytes(b'{"file": "a.png", "step": 1}\n{"file": "b\xff\xfe\n[]\n')
    list_samples(tmp_path, {"c.png": {"step": 2}})
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == ["a.png", "c.png"]


@pytest.mark.slow
def test_a_schedule_free_run_is_sampled_as_it_would_be_saved(tiny_run, tmp_path, dotted):
    run = make_run(options_of(tiny_run, tmp_path, optimizer_type="others.ScheduleFree", learning_rate=1.0))
    plain = make_run(options_of(tiny_run, tmp_path / "plain"))
    optimization, scenes = run.trainees[0].optimization, scenes_of(run, tmp_path)
    for gradient in optimization.flat.gradients:
        gradient.fill_(0.02)
    optimization.step(1.0)
    weights = []
    for shown in (contextlib.nullcontext(), optimization.evaluating()):
        with shown:
            weights.append({name: value.detach().clone() for name, value in run.trainees[0].parameters.items()})
    own = pixels(make_samples(run, scenes)[1])
    other, same = [], []
    for values, found in zip(weights, (other, same), strict=True):
        with replaced(plain.trainees[0].parameters, values):
            found.append(pixels(make_samples(plain, scenes)[1]))
    assert np.array_equal(own, same[0])
    assert not np.array_equal(own, other[0])


def test_an_expert_that_goes_the_whole_way_has_its_own_guidance(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a red square --w 64 --h 64 --f 1 --l 3 --lh 2\n")
    (prompt,) = read_prompts(path, profiles.model("t2v-A14B"), 42)
    for high, guidance in ((True, 2.0), (False, 3.0)):
        (stage,) = _stages([Expert(lambda *_words, **_names: None, high)], prompt, 0.875)
        assert (stage.guidance, stage.lowest_timestep) == (guidance, 0.0)


def test_the_step_at_the_boundary_is_told_as_one_of_the_high_noise_expert(tiny_run, tmp_path):
    run = make_run(options_of(tiny_run, tmp_path, task="t2v-A14B", dit_high_noise=tiny_run.weights["dit"]))
    (scene, *_) = scenes_of(run, tmp_path)
    told = sample_settings(run, replace(scene.prompt, sampler="euler", shift=1.0, steps=8))
    assert told["sigmas"][:3] == [1.0, 0.875, 0.75]
    assert told["comfyui"]["steps_high_noise"] == 2
