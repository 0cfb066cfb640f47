"""Frames of samples, and their recipes: exactly what changes the bytes changes them."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_clip, make_image
from PIL import Image

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.generator.steps import CheckCache
from wangen.runtime.media import control_frames, load_clip, load_image, mask_frames, target_frames
from wangen.runtime.samples import Sample, read_samples

MODEL = profiles.model("t2v-1.3B")
KINDS = ("latent", "control", "image", "clip", "mask", "text")


def write_toml(folder: Path, *blocks: str, general: str = "resolution = [64, 64]") -> Path:
    path = folder / "set.toml"
    text = "".join(f"[[datasets]]\ncache_directory = '{folder.as_posix()}/cache'\n{block}\n" for block in blocks)
    path.write_text(f"[general]\n{general}\n{text}".replace("@", folder.as_posix()), encoding="utf-8")
    return path


def samples_of(toml: Path, model: profiles.Model = MODEL) -> list[Sample]:
    return read_samples(CheckCache(dataset_config=toml), model)


def make_mask(path: Path, size: tuple[int, int] = (128, 96)) -> Path:
    """White on its left half."""
    image = Image.new("L", size, 0)
    image.paste(255, (0, 0, size[0] // 2, size[1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


IMAGES = "image_directory = '@/media'\ncontrol_directory = '@/lines'\nmask_directory = '@/masks'"
CLIPS = "video_directory = '@/clips'\ncontrol_directory = '@/depth'\nmask_directory = '@/areas'\ntarget_frames = [5]\n"


@pytest.fixture
def picture(tmp_path: Path) -> Sample:
    """An image with two control images and a mask."""
    make_image(tmp_path / "media/cat.png", (128, 96), seed=1)
    (tmp_path / "media/cat.txt").write_text("a cat\na red cat")
    make_image(tmp_path / "lines/cat_0.png", (200, 150), seed=2)
    make_image(tmp_path / "lines/cat_1.png", (96, 128), seed=3)
    make_mask(tmp_path / "masks/cat.png")
    (sample,) = samples_of(write_toml(tmp_path, IMAGES + "\nmultiple_captions = true"))
    return sample


@pytest.fixture
def moving(tmp_path: Path) -> Sample:
    """The second window of a clip, with a control clip of another frame rate and a still mask."""
    make_clip(tmp_path / "clips/walk.mp4", 20, size=(128, 96), seed=1)
    (tmp_path / "clips/walk.txt").write_text("a walk")
    make_clip(tmp_path / "depth/walk.mkv", 40, fps=32, size=(128, 96), seed=2)
    make_mask(tmp_path / "areas/walk.png")
    return samples_of(write_toml(tmp_path, CLIPS + "frame_extraction = 'chunk'"))[1]


# Frames


def test_frames_of_an_image_its_control_images_and_its_mask(picture: Sample, tmp_path: Path):
    assert (picture.size, picture.count, len(picture.controls)) == ((64, 64), 1, 2)
    assert (target_frames(picture) == load_image(tmp_path / "media/cat.png", (64, 64))).all()
    for number in (0, 1):
        assert (control_frames(picture, number) == load_image(tmp_path / f"lines/cat_{number}.png", (64, 64))).all()
    mask = mask_frames(picture)
    assert (mask.shape, mask.dtype) == ((1, 1, 64, 64), np.uint8)
    assert (mask[..., :30] == 255).all()
    assert (mask[..., 34:] == 0).all()  # cut at the centre as the picture is: the edge stays in the middle


def test_frames_of_a_clip_its_control_clip_and_its_still_mask(moving: Sample, tmp_path: Path):
    assert (moving.start, moving.count) == (5, 5)
    wanted = load_clip(tmp_path / "clips/walk.mp4", (64, 64), 5, 5, 16)
    assert (target_frames(moving) == wanted).all()
    assert (target_frames(moving, first_only=True) == wanted[:, :1]).all()
    depth = load_clip(tmp_path / "depth/walk.mkv", (64, 64), 0, 20, 16)
    assert (control_frames(moving, 0) == depth[:, 5:10]).all()
    mask = mask_frames(moving)
    assert mask.shape == (1, 5, 64, 64)
    assert (mask == mask[:, :1]).all()


def test_a_mask_that_moves(tmp_path: Path):
    make_clip(tmp_path / "clips/walk.mp4", 9, seed=1)
    (tmp_path / "clips/walk.txt").write_text("a walk")
    make_clip(tmp_path / "depth/walk.mp4", 9, seed=2)
    make_clip(tmp_path / "areas/walk.mp4", 9, seed=3)
    (sample,) = samples_of(write_toml(tmp_path, CLIPS))
    mask = mask_frames(sample)
    assert mask.shape == (1, 5, 64, 64)
    assert np.abs(np.diff(mask.astype(int), axis=1)).max() > 5
    colour = load_clip(tmp_path / "areas/walk.mp4", (64, 64), 0, 5, 16).astype(float)
    assert np.abs((colour * np.array([0.299, 0.587, 0.114])[:, None, None, None]).sum(0) - mask[0]).max() < 12


def test_what_is_transparent_in_a_mask_does_not_count(tmp_path: Path):
    pixels = np.full((96, 128, 4), 255, np.uint8)
    pixels[:, 64:, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "mask.png")
    mask = load_image(tmp_path / "mask.png", (64, 48), grey=True)[0, 0]
    assert (mask[:, :30] == 255).all()
    assert (mask[:, 34:] == 0).all()
    edges = load_image(make_mask(tmp_path / "hard.png", (640, 480)), (64, 48), grey=True)[0, 0]
    assert (np.diff(edges.astype(int), axis=1) <= 0).all()  # Lanczos would ring


def test_the_background_colour_lies_behind_what_is_transparent(tmp_path: Path):
    pixels = np.zeros((64, 64, 4), np.uint8)
    pixels[:, 32:] = (10, 20, 30, 255)
    (tmp_path / "media").mkdir()
    Image.fromarray(pixels).save(tmp_path / "media/a.png")
    (tmp_path / "media/a.txt").write_text("x")
    (plain,) = samples_of(write_toml(tmp_path, "image_directory = '@/media'"))
    (green,) = samples_of(write_toml(tmp_path, "image_directory = '@/media'\nbackground_color = '#00ff7f'"))
    assert (target_frames(plain)[:, 0, :, 0] == 255).all()
    assert target_frames(green)[:, 0, 0, 0].tolist() == [0, 255, 127]
    assert target_frames(green)[:, 0, 0, 40].tolist() == [10, 20, 30]
    assert plain.latent_recipe() != green.latent_recipe()
    assert "background" not in plain.latent_recipe()  # entries of before keep their keys


def test_the_background_colour_changes_nothing_behind_an_opaque_picture(tmp_path: Path):
    (tmp_path / "media").mkdir()
    make_image(tmp_path / "media/a.png", (64, 64), seed=1)
    (tmp_path / "media/a.txt").write_text("x")
    (plain,) = samples_of(write_toml(tmp_path, "image_directory = '@/media'"))
    (green,) = samples_of(write_toml(tmp_path, "image_directory = '@/media'\nbackground_color = '#00ff7f'"))
    assert plain.latent_recipe() == green.latent_recipe()
    assert np.array_equal(target_frames(plain), target_frames(green))


@pytest.mark.parametrize("suffix", [".webp", ".png", ".avif"])
def test_of_an_animation_the_first_frame_is_used(tmp_path: Path, suffix: str):
    frames = [Image.new("RGB", (64, 48), colour) for colour in ((200, 30, 30), (30, 200, 30), (30, 30, 200))]
    path = tmp_path / f"a{suffix}"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=100)
    with Image.open(path) as image:
        assert getattr(image, "n_frames", 1) == 3
    assert np.abs(load_image(path, (64, 48)).astype(int).mean(axis=(1, 2, 3)) - (200, 30, 30)).max() < 8


def test_threads_decode_as_one_thread_does(tmp_path: Path):
    for seed, suffix in enumerate((".png", ".jpg", ".webp", ".avif", ".bmp"), 1):
        make_image(tmp_path / f"a{suffix}", (150, 100), seed=seed)
    clip = make_clip(tmp_path / "a.mp4", 9)
    jobs: list[Callable[[], np.ndarray]] = [lambda: load_clip(clip, (64, 48), 0, 9, 16)]
    jobs += [lambda path=path: load_image(path, (64, 48)) for path in sorted(tmp_path.glob("a.*")) if path != clip]
    alone = [job() for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        for number, frames in enumerate(pool.map(lambda job: job(), jobs * 6)):
            assert (frames == alone[number % len(jobs)]).all()


# Recipes


def recipes(sample: Sample) -> dict[str, str]:
    """Each kind's recipe as text."""
    found: dict[str, Any] = {
        "latent": sample.latent_recipe(), "control": [sample.control_recipe(i) for i in range(len(sample.controls))],
        "image": sample.image_recipe(), "clip": sample.clip_recipe(), "mask": sample.mask_recipe(),
        "text": sample.text_recipes(),
    }  # fmt: skip
    return {kind: json.dumps(recipe, sort_keys=True) for kind, recipe in found.items()}


def changed(before: Sample, after: Sample) -> set[str]:
    old, new = recipes(before), recipes(after)
    return {kind for kind in KINDS if old[kind] != new[kind]}


def test_recipes_of_an_image(picture: Sample):
    assert picture.latent_recipe() == {
        "source": picture.source.digest, "width": 64, "height": 64, "resize": "lanczos, cover, centre", "frames": 1,
    }  # fmt: skip
    assert picture.image_recipe() == {**picture.latent_recipe(), "condition": "first frame, then grey"}
    assert picture.control_recipe(1) == {**picture.latent_recipe(), "source": picture.controls[1].digest}
    assert picture.text_recipes() == [{"caption": "a cat"}, {"caption": "a red cat"}]
    assert picture.mask is not None
    assert picture.mask_recipe() == {
        "source": picture.mask.digest, "width": 64, "height": 64, "resize": "bilinear, cover, centre", "frames": 1,
        "stride_frames": 4, "stride_px": 8,
    }  # fmt: skip


def test_a_changed_file_changes_its_own_recipe_alone(picture: Sample, tmp_path: Path):
    def again() -> Sample:
        (sample,) = samples_of(tmp_path / "set.toml")
        return sample

    make_image(tmp_path / "lines/cat_1.png", (96, 128), seed=9)
    control = again()
    assert changed(picture, control) == {"control"}
    assert picture.control_recipe(0) == control.control_recipe(0)
    Image.new("L", (128, 96), 90).save(tmp_path / "masks/cat.png")
    mask = again()
    assert changed(control, mask) == {"mask"}
    (tmp_path / "media/cat.txt").write_text("a cat\na blue cat")
    text = again()
    assert changed(mask, text) == {"text"}
    make_image(tmp_path / "media/cat.png", (128, 96), seed=8)
    assert changed(text, again()) == {"latent", "image", "clip"}


def test_what_of_the_toml_changes_which_recipe(moving: Sample):
    entry, encoded = moving.entry, {"latent", "control", "image", "clip"}
    assert changed(moving, replace(moving, size=(64, 48))) == encoded | {"mask"}
    assert changed(moving, replace(moving, count=9)) == {"latent", "control", "image", "mask"}
    assert changed(moving, replace(moving, start=6)) == encoded  # the mask is a still picture
    assert changed(moving, replace(moving, fps=24)) == encoded
    assert changed(moving, replace(moving, entry=replace(entry, source_fps=16.0))) == encoded
    assert changed(moving, replace(moving, entry=replace(entry, background_color="#000000"))) == set()
    assert changed(moving, replace(moving, stride_px=16)) == {"mask"}
    assert changed(moving, replace(moving, entry=replace(entry, num_repeats=3, batch_size=2))) == set()


def test_clip_sees_the_first_frame_alone(moving: Sample):
    first = replace(moving, start=0)
    assert first.clip_recipe() == replace(first, count=17, fps=24).clip_recipe()
    assert first.clip_recipe() != replace(first, entry=replace(first.entry, source_fps=8.0)).clip_recipe()
    assert moving.clip_recipe() != replace(moving, fps=24).clip_recipe()


def test_strides_and_steps_are_those_of_the_profile(tmp_path: Path):
    make_clip(tmp_path / "clips/walk.mp4", 20, size=(300, 200))
    (tmp_path / "clips/walk.txt").write_text("a walk")
    make_clip(tmp_path / "depth/walk.mp4", 20)
    make_mask(tmp_path / "areas/walk.png", (300, 200))
    toml = write_toml(tmp_path, CLIPS, general="resolution = [250, 150]\nenable_bucket = true")
    (small,) = samples_of(toml, MODEL)
    (large,) = samples_of(toml, profiles.model("ti2v-5B"))
    assert (small.size, small.fps, small.mask_recipe()["stride_px"]) == ((224, 160), 16, 8)
    assert (large.size, large.fps, large.mask_recipe()["stride_px"]) == ((224, 160), 24, 16)
    assert all(side % 32 == 0 for side in large.size)


@pytest.mark.parametrize("enable_bucket", [True, False])
def test_clips_and_images_share_the_rule_of_buckets(tmp_path: Path, enable_bucket: bool):
    for name, size in (("wide", (160, 96)), ("tall", (96, 160))):
        make_image(tmp_path / f"media/{name}.png", size)
        make_clip(tmp_path / f"clips/{name}.mp4", 5, size=size)
        for folder in ("media", "clips"):
            (tmp_path / folder / f"{name}.txt").write_text("x")
    blocks = ["image_directory = '@/media'", "video_directory = '@/clips'\ntarget_frames = [5]"]
    general = f"resolution = [80, 80]\nenable_bucket = {str(enable_bucket).lower()}"
    tall, wide, tall_clip, wide_clip = samples_of(write_toml(tmp_path, *blocks, general=general))
    assert (tall.size, wide.size) == (tall_clip.size, wide_clip.size)
    assert (tall.size != wide.size) == enable_bucket
    assert target_frames(tall_clip).shape == (3, 5, *tall.size[::-1])


# What is wrong


def test_problems_are_counted_and_each_is_named_once(tmp_path: Path):
    make_clip(tmp_path / "clips/short.mp4", 3)
    make_clip(tmp_path / "clips/quiet.mp4", 9)
    make_clip(tmp_path / "clips/good.mp4", 9)
    make_image(tmp_path / "media/plain.png")
    make_image(tmp_path / "media/bare.jpg")
    for name in ("short", "good"):
        (tmp_path / f"clips/{name}.txt").write_text("x")
    block = "video_directory = '@/clips'\ntarget_frames = [5]\nresolution = "
    toml = write_toml(tmp_path, "image_directory = '@/media'", f"{block}64", f"{block}32")
    with pytest.raises(WangenError) as raised:
        samples_of(toml)
    found = raised.value.found
    assert found.startswith("the dataset has 4 problems (3 without a caption, 1 too short):\n")
    for name in ("plain.png: has no", "bare.jpg: has no", "quiet.mp4: has no", "short.mp4: has 3 frames at 16 fps"):
        assert found.count(name) == 1
    assert "good.mp4" not in found


def test_lines_of_a_manifest_without_a_caption_are_counted_too(tmp_path: Path):
    make_image(tmp_path / "a.png")
    (tmp_path / "m.jsonl").write_text('{"file": "a.png"}\n')
    toml = write_toml(tmp_path, "manifest = '@/m.jsonl'")
    with pytest.raises(WangenError) as raised:
        samples_of(toml)
    assert raised.value.found.startswith("the dataset has 1 problem (1 without a caption):\n")


def test_control_media_and_masks_that_do_not_fit(tmp_path: Path):
    make_clip(tmp_path / "clips/walk.mp4", 20)
    make_clip(tmp_path / "depth/walk.mp4", 8)
    make_mask(tmp_path / "areas/walk.png", (64, 64))
    (tmp_path / "clips/walk.txt").write_text("a walk")
    toml = write_toml(tmp_path, CLIPS + "frame_extraction = 'chunk'")
    with pytest.raises(WangenError) as raised:
        samples_of(toml)
    assert "the dataset has 2 problems:" in raised.value.found
    assert "walk.mp4: has 8 frames at 16 fps, its clip uses 20" in raised.value.found
    assert "walk.png: is 64x64, its picture 64x48: not the same shape" in raised.value.found


def test_equal_stems_stay_different_samples(tmp_path: Path):
    for name in ("one/a.png", "one/a.jpg", "two/a.png"):
        make_image(tmp_path / name, seed=len(name) + ord(name[0]) + ord(name[-1]))
        (tmp_path / name).with_suffix(".txt").write_text(f"of {name[:3]}")
    lines = [{"image_path": name, "caption": name} for name in ("one/a.png", "one/a.jpg", "two/a.png")]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for blocks in (("image_directory = '@/one'", "image_directory = '@/two'"), ("image_jsonl_file = '@/set.jsonl'",)):
        samples = samples_of(write_toml(tmp_path, *blocks))
        assert len({json.dumps(sample.latent_recipe()) for sample in samples}) == len(samples) == 3
