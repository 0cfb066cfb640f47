"""Continuations of held-out clips: what is given stays as it is, the noise is always the same, and what is measured."""

import json
import logging
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from footage import numbers
from parity import T5, VAE21, VAE22
from train_cases import Cases, contents, cut_off, make_ti2v, wide_prompts
from world_model_shards import write_split

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.generator.prepare_steps import WorldModel
from wangen.generator.steps import CacheLatents, CacheText, Train
from wangen.runtime import cache_latents, cache_text, train, world_model
from wangen.runtime.continuations import (
    Continuations,
    Measured,
    Quality,
    make_clips,
    quality_of,
    reference_of,
    side_by_side,
)
from wangen.runtime.denoising import flow_scheduler, initial_noise
from wangen.runtime.evaluation.signals import MOST_DB, psnr, ssim
from wangen.runtime.loader import CachedSample, Draw, find_entries, read_batch
from wangen.runtime.media import target_frames
from wangen.runtime.models import family
from wangen.runtime.samples import read_samples
from wangen.runtime.sampling.output import pixels_of, read_frames
from wangen.runtime.sampling.scenes import Encoders
from wangen.runtime.sampling.videos import Decoder, Expert, sample_latents
from wangen.runtime.training import continuing, trackers, watching
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.samples import read_training_samples

MODEL = profiles.model("ti2v-5B")
WAN = family(MODEL)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ti2v(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return make_ti2v(tmp_path_factory.mktemp("ti2v"))


@pytest.fixture(scope="module")
def held_out(ti2v: Cases) -> list[CachedSample]:
    """Two clips, each of 9 frames and of one."""
    options = ti2v.options(ti2v.folder / "out", task="ti2v-5B", condition_frames=5, caption_dropout=0.1)
    return find_entries(options, MODEL, read_samples(options, MODEL))


@pytest.fixture(scope="module")
def velocity(ti2v: Cases):
    return partial(WAN.predict_velocity, WAN.load_transformer(ti2v.weights["dit"], dtype=torch.float32))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(WAN, Encoders(vae=VAE22, vae_dtype="float32"), CPU, "")


def clips_of(samples, given_frames=5, **changes):
    return make_clips(samples, MODEL, **{"given_frames": given_frames, "count": 2, "seed": 42, "steps": 2} | changes)


def continued(clip, velocity):
    return sample_latents(WAN, MODEL, [Expert(velocity)], clip.scene, CPU, cure="")


@pytest.mark.parametrize(("given_frames", "num_latent"), [(1, 1), (5, 2)])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_given_latent_frames_come_out_bit_for_bit_and_are_never_noisy(
    held_out, velocity, given_frames, num_latent, guidance
):
    for clip in clips_of(held_out, given_frames, guidance=guidance):
        seen = []

        def predict(latents, timesteps, texts, _seen=seen, **given):
            _seen.append((latents.clone(), timesteps.clone()))
            return velocity(latents, timesteps, texts, **given)

        found = continued(clip, predict)
        assert found.shape == clip.latents.shape == (1, 48, 3, 4, 4)
        assert torch.equal(found[:, :, :num_latent], clip.latents[:, :, :num_latent])
        assert not torch.equal(found[:, :, num_latent:], clip.latents[:, :, num_latent:])
        for latents, timesteps in seen:
            assert torch.equal(latents[:, :, :num_latent], clip.latents[:, :, :num_latent])
            per_frame = timesteps.reshape(1, 3, 4)  # (B, F, tokens of a frame)
            assert not per_frame[:, :num_latent].any()
            assert (per_frame[:, num_latent:] > 0).all()
        assert len(seen) == (2 if guidance == 1 else 4)


def test_guidance_is_against_the_empty_prompts_embedding(held_out):
    (clip, _) = clips_of(held_out, guidance=3.0)
    cached = next(one for one in held_out if one.sample.name == clip.name)
    prompt, negative = clip.scene.texts
    assert torch.equal(prompt, read_batch([cached], [Draw(0, 0)]).texts[0])
    assert torch.equal(negative, read_batch([cached], [Draw(0, 0, -1)]).texts[0])
    assert len(clips_of(held_out)[0].scene.texts) == 1


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.slow
def test_guidance_by_frames_shows_the_negative_prompt_what_a_dropped_draw_shows(held_out, velocity, steps):
    """Its first frames are noised as the others are, with the others' timestep; the prompt's are given as ever."""
    (clip, _) = clips_of(held_out, guidance=3.0, frames_guide=True, steps=steps)
    noise = initial_noise(clip.latents.shape, clip.scene.prompt.seed)
    seen = []

    def predict(latents, timesteps, texts, **given):
        seen.append((latents, timesteps, texts))
        return velocity(latents, timesteps, texts, **given)

    found = continued(clip, predict)
    assert torch.equal(found[:, :, :2], clip.latents[:, :, :2])
    assert len(seen) == 2 * steps
    schedule = flow_scheduler(clip.scene.prompt.sampler, clip.scene.prompt.shift)
    schedule.set_timesteps(steps)
    for sigma, prompted, negative in zip(schedule.sigmas[:-1], seen[::2], seen[1::2], strict=True):
        assert torch.equal(prompted[0][:, :, :2], clip.latents[:, :, :2])
        assert torch.equal(prompted[0][:, :, 2:], negative[0][:, :, 2:])
        assert (prompted[1].shape, negative[1].shape) == ((1, 12), (1,))
        assert prompted[1].max() == negative[1]
        torch.testing.assert_close(
            negative[0][:, :, :2], (1 - sigma) * clip.latents[:, :, :2] + sigma * noise[:, :, :2]
        )
        assert torch.equal(negative[2][0], clip.scene.texts[1])
    (plain, _) = clips_of(held_out, guidance=3.0, steps=steps)
    assert not torch.equal(continued(plain, velocity), found)
    (unguided, _), (same, _) = clips_of(held_out, steps=steps), clips_of(held_out, steps=steps, frames_guide=True)
    assert torch.equal(continued(unguided, velocity), continued(same, velocity))


def test_which_clips_and_which_noise_depend_on_the_seed_and_the_content_alone(held_out, velocity):
    clips = clips_of(held_out)
    assert {clip.source.shape for clip in clips} == {(9, 64, 64, 3)}, "a single frame has nothing after it"
    seeds = [clip.scene.prompt.seed for clip in clips]
    assert len(set(seeds)) == 2
    again = clips_of(held_out[::-1])
    assert [(clip.name, clip.scene.prompt.seed) for clip in again] == [
        (clip.name, seed) for clip, seed in zip(clips, seeds, strict=True)
    ]
    assert torch.equal(continued(again[0], velocity), continued(clips[0], velocity))
    (alone,) = clips_of([one for one in held_out if one.sample.name == clips[1].name], count=1)
    assert alone.scene.prompt.seed == seeds[1]
    (first,) = clips_of(held_out, count=1)
    assert first.name == clips[0].name
    assert not {clip.scene.prompt.seed for clip in clips_of(held_out, seed=43)} & set(seeds)


def test_clips_are_what_was_encoded_and_sampled_as_the_model_is(held_out):
    for clip in clips_of(held_out, steps=None):
        cached = next(one for one in held_out if one.sample.name == clip.name)
        assert np.array_equal(clip.source, target_frames(cached.sample).transpose(1, 2, 3, 0))
        prompt = clip.scene.prompt
        assert (prompt.width, prompt.height, prompt.frames, prompt.fps) == (64, 64, 9, 24)
        assert (prompt.steps, prompt.shift, prompt.sampler) == (50, 5.0, "unipc")
        assert prompt.prompt == cached.sample.item.captions[0]


def test_clips_of_raw_world_model_data_show_their_own_frames_at_their_own_rate(tmp_path):
    write_split(tmp_path / "raw", [[(0, 20)]])
    world_model.run(WorldModel(source=tmp_path / "raw", output=tmp_path, frames=9, temporal_downsample=2))
    step = {"manifest": tmp_path / "train.jsonl", "task": "ti2v-5B", "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        wide_prompts(patch)
        cache_latents.run(CacheLatents(vae=VAE22, vae_dtype="float32", **step))
        cache_text.run(CacheText(t5=T5, t5_dtype="float32", **step))
    options = Train(**step, output_dir=tmp_path, output_name="none")
    (clip,) = clips_of(find_entries(options, MODEL, read_samples(options, MODEL)), count=1)
    assert numbers(clip.source) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert (clip.scene.prompt.fps, clip.scene.prompt.prompt) == (15, "")


def test_clips_that_end_with_what_is_given_are_said(held_out, caplog):
    with pytest.raises(WangenError, match="none of 4 held-out clips goes on after the 9 frames"):
        clips_of(held_out, 9)
    assert len(clips_of(held_out, count=3)) == 2
    assert "2 of 3 clips are continued" in caplog.text


def test_the_bound_is_the_vaes_own_reconstruction_and_the_baseline_the_last_given_frame(held_out, decoder, velocity):
    clip, _ = clips_of(held_out)
    found = reference_of(clip, decoder)
    shown = pixels_of(decoder.decode(continued(clip, velocity)))
    assert np.array_equal(shown[:5], found.reconstruction[:5])
    assert not np.array_equal(shown[5:], found.reconstruction[5:])
    assert np.array_equal(found.reconstruction, pixels_of(decoder.decode(clip.latents)))
    for number, at in enumerate(range(5, 9)):
        source = clip.source[at : at + 1]
        for quality, shown in ((found.vae, found.reconstruction[at]), (found.copy, clip.source[4])):
            assert quality.psnr[number] == pytest.approx(psnr(source, shown[None]))
            assert quality.ssim[number] == pytest.approx(ssim(source, shown[None]))
    assert len(found.vae.psnr) == len(found.copy.ssim) == 4
    together = side_by_side(clip, found, clip.source[::-1])
    assert together.shape == (9, 64, 192, 3)
    assert np.array_equal(together[:, :, :64], clip.source)
    assert np.array_equal(together[:, :, 64:128], found.reconstruction)
    assert np.array_equal(together[:, :, 128:], clip.source[::-1])


def test_frames_that_are_given_count_nowhere():
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, (9, 32, 32, 3), dtype=np.uint8)
    shown = np.clip(source.astype(int) + rng.integers(-9, 10, source.shape), 0, 255).astype(np.uint8)
    shown[7] = source[7]
    found = quality_of(source, shown, 5)
    shown[:5] = 0
    assert quality_of(source, shown, 5) == found
    assert found.psnr[2] == MOST_DB
    assert found.ssim[2] == pytest.approx(1, abs=1e-6)
    error = np.square(source[5].astype(float) - shown[5]).mean()
    assert found.psnr[0] == pytest.approx(10 * np.log10(255**2 / error))
    for wrong in (shown[1:], shown[:, :16]):
        with pytest.raises(ValueError, match="cannot be judged"):
            quality_of(source, wrong, 5)
    with pytest.raises(ValueError, match="after 9 frames"):
        quality_of(source, shown, 9)


def test_means_are_over_the_frames_of_a_clip_and_then_over_the_clips():
    one = Measured(1, "one", 5, Quality((20.0, 22.0), (0.5, 0.7)), Quality((30.0, 32.0), (0.9, 0.9)),
                 Quality((10.0, 10.0), (0.1, 0.3)))  # fmt: skip
    two = Measured(2, "two", 5, Quality((31.0,), (0.8,)), Quality((39.0,), (1.0,)), Quality((20.0,), (0.4,)))
    found = Continuations((one, two))
    assert found.numbers()["model"] == {"psnr": 26.0, "ssim": pytest.approx(0.7)}
    assert found.line() == (
        "continuations 26.0 dB, 0.70 (copying the last frame 15.0 dB, 0.30; the VAE itself 35.0 dB, 0.95)"
    )
    told = found.as_record()["continuations"]
    assert told["means"]["vae"] == {"psnr": 35.0, "ssim": 0.95}
    assert told["clips"][0] == {
        "number": 1, "name": "one", "given_frames": 5, "model": {"psnr": [20.0, 22.0], "ssim": [0.5, 0.7]},
        "vae": {"psnr": [30.0, 32.0], "ssim": [0.9, 0.9]}, "copy": {"psnr": [10.0, 10.0], "ssim": [0.1, 0.3]},
    }  # fmt: skip


# While a run trains


WATCHED = {"task": "ti2v-5B", "condition_frames": 5, "validation_items": 1, "validation_timesteps": 1,
           "network_dropout": 0.3, "ema_decay": 0.9, "lora_targets": "attention", "max_train_steps": 4}  # fmt: skip
CONTINUED = {"sample_continuations": 1, "continuation_steps": 2, "continuation_guidance": 2.0, "vae": VAE22,
             "vae_dtype": "float32", "sample_every_n_steps": 2}  # fmt: skip


def records(folder: Path) -> list[dict[str, Any]]:
    """The continuations of a run, with their steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{"step": line["step"], **line["continuations"]} for line in lines if "continuations" in line]


@pytest.fixture(scope="module")
def watched(ti2v: Cases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that continues its held-out clip before its first step, at the second and at its last."""
    folder = tmp_path_factory.mktemp("continued") / "watched"
    train.run(ti2v.options(folder, **WATCHED, **CONTINUED, sample_at_first=True, log_with=("tensorboard",)))
    return folder


@pytest.mark.slow
def test_a_run_that_continues_clips_ends_with_the_same_bytes_and_the_same_fingerprint(ti2v, watched, tmp_path):
    train.run(ti2v.options(tmp_path, **WATCHED))
    assert contents(watched) == contents(tmp_path)
    report = train.run(ti2v.options(tmp_path, **(WATCHED | CONTINUED | {"max_train_steps": 5})))
    assert report.result["steps_this_run"] == 1, "the flags may change on the way"
    assert [record["step"] for record in records(tmp_path)] == [5]


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_to_the_same_continuations(ti2v, watched, tmp_path):
    options = ti2v.options(tmp_path, **WATCHED, **CONTINUED, sample_at_first=True, save_state_every_n_steps=2)
    cut_off(options, 3)
    assert [record["step"] for record in records(tmp_path)] == [0, 2]
    assert train.run(options).result["steps_this_run"] == 2
    assert records(tmp_path) == records(watched)
    for path in (watched / "samples").iterdir():
        assert (tmp_path / "samples" / path.name).read_bytes() == path.read_bytes()


def test_continuations_are_measured_frame_by_frame_and_shown_beside_the_source(watched):
    found = records(watched)
    assert [record["step"] for record in found] == [0, 2, 4]
    for record in found:
        (clip,) = record["clips"]
        assert (clip["number"], clip["given_frames"]) == (1, 5)
        assert clip["name"] in ("one.mp4:0+9", "two.mp4:0+9")
        for name in ("model", "vae", "copy"):
            assert len(clip[name]["psnr"]) == len(clip[name]["ssim"]) == 4
            assert record["means"][name]["psnr"] == pytest.approx(fmean(clip[name]["psnr"]), abs=1e-3)
    assert len({json.dumps([record["clips"][0][name] for name in ("vae", "copy")]) for record in found}) == 1
    assert len({json.dumps(record["clips"][0]["model"]) for record in found}) == 3, "the adapter moves"
    names = [f"lora-step{step:08d}-continuation-1.mp4" for step in (0, 2, 4)]
    assert sorted(path.name for path in (watched / "samples").glob("*.mp4")) == names
    lines = [json.loads(line) for line in (watched / "samples" / "samples.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == names
    with av.open(str(watched / "samples" / names[-1])) as container:
        told = json.loads(container.metadata["wangen"])
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert {"file": names[-1], **told} == lines[-1]
    assert (told["continues"], told["given_frames"], told["guidance"], told["steps"], told["averaged_weights"]) == (
        found[0]["clips"][0]["name"], 5, 2.0, 2, True,
    )  # fmt: skip
    assert "comfyui" not in told
    assert frames.shape == (9, 64, 192, 3)


def test_what_is_measured_is_what_the_video_shows(watched):
    """The mp4's thirds against each other, but for what h264 loses."""
    frames = read_frames(watched / "samples" / "lora-step00000004-continuation-1.mp4")
    source, vae, model = (frames[:, :, at : at + 64] for at in (0, 64, 128))
    (clip,) = records(watched)[-1]["clips"]
    for shown, name in ((vae, "vae"), (model, "model")):
        assert quality_of(source, shown, 5).psnr == pytest.approx(clip[name]["psnr"], abs=1.5)


def test_the_means_are_in_the_log_the_trackers_and_the_report(ti2v, tmp_path, caplog):
    caplog.set_level(logging.INFO, "wangen")
    logged: list[dict[str, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trackers.Trackers, "log", lambda _self, step, values, group="train": logged.append(
            dict(trackers._flat(f"{group}/", values))))  # fmt: skip
        report = train.run(ti2v.options(tmp_path, **(WATCHED | CONTINUED | {"max_train_steps": 1})))
    (found,) = records(tmp_path)
    assert report.result["continuations"] == found["means"]
    (numbers,) = [one for one in logged if "continuations/model/psnr" in one]
    assert sorted(numbers) == [f"continuations/{name}/{unit}" for name in ("copy", "model", "vae")
                               for unit in ("psnr", "ssim")]  # fmt: skip
    means = found["means"]
    assert f"continuations {means['model']['psnr']:.1f} dB, " in caplog.text
    assert f"(copying the last frame {means['copy']['psnr']:.1f} dB, " in caplog.text


def test_a_continuation_that_is_not_finite_is_left_out_and_training_goes_on(ti2v, tmp_path, caplog):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuing, "sampled", lambda *_, **__: {1: torch.full((1, 48, 3, 4, 4), nan)})
        train.run(ti2v.options(tmp_path, **(WATCHED | CONTINUED | {"max_train_steps": 1})))
    assert "continuation 1 is left out" in caplog.text
    assert records(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"validation_items": 0}, "needs --validation_items or --validation_config"),
        ({"condition_frames": 0}, "needs --condition_frames above 0"),
        ({"vae": None}, "needs --vae"),
        ({"vae": None, "validation_items": 0}, "--validation_items or --validation_config, --vae"),
        ({"continuation_steps": 1001}, "must be at most 1000"),
        ({"continuation_steps": 0}, "--continuation_steps must be above 0"),
        ({"vae": VAE21}, "--vae"),
        ({"condition_frames": 9}, "goes on after the 9 frames"),
    ],
)
def test_what_cannot_be_continued_is_refused_before_a_model_loads(ti2v, tmp_path, monkeypatch, changes, words):
    monkeypatch.setattr(train, "load_trainee", lambda *_words: pytest.fail("the model was loaded"))
    monkeypatch.setattr(watching, "training_scenes", lambda *_words: pytest.fail("a prompt was encoded"))
    if changes.get("vae", True):
        (tmp_path / "p.txt").write_text("a cat --w 64 --h 64 --f 1")
        changes = {"sample_prompts": tmp_path / "p.txt", "t5": T5, **changes}
    with pytest.raises(WangenError) as error:
        train.run(ti2v.options(tmp_path, **(WATCHED | CONTINUED | changes)))
    assert words in error.value.found


def test_guidance_needs_the_empty_prompt_in_the_cache(ti2v, tmp_path):
    options = ti2v.options(tmp_path, **WATCHED, **CONTINUED)
    samples = read_samples(options, MODEL)
    assert all(cached.empty for cached in find_entries(options, MODEL, samples))
    for other in ({"continuation_guidance": 1.0}, {"sample_continuations": 0}):
        assert not any(cached.empty for cached in find_entries(replace(options, **other), MODEL, samples))
    trained, judged = read_training_samples(replace(options, condition_frames=5), MODEL)
    assert all(cached.empty for cached in judged)
    assert not any(cached.empty for cached in trained)


def test_frames_guide_where_training_left_them_out_at_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    guides: list[bool] = []
    monkeypatch.setattr(continuing, "make_clips", lambda *_words, frames_guide, **_named: guides.append(frames_guide))
    given = Train(output_dir=tmp_path, output_name="n", condition_frames=1, sample_continuations=1)
    for changes in ({"condition_dropout": 0.1}, {"caption_dropout": 0.1}):
        plan: Any = SimpleNamespace(options=replace(given, **changes), held_out=[], model=None)
        continuing.Continuing(plan, Ranks())
    assert guides == [True, False]
