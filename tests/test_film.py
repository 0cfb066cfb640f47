"""Clips of nearly the model's frame rate: film for 24, NTSC for 30, one frame for each and none twice."""

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from footage import counter, decoded, numbers, prepare, rows, waves, write_video
from helpers import make_clip
from stand_in_decoders import StandIn
from test_recipes import CLIPS, samples_of, write_toml

from wangen import profiles
from wangen.generator.dataset import read_facts
from wangen.generator.geometry import resampled_frames
from wangen.runtime.media import load_clip

SIZE = (64, 48)
FILM, NTSC = Fraction(24000, 1001), Fraction(30000, 1001)
MODEL_24 = profiles.model("ti2v-5B")


def film(path: Path, rate: Fraction, num_frames: int = 100, **words: str) -> Path:
    return write_video(path, [counter(number) for number in range(num_frames)], rate, **words)


def of_times(path: Path, rate: Fraction, num_frames: int = 100) -> Path:
    """Stamps in whole milliseconds on a finer clock, as when an mkv was copied into an mp4."""
    times_ms = [round(1000 * number / rate) for number in range(num_frames)]
    return write_video(path, [counter(number) for number in range(num_frames)], rate, times_ms=times_ms)


def npz(path: Path, rate: Fraction, num_frames: int = 100) -> Path:
    frames = np.stack([counter(number) for number in range(num_frames)])
    np.savez(path, frames=frames, fps=np.asarray(float(rate)))
    return path


@pytest.mark.parametrize(("rate", "fps"), [(FILM, 24), (NTSC, 30), (Fraction(2997, 125), 24), (2 * NTSC, 30)])
@pytest.mark.parametrize("kind", ["mp4", "matroska", "webm", "avi", "npz", "whole milliseconds"])
def test_frames_of_nearly_the_models_rate_come_one_for_one(tmp_path: Path, kind: str, rate: Fraction, fps: int):
    if kind == "npz":
        path = npz(tmp_path / "a.npz", rate)
    elif kind == "whole milliseconds":
        path = of_times(tmp_path / "a.mp4", rate)
    else:
        codec = {"webm": "libvpx-vp9", "avi": "mpeg4"}.get(kind, "libx264")
        path = film(tmp_path / "a.mp4", rate, format=kind, codec=codec)
    every = round(rate / fps)
    facts = read_facts(path)
    promised = resampled_frames(facts, fps)
    assert promised == facts.num_frames / every == 100 / every
    for start, count in ((0, promised), (7, promised - 7)):
        wanted = list(range(100))[start * every :: every]
        for decoder in ({"decoder": StandIn()} if kind in ("mp4", "matroska", "webm") else {}, {}):
            frames = load_clip(path, SIZE, start, count, fps, **decoder)
            frames = 255 - frames if decoder else frames
            assert numbers(frames.transpose(1, 2, 3, 0)) == wanted, (kind, decoder)


@pytest.mark.parametrize("rate", [16, 24, 30])
@pytest.mark.parametrize("decoder", [{}, {"decoder": StandIn()}])
def test_stamps_in_milliseconds_on_a_finer_clock_are_taken_as_an_mkvs(tmp_path: Path, rate: int, decoder: dict):
    """As of a recording that was copied into an mp4: of 81 frames at 24 fps 27 came twice, and as many never."""
    path = of_times(tmp_path / "a.mp4", Fraction(rate))
    assert not read_facts(path).on_clock
    assert read_facts(film(tmp_path / "b.mp4", Fraction(rate))).on_clock
    frames = load_clip(path, SIZE, 0, 100, rate, **decoder)
    frames = 255 - frames if decoder else frames
    assert numbers(frames.transpose(1, 2, 3, 0)) == list(range(100))


def test_a_source_fps_of_nearly_the_models_rate_takes_every_frame(tmp_path: Path):
    path = film(tmp_path / "a.mp4", Fraction(25))
    assert resampled_frames(read_facts(path), 24, 23.976) == 100
    assert numbers(load_clip(path, SIZE, 0, 100, 24, 23.976).transpose(1, 2, 3, 0)) == list(range(100))


def test_only_recipes_of_such_clips_differ_from_those_of_before(tmp_path: Path):
    """A control clip of another rate than its clip keeps to its own."""
    film(tmp_path / "clips/walk.mp4", FILM, 20)
    (tmp_path / "clips/walk.txt").write_text("a walk")
    make_clip(tmp_path / "depth/walk.mp4", 40, fps=24, seed=2)
    film(tmp_path / "areas/walk.mp4", FILM, 20)
    (sample,) = samples_of(write_toml(tmp_path, CLIPS), MODEL_24)
    before = {"start": 0, "frames": 5, "fps": 24, "source_fps": None, "width": 64, "height": 64}
    old = {"resize": "lanczos, cover, centre", **before}
    assert sample.control_recipe(0) == {"source": sample.controls[0].digest, **old}
    assert sample.latent_recipe() == {"source": sample.source.digest, **old, "pace": 23.976024}
    assert sample.mask_recipe()["pace"] == 23.976024
    (slower,) = samples_of(write_toml(tmp_path, CLIPS))
    of_times(tmp_path / "depth/walk.mp4", Fraction(24), 40)
    (copied,) = samples_of(write_toml(tmp_path, CLIPS), MODEL_24)
    assert copied.control_recipe(0) == {"source": copied.controls[0].digest, **old, "pace": 24.0}
    assert "pace" not in json.dumps([slower.latent_recipe(), slower.control_recipe(0), slower.mask_recipe()])


def test_clips_are_cut_from_film_frame_by_frame_and_no_cut_is_found(tmp_path: Path):
    """By clock some frames came twice, and the jump after each looked like a cut."""
    film_frames = waves(130, (128, 96), step=4)
    write_video(tmp_path / "videos/a.mkv", film_frames, FILM, format="matroska", crf=1)
    prepare(tmp_path / "videos", tmp_path / "out", task="ti2v-5B", resolution="128x96", frames=17)
    (first, second, *_) = rows(tmp_path / "out/train.jsonl")
    # The file counts in milliseconds.
    assert (first["start_s"], second["start_s"]) == (0.0, pytest.approx(float(17 / FILM), abs=5e-4))
    source, clip = decoded(tmp_path / "videos/a.mkv", (128, 96)), decoded(tmp_path / "out" / second["file"], (128, 96))
    steps = [np.abs(one.astype(int) - other).mean() for one, other in pairwise(clip)]
    assert max(steps) < 2 * min(steps), "none comes twice, and none is left out"
    assert np.abs(clip.astype(int) - source[17:34]).mean() < 3


def test_what_an_older_version_made_of_film_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And of other videos not."""
    for name, rate in (("film", FILM), ("other", Fraction(24))):
        write_video(tmp_path / f"videos/{name}.mkv", waves(40, seed=len(name)), rate, format="matroska")
    with monkeypatch.context() as older:
        for module in ("work", "cutting"):
            older.setattr(f"wangen.runtime.preprocess.{module}.manner", lambda *_: {})
        prepare(tmp_path / "videos", tmp_path / "out", task="ti2v-5B", resolution="64x64")
    before = times(tmp_path / "out")
    prepare(tmp_path / "videos", tmp_path / "out", task="ti2v-5B", resolution="64x64")
    after = times(tmp_path / "out")
    again = {name.partition("-")[0] for name in before if before[name] != after[name]}
    assert before.keys() == after.keys()
    assert again == {"film"}


def times(output: Path) -> dict[str, int]:
    """When each clip was written."""
    return {path.name: path.stat().st_mtime_ns for path in (output / "clips").iterdir()}


def jittered(path: Path, rate: float, jitter_ms: float, num_frames: int = 250) -> Path:
    """Stamps that a recorder took from a running clock."""
    chance = np.random.default_rng(3)
    off_ms = chance.uniform(-jitter_ms, jitter_ms, num_frames)
    times_ms = [1000 * number / rate + off_ms[number] + 20 for number in range(num_frames)]
    frames = [counter(number) for number in range(num_frames)]
    return write_video(path, frames, Fraction(24), times_ms=times_ms)


@pytest.mark.parametrize(("rate", "jitter_ms"), [(24.0, 0.3), (24.0, 5.0), (23.999, 0.0), (24.0002, 8.0)])
@pytest.mark.parametrize("decoder", [{}, {"decoder": StandIn()}])
def test_stamps_of_a_running_clock_drop_and_double_nothing(tmp_path: Path, rate: float, jitter_ms: float, decoder):
    path = jittered(tmp_path / "a.mp4", rate, jitter_ms)
    assert resampled_frames(read_facts(path), 24) == 250
    frames = load_clip(path, SIZE, 0, 250, 24, **decoder)
    frames = 255 - frames if decoder else frames
    assert numbers(frames.transpose(1, 2, 3, 0)) == list(range(250))


def test_frames_that_do_not_come_evenly_go_by_the_clock(tmp_path: Path):
    """One that is missing is no change of pace."""
    times_ms = [1000 * number / 30 for number in range(201) if number != 20]
    path = write_video(tmp_path / "a.mp4", [counter(number) for number in range(200)], 30, times_ms=times_ms)
    assert read_facts(path).rate == 0
    frames = numbers(load_clip(path, SIZE, 0, 200, 30).transpose(1, 2, 3, 0))
    assert frames == [*range(20), 19, *range(20, 199)]
