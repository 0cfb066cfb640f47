"""Generation: exact by seed, with LoRAs, in files that players read, and everything wrong refused at once."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from parity import CLIP, DIT, DITS, VAE22
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny import TinyRun

from wangen import profiles
from wangen.generator.commands import parse
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import Generate
from wangen.runtime import generate, train
from wangen.runtime.models import family
from wangen.runtime.sampling import videos
from wangen.runtime.sampling.options import prompts_of, resolved
from wangen.runtime.sampling.output import read_settings

CPU = torch.device("cpu")


def options_for(tiny_run: TinyRun, path: Path, **changes) -> Generate:
    options = Generate(
        **tiny_run.weights,
        task="t2v-1.3B",
        prompt="a red square",
        video_size=(64, 80),
        video_length=5,
        infer_steps=3,
        guidance_scale=1.0,
        save_path=path,
        device="cpu",
    )
    return replace(options, **changes)


def frames_of(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_a_clip_has_the_frames_size_and_rate_asked_for_and_is_exact_by_seed(tiny_run, tmp_path):
    for name in ("a.mp4", "b.mp4"):
        generate.run(options_for(tiny_run, tmp_path / name, fps=8))
    assert frames_of(tmp_path / "a.mp4").shape == (5, 64, 80, 3)
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.streams.video[0].average_rate == 8
        settings = json.loads(container.metadata["wangen"])
    assert settings["seed"] == 42
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    generate.run(options_for(tiny_run, tmp_path / "c.mp4", seed=43))
    assert not np.array_equal(frames_of(tmp_path / "a.mp4"), frames_of(tmp_path / "c.mp4"))


def test_one_frame_is_a_png_and_a_folder_gets_a_name_by_seed(tiny_run, tmp_path):
    report = generate.run(options_for(tiny_run, tmp_path / "images", video_length=1, seed=7))
    assert report.result["file"] == tmp_path / "images/seed-7.png"
    with Image.open(tmp_path / "images/seed-7.png") as image:
        assert image.size == (80, 64)
        assert json.loads(image.text["wangen"])["prompt"] == "a red square"


def test_a_lora_changes_the_picture_and_strength_zero_does_not(tiny_run, lora, tmp_path):
    pictures = {}
    for name, changes in {
        "base": {},
        "lora": {"lora_weight": (lora,)},
        "zero": {"lora_weight": (lora,), "lora_multiplier": (0.0,)},
    }.items():
        generate.run(options_for(tiny_run, tmp_path / f"{name}.png", video_length=1, **changes))
        pictures[name] = np.asarray(Image.open(tmp_path / f"{name}.png"))
    assert not np.array_equal(pictures["base"], pictures["lora"])
    assert np.array_equal(pictures["base"], pictures["zero"])


def test_guidance_and_both_samplers_give_pictures_of_their_own(tiny_run, tmp_path):
    pictures = []
    for number, changes in enumerate(
        [{}, {"guidance_scale": 5.0, "negative_prompt": "a blue wall"}, {"sample_solver": "euler"}, {"flow_shift": 3.0}]
    ):
        path = tmp_path / f"{number}.png"
        generate.run(options_for(tiny_run, path, video_length=1, **changes))
        pictures.append(np.asarray(Image.open(path)).tobytes())
    assert len(set(pictures)) == 4


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"video_size": (60, 64)}, "use 64 64"),
        ({"video_length": 80}, "use 81"),
        ({"save_path": Path("x.png")}, "a .png holds one frame"),
        ({"lora_multiplier": (1.0,)}, "0 --lora_weight and 1 --lora_multiplier"),
        ({"lora_weight": (Path("a"),), "lora_multiplier": (1e40,)}, "--lora_multiplier 1e+40: the model computes"),
        ({"infer_steps": 0}, "at least 1"),
        ({"infer_steps": 5000}, "--infer_steps 5000 is no whole number from 1 to 1000"),
        ({"infer_steps": 5000}, "use for example 1000"),
        ({"video_size": (16400, 64)}, "--video_size 16400 is no whole number from 1 to 16384"),
        ({"video_size": (64, 16400)}, "use for example 16384"),
        ({"video_length": 16385}, "--video_length 16385 is no whole number from 1 to 16381"),
        ({"video_length": 16385}, "use for example 16381"),
        ({"save_path": Path("x.gif")}, "not .gif"),
        ({"num_videos": 2}, "--save_path names one file for 2 videos"),
        ({"prompt": None}, "needs --prompt"),
        ({"guidance_scale": 0.0}, "must be above 0"),
        ({"seed": -1}, "a seed is a whole number"),
        ({"dit_high_noise": Path("x")}, "--dit_high_noise: t2v-1.3B has one transformer"),
        ({"timestep_boundary": 0.9}, "--timestep_boundary: t2v-1.3B has one transformer"),
        ({"task": "t2v-A14B"}, "the high-noise expert of t2v-A14B has no weights"),
        ({"clip": CLIP}, "--clip: t2v-1.3B has no image encoder"),
        ({"image_path": Path("x.png")}, "takes no first frame"),
        ({"plain": True, "blocks_to_swap": 1}, "--plain knows no block swap"),
        ({"blocks_to_swap": 3}, "give 0 to 2"),
        ({"changed": True}, "--changed goes with --from"),
        ({"save_path": Path("x" * 252 + ".mp4")}, "give a shorter name"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_loads(tiny_run, tmp_path, monkeypatch, changes, part):
    monkeypatch.setattr(generate, "make_scenes", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UsageError) as error:
        generate.run(options_for(tiny_run, tmp_path / "a.mp4", **changes))
    assert part in str(error.value)


def test_a_folder_is_filled_without_overwriting(tiny_run, tmp_path):
    options = options_for(tiny_run, tmp_path, video_length=1, infer_steps=1)
    names = [generate.run(replace(options, prompt=prompt)).result["file"].name for prompt in ("a red square", "b")]
    assert names == ["seed-42.png", "seed-42-2.png"]


def test_a_place_that_cannot_be_written_is_refused_before_sampling(tiny_run, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WangenError, match="cannot make the folder"):
        generate.run(options_for(tiny_run, tmp_path / "file" / "a.mp4"))


def test_a_folder_that_is_called_like_a_video_is_refused_before_sampling(tiny_run, tmp_path):
    (tmp_path / "a.mp4").mkdir()
    with pytest.raises(UsageError, match=r"--save_path ends in \.mp4 and is a folder"):
        generate.run(options_for(tiny_run, tmp_path / "a.mp4"))


def test_the_longest_name_that_a_file_can_have_is_written(tiny_run, tmp_path):
    path = tmp_path / ("é" * 125 + "x.mp4")
    generate.run(options_for(tiny_run, path, infer_steps=1))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_weights_in_the_wrong_place_are_named(tiny_run, tmp_path):
    with pytest.raises(WangenError) as error:
        generate.run(options_for(tiny_run, tmp_path / "a.mp4", lora_weight=(tiny_run.weights["dit"],)))
    assert "--dit" in str(error.value)
    with pytest.raises(WangenError):
        generate.run(options_for(tiny_run, tmp_path / "a.mp4", dit=tiny_run.weights["vae"]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vae": VAE22}, "this is a Wan 2.2 VAE; --vae of t2v-1.3B takes a Wan 2.1 VAE"),
        ({"dit": DITS["dit_i2v21"]}, "image-to-video transformer .* --task i2v-14B"),
        ({"dit": DITS["dit_ti2v5b"]}, "--task ti2v-5B"),
        ({"t5": CLIP}, "a CLIP image encoder.* belongs to --clip"),
        ({"lora_weight": (DIT,)}, "transformer .*; --lora_weight takes a LoRA"),
        ({"dit": DITS["dit_t2v21"]}, "text embeddings 64 wide, where this transformer takes 4096"),
    ],
)
def test_files_of_another_model_are_named(tiny_run, tmp_path, change, words):
    options = options_for(tiny_run, tmp_path / "a.png", video_length=1, **change)
    with pytest.raises(WangenError) as caught:
        generate.run(options)
    assert re.search(words, str(caught.value).replace("\n", " "))


LINES = """# a video and a picture
a blue wall --f 5 --d 9
a red square --f 1 --s 1 --ss euler
"""


def test_a_prompt_file_makes_every_prompt_with_every_seed_and_loads_each_model_once(tiny_run, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text(LINES)
    loaded = []
    kind = family(profiles.model("t2v-1.3B"))
    for name in ("load_transformer", "load_vae", "load_prompt_encoder"):
        load = getattr(kind, name)
        monkeypatch.setattr(kind, name, partial(counted, loaded, name, load), raising=False)
    changes = {"prompt": None, "prompt_file": tmp_path / "p.txt", "video_size": (64, 64), "num_videos": 2}
    report = generate.run(options_for(tiny_run, tmp_path / "out", infer_steps=2, video_length=None, **changes))
    files = [file.relative_to(tmp_path / "out").as_posix() for file in report.result["files"]]
    assert files == ["001-seed-9.mp4", "001-seed-10.mp4", "002-seed-42.png", "002-seed-43.png"]
    assert sorted(loaded) == ["load_prompt_encoder", "load_transformer", "load_vae"]
    told = settings_in(tmp_path / "out/001-seed-10.mp4")
    assert (told["prompt"], told["infer_steps"], told["seed"], told["fps"]) == ("a blue wall", 2, 10, 16)
    one = options_for(tiny_run, tmp_path / "one.mp4", prompt="a blue wall", seed=10, infer_steps=2, video_size=(64, 64))
    generate.run(one)
    assert (tmp_path / "one.mp4").read_bytes() == (tmp_path / "out/001-seed-10.mp4").read_bytes()


def counted(calls: list[str], name: str, load, *words, **names):
    calls.append(name)
    return load(*words, **names)


def settings_in(path: Path) -> dict:
    return read_settings(path, "--from")


def test_what_neither_flags_nor_prompts_say_is_the_models_own(tiny_run):
    options = options_for(tiny_run, Path("a.mp4"), task="t2v-A14B", dit_high_noise=DIT, video_size=None,
                          video_length=None, infer_steps=None, guidance_scale=None)  # fmt: skip
    model = profiles.model("t2v-A14B")
    (prompt,) = prompts_of(resolved(options, model, CPU), model)
    assert (prompt.width, prompt.height, prompt.frames, prompt.fps, prompt.steps) == (832, 480, 81, 16, 40)
    assert (prompt.shift, prompt.guidance, prompt.guidance_high_noise, prompt.sampler) == (12.0, 3.0, 4.0, "unipc")
    (prompt,) = prompts_of(resolved(replace(options, guidance_scale=2.0), model, CPU), model)
    assert (prompt.guidance, prompt.guidance_high_noise) == (2.0, 2.0)
    assert resolved(replace(options, timestep_boundary=900), model, CPU).timestep_boundary == 0.9


@pytest.fixture(scope="module")
def usual(tiny_run, lora, tmp_path_factory) -> np.ndarray:
    return picture_of(tiny_run, tmp_path_factory.mktemp("usual"), lora_weight=(lora,))


def picture_of(tiny_run: TinyRun, folder: Path, **changes) -> np.ndarray:
    """What is shown at fewer steps, as numbers that can be subtracted."""
    generate.run(options_for(tiny_run, folder / "a.png", video_length=1, video_size=(64, 64), infer_steps=2, **changes))
    return np.asarray(Image.open(folder / "a.png")).astype(int)


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"blocks_to_swap": 1}, 1),
        ({"plain": True}, 1),
        ({"quantize": "int8"}, 8),
        pytest.param({"blocks_to_swap": 2}, 1, marks=pytest.mark.slow),
        pytest.param({"vae_cache_cpu": True}, 0, marks=pytest.mark.slow),
        pytest.param({"quantize": "fp8", "blocks_to_swap": 1}, 30, marks=pytest.mark.slow),
    ],
)
def test_ways_to_save_memory_show_the_same_picture(tiny_run, lora, usual, tmp_path, changes, bound):
    difference = np.abs(picture_of(tiny_run, tmp_path, lora_weight=(lora,), **changes) - usual).max()
    assert difference <= bound
    assert difference > 0 or "quantize" not in changes


@pytest.fixture(scope="module")
def lora(tiny_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    train.run(tiny_run.options(folder, max_train_steps=6, learning_rate=1e-2))
    return folder / "lora.safetensors"


def test_spellings_of_musubi_tuner_and_ours_mean_the_same():
    weights = "--dit d --vae v --t5 t --prompt a".split()
    ours = "--quantize fp8 --save_path o --lora_weight l --attention sdpa --sample_solver euler".split()
    theirs = "--fp8 --output_dir o --lora_weights l --attn_mode torch --sample_solver vanilla".split()
    assert parse(Generate, weights + ours) == parse(Generate, weights + theirs)
    assert parse(Generate, [*weights[:6], "--from", "f.mp4", "--save-path", "o"]).repeat == Path("f.mp4")


def test_full_memory_is_one_message_with_what_to_change(tiny_run, tmp_path, monkeypatch):
    def full(*_words, **_names):
        raise torch.OutOfMemoryError("CUDA out of memory")

    options = options_for(tiny_run, tmp_path / "a.mp4")
    monkeypatch.setattr("wangen.runtime.sampling.videos.denoise", full)
    with pytest.raises(WangenError, match="out of memory sampling 5 frames of 80x64") as caught:
        generate.run(options)
    assert "--quantize int8" in caught.value.cure
    assert "--blocks_to_swap" in caught.value.cure
    assert not (tmp_path / "a.mp4").exists()


def test_what_was_made_before_the_memory_was_full_is_kept(tiny_run, tmp_path, monkeypatch):
    sample = videos.denoise
    seeds = []

    def full_at_the_second(stages, noise, *words, **names):
        seeds.append(noise)
        if len(seeds) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sample(stages, noise, *words, **names)

    monkeypatch.setattr(videos, "denoise", full_at_the_second)
    with pytest.raises(WangenError, match="out of memory"):
        generate.run(options_for(tiny_run, tmp_path, video_length=1, infer_steps=1, num_videos=3))
    assert [path.name for path in tmp_path.iterdir()] == ["seed-42.png"]


def test_a_lora_of_another_size_is_refused_before_a_model_loads(tiny_run, lora, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "make_scenes", lambda *_: pytest.fail("a model was loaded"))
    small = tmp_path / "small.safetensors"
    tensors = load_file(lora)
    save_file(
        {name: value[:, :100].contiguous() if "lora_A" in name else value for name, value in tensors.items()}, small
    )
    with pytest.raises(WangenError, match="a model of another size"):
        generate.run(options_for(tiny_run, tmp_path / "a.mp4", lora_weight=(small,)))


def test_a_lora_that_holds_nan_is_refused_before_a_model_loads(tiny_run, lora, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "make_scenes", lambda *_: pytest.fail("a model was loaded"))
    tensors = load_file(lora)
    tensors[min(tensors)][0, 0] = torch.nan
    save_file(tensors, broken := tmp_path / "broken.safetensors")
    with pytest.raises(WangenError, match="this adapter holds NaN or infinity") as error:
        generate.run(options_for(tiny_run, tmp_path / "a.mp4", lora_weight=(broken,)))
    assert error.value.where == str(broken)


def test_a_loha_of_another_size_is_refused_before_a_model_loads(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "make_scenes", lambda *_: pytest.fail("a model was loaded"))
    shapes = {"hada_w1_a": (64, 4), "hada_w1_b": (4, 64), "hada_w2_a": (64, 4), "hada_w2_b": (4, 64)}
    file = tmp_path / "small.safetensors"
    save_file(
        {f"diffusion_model.blocks.0.self_attn.q.{name}": torch.ones(shape) for name, shape in shapes.items()}, file
    )
    with pytest.raises(WangenError, match="a model of another size") as error:
        generate.run(options_for(tiny_run, tmp_path / "a.mp4", lora_weight=(file,)))
    assert error.value.where == str(file)


def test_a_runs_folder_means_its_lora(tiny_run, lora, tmp_path):
    pictures = []
    for name, path in (("file", lora), ("folder", lora.parent)):
        generate.run(options_for(tiny_run, tmp_path / f"{name}.png", video_length=1, lora_weight=(path,)))
        pictures.append((tmp_path / f"{name}.png").read_bytes())
    assert pictures[0] == pictures[1]


def test_frames_that_are_no_numbers_are_not_written(tiny_run, tmp_path, monkeypatch):
    kind = family(profiles.model("t2v-1.3B"))
    decode = kind.decode_latents
    monkeypatch.setattr(
        kind, "decode_latents", lambda *given, **named: decode(*given, **named) * torch.nan, raising=False
    )
    with pytest.raises(WangenError, match="frames are not finite in float16") as caught:
        generate.run(options_for(tiny_run, tmp_path / "a.png", video_length=1, vae_dtype="float16"))
    assert "--vae_dtype" in caught.value.cure
    assert not (tmp_path / "a.png").exists()


def test_decoding_that_runs_out_of_memory_keeps_its_cache_on_the_host(tiny_run, tmp_path, monkeypatch, caplog):
    generate.run(options_for(tiny_run, tmp_path / "a.mp4"))
    kind = family(profiles.model("t2v-1.3B"))
    decode = kind.decode_latents

    def decode_with_little(vae, latents, *, cache_cpu, **named):
        if not cache_cpu:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(vae, latents, cache_cpu=cache_cpu, **named)

    monkeypatch.setattr(kind, "decode_latents", decode_with_little, raising=False)
    generate.run(options_for(tiny_run, tmp_path / "b.mp4"))
    assert "out of memory decoding a video: trying again" in caplog.text
    assert (tmp_path / "b.mp4").read_bytes() == (tmp_path / "a.mp4").read_bytes()
