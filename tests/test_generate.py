"""Generation: exact by seed, with LoRAs, and in files that players read."""

import json
import re
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from parity import CLIP, DIT, DITS, VAE22
from PIL import Image
from tiny import TinyRun

from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import Generate
from wangen.runtime import generate, train


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


def test_a_lora_changes_the_picture_and_strength_zero_does_not(tiny_run, tmp_path):
    train.run(tiny_run.options(tmp_path, max_train_steps=10, learning_rate=1e-2))
    lora = (tmp_path / "lora.safetensors",)
    pictures = {}
    for name, changes in {
        "base": {},
        "lora": {"lora_weight": lora},
        "zero": {"lora_weight": lora, "lora_multiplier": (0.0,)},
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
        ({"infer_steps": 0}, "at least 1"),
        ({"save_path": Path("x.gif")}, "not .gif"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_loads(tiny_run, tmp_path, changes, part):
    with pytest.raises(UsageError) as error:
        generate.run(options_for(tiny_run, tmp_path / "a.mp4", **changes))
    assert part in str(error.value)


def test_a_folder_is_filled_without_overwriting(tiny_run, tmp_path):
    options = options_for(tiny_run, tmp_path, video_length=1, infer_steps=1)
    assert [generate.run(options).result["file"].name for _ in range(2)] == ["seed-42.png", "seed-42-2.png"]


def test_a_place_that_cannot_be_written_is_refused_before_sampling(tiny_run, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WangenError, match="cannot make the folder"):
        generate.run(options_for(tiny_run, tmp_path / "file" / "a.mp4"))


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
