"""Videos whose files say that the picture be mirrored, or that its pixels are not square: as ffmpeg shows them."""

import subprocess
from fractions import Fraction
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from footage import decoded, prepare, rows, write_video
from PIL import Image
from stand_in_decoders import StandIn
from test_recipes import CLIPS, samples_of, write_toml

from wangen.generator.dataset import read_facts
from wangen.generator.geometry import manner
from wangen.runtime.media import (
    control_frames,
    load_clip,
    load_numbered,
    load_pictures,
    mask_frames,
    target_frames,
)

SIZE = (64, 48)
MIRRORED = {
    "h": ("0", "-display_hflip"), "v": ("0", "-display_vflip"), "quarter h": ("90", "-display_hflip"),
    "quarter v": ("90", "-display_vflip"), "half h": ("180", "-display_hflip"),
}  # fmt: skip
TURNED = {
    "quarter": ("90",),
    "half": ("180",),
    "three quarters": ("270",),
    "both": ("0", "-display_hflip", "-display_vflip"),
}


def corners(size: tuple[int, int] = SIZE) -> np.ndarray:
    """(H, W, 3) uint8: each quarter of another colour."""
    width, height = size
    pixels = np.full((height, width, 3), 30, np.uint8)
    pixels[: height // 2, : width // 2] = (200, 40, 40)
    pixels[: height // 2, width // 2 :] = (40, 180, 60)
    pixels[height // 2 :, : width // 2] = (40, 60, 210)
    return pixels


def displayed(folder: Path, words: tuple[str, ...], name: str = "a.mp4") -> Path:
    """A video with the display matrix that ffmpeg writes for these flags."""
    plain = write_video(folder / "plain.mp4", [corners()] * 20, 16)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    line = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", "-display_rotation", *words, "-i", str(plain),
            "-c", "copy", str(path)]  # fmt: skip
    subprocess.run(line, check=True)
    return path


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found.astype(int) - wanted).mean())


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize("words", [*MIRRORED.values(), *TURNED.values()], ids=[*MIRRORED, *TURNED])
def test_a_clip_is_turned_and_mirrored_as_ffmpeg_does(tmp_path: Path, words: tuple[str, ...], suffix: str):
    path = displayed(tmp_path, words, f"a{suffix}")
    facts = read_facts(path)
    size = (facts.width, facts.height)
    assert size == (SIZE[::-1] if words[0] in ("90", "270") else SIZE)
    wanted = decoded(path, size)[:5]
    assert difference(load_clip(path, size, 0, 5, 16).transpose(1, 2, 3, 0), wanted) < 3
    assert difference(load_numbered(path, size, range(5)).transpose(1, 2, 3, 0), wanted) < 3
    assert difference(np.asarray(load_pictures(path, 1, 64)[0]), wanted[0]) < 3
    assert manner(facts, 16) == ({"mirrored": True} if words in MIRRORED.values() else {})


def test_a_mirrored_clip_is_left_to_pyav(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = displayed(tmp_path, MIRRORED["v"])
    assert (load_clip(path, SIZE, 0, 5, 16, decoder=StandIn()) == load_clip(path, SIZE, 0, 5, 16)).all()
    assert "its picture is to be mirrored" in caplog.text


def test_clips_are_cut_mirrored(tmp_path: Path):
    path = displayed(tmp_path, MIRRORED["h"], "videos/a.mp4")
    prepare(tmp_path / "videos", tmp_path / "out", keep_all=True)
    (clip, *_) = rows(tmp_path / "out/train.jsonl")
    assert difference(decoded(tmp_path / "out" / clip["file"])[0], decoded(path)[0]) < 3
    assert difference(decoded(path)[0], corners()[:, ::-1]) < 3


def stretched(path: Path, aspect: Fraction, turned: str = "0") -> Path:
    """`corners` stored narrower or wider by the aspect of its pixels."""
    stored = Image.fromarray(corners()).resize((round(64 / aspect), 48), Image.Resampling.BOX)
    container = "matroska" if path.suffix == ".mkv" else "mp4"
    frames = [np.asarray(stored)] * 20
    plain = write_video(path.parent.parent / f"stored-{path.name}", frames, 16, aspect=aspect, format=container)
    path.parent.mkdir(exist_ok=True)
    line = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", "-display_rotation", turned, "-i", str(plain),
            "-c", "copy", str(path)]  # fmt: skip
    subprocess.run(line, check=True)
    return path


@pytest.mark.parametrize("turned", ["0", "90", "180"])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize("aspect", [Fraction(2), Fraction(4, 3), Fraction(2, 3)])
def test_pixels_that_are_not_square_become_square(tmp_path: Path, aspect: Fraction, suffix: str, turned: str):
    path = stretched(tmp_path / f"a{suffix}", aspect, turned)
    facts = read_facts(path)
    quarters = int(turned) // 90
    wanted = np.rot90(corners(), quarters)
    size = (wanted.shape[1], wanted.shape[0])
    assert (facts.width, facts.height) == size
    assert difference(load_clip(path, size, 3, 5, 16)[:, 2].transpose(1, 2, 0), wanted) < 5
    assert difference(load_numbered(path, size, range(5, 6))[:, 0].transpose(1, 2, 0), wanted) < 5
    (picture,) = load_pictures(path, 1, 64)
    assert picture.size == size
    assert difference(np.asarray(picture), wanted) < 5


def test_pixels_that_are_nearly_square_stay_as_they_are(tmp_path: Path):
    path = write_video(tmp_path / "a.mp4", [corners()] * 20, 16, aspect=Fraction(1001, 1000))
    facts = read_facts(path)
    assert (facts.width, facts.height, facts.aspect) == (*SIZE, 1.0)
    assert difference(load_clip(path, SIZE, 0, 1, 16)[:, 0].transpose(1, 2, 0), corners()) < 3


def test_a_clip_whose_pixels_are_not_square_is_left_to_pyav(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = stretched(tmp_path / "a.mp4", Fraction(4, 3))
    assert (load_clip(path, SIZE, 0, 5, 16, decoder=StandIn()) == load_clip(path, SIZE, 0, 5, 16)).all()
    assert "its pixels are not square" in caplog.text


def test_items_controls_and_masks_are_squared_alike_and_only_their_recipes_differ(tmp_path: Path):
    for folder, aspect in (("clips", Fraction(4, 3)), ("areas", Fraction(2))):
        stretched(tmp_path / folder / "walk.mp4", aspect)
    write_video(tmp_path / "depth/walk.mp4", [corners()] * 20, 16)
    (tmp_path / "clips/walk.txt").write_text("a walk")
    (sample,) = samples_of(write_toml(tmp_path, CLIPS + "enable_bucket = true"))
    assert sample.size == (80, 48)
    pictures = [target_frames(sample), control_frames(sample, 0)]
    assert difference(*pictures) < 5
    grey = np.asarray(Image.fromarray(pictures[0][:, 0].transpose(1, 2, 0)).convert("L"))
    assert difference(mask_frames(sample)[0, 0], grey) < 8
    plain = sample.control_recipe(0)
    assert "aspect" not in plain
    assert sample.latent_recipe() == {**plain, "source": sample.source.digest, "aspect": pytest.approx(4 / 3, abs=1e-6)}
    assert sample.mask_recipe()["aspect"] == 2.0
    assert sample.clip_recipe()["aspect"] == sample.latent_recipe()["aspect"]
