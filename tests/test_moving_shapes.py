"""Drawn clips: what is drawn is what is seen, and what the captions say."""

import math

import pytest
import torch
from helpers import nearest_colour

from wangen.generator.dataset import media_of
from wangen.runtime.moving_shapes import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    Scene,
    draw,
    look,
    random_scene,
    read_clip,
    write_clips,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("motion", MOTIONS)
def test_a_drawn_clip_shows_its_colours_and_its_motion(shape, motion):
    for colour in COLOURS:
        scene = random_scene(shape, COLOURS[colour], BACKGROUNDS["white"], motion, generator())
        (video,), (coverage,) = draw([scene], 17, (64, 64))
        seen = look(video)
        assert nearest_colour(seen.colour, COLOURS) == colour
        assert nearest_colour(seen.background, BACKGROUNDS) == "white"
        assert seen.share == pytest.approx(coverage.mean().item(), rel=0.1)
        moved = (seen.path[-1] - seen.path[0]).tolist()
        assert moved == pytest.approx([0.35 * way for way in MOTIONS[motion]], abs=0.06)


def test_a_random_scene_stays_inside_the_picture():
    for seed in range(50):
        for motion in MOTIONS:
            scene = random_scene("square", COLOURS["red"], BACKGROUNDS["black"], motion, generator(seed))
            (video,), _ = draw([scene], 5, (32, 48))
            border = torch.cat([video[:, :, 0], video[:, :, -1]], dim=2)
            assert (border == 16).all()
            assert (video[:, :, :, [0, -1]] == 16).all()


@pytest.mark.parametrize(("shape", "share"), [("circle", math.pi), ("square", 4 * 0.85**2), ("triangle", 1.87)])
def test_each_shape_has_its_area(shape, share):
    scene = Scene(shape=shape, colour=(255, 0, 0), background=(0, 0, 0), centre=(0.5, 0.5), radius=0.3, travel=(0, 0))
    _, coverage = draw([scene], 1, (128, 128))
    assert coverage.mean().item() == pytest.approx(share * 0.3**2, rel=0.02)


def test_an_empty_clip_shows_no_shape():
    seen = look(torch.full((3, 5, 32, 32), 128, dtype=torch.uint8))
    assert (seen.share, seen.colour) == (0.0, (0.0, 0.0, 0.0))
    assert seen.path.isnan().all()


def test_written_clips_have_captions_and_are_not_written_again(tmp_path):
    scene = random_scene("circle", COLOURS["blue"], BACKGROUNDS["grey"], "moves up", generator())
    write_clips(tmp_path, {"clip": ("a blue circle", scene)}, 9, 64)
    write_clips(tmp_path, {"still": ("one", scene)}, 1, 64)
    assert {path.name: media_of(path) for path in tmp_path.glob("*.[mp]*")} == {
        "clip.mp4": "video",
        "still.png": "image",
    }
    assert (tmp_path / "clip.txt").read_text() == "a blue circle\n"
    frames = read_clip(tmp_path / "clip.mp4")
    assert frames.shape == (3, 9, 64, 64)
    assert nearest_colour(look(frames).colour, COLOURS) == "blue"
    (tmp_path / "clip.txt").write_text("mine\n")
    write_clips(tmp_path, {"clip": ("a blue circle", scene)}, 9, 64)
    assert (tmp_path / "clip.txt").read_text() == "mine\n"
