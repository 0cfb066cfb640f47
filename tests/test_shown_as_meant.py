"""Videos whose files say that the picture be mirrored, or that its pixels are not square: as ffmpeg shows them."""

import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from footage import decoded, prepare, rows, write_video
from stand_in_decoders import StandIn

from wangen.generator.dataset import read_facts
from wangen.generator.geometry import manner
from wangen.runtime.media import load_clip, load_numbered, load_pictures

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
