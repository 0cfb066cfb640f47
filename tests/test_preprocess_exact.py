"""Frame k of a clip is what is on screen at k / fps in its video, whatever the video is; judged by ffmpeg's decoder."""

import subprocess
from fractions import Fraction
from math import ceil
from pathlib import Path

import av
import imageio_ffmpeg
import numpy as np
import pytest
from footage import SIZE, clips, counter, decoded, numbers, prepare, write_video

from wangen.runtime import preprocess
from wangen.runtime.media import load_clip

FPS = 16
COUNT = 110
JUMPY_MS = [int(number * 40 + (number % 7) * 5 + (400 if number > 70 else 0)) for number in range(COUNT)]


def video(folder: Path, kind: str) -> list[Fraction]:
    """Write a video that counts, and return when each frame comes on, in seconds."""
    frames = [counter(number) for number in range(COUNT)]
    rates = {"25": Fraction(25), "ntsc": Fraction(30000, 1001), "60": Fraction(60), "8": Fraction(8)}
    rates["mkv"] = Fraction(25)
    if kind in rates:
        mkv = kind == "mkv"
        write_video(folder / f"a.{'mkv' if mkv else 'mp4'}", frames, rates[kind], format="matroska" if mkv else "mp4")
        return [number / rates[kind] for number in range(COUNT + 1)]
    if kind == "jumpy":  # a frame rate that varies, with a gap of 0.4 s
        write_video(folder / "a.mp4", frames, times_ms=JUMPY_MS)
        return [Fraction(time, 1000) for time in (*JUMPY_MS, JUMPY_MS[-1] + 40)]
    if kind == "twice":  # two frames with each time stamp, of which the first is never seen
        times_ms = [number // 2 * 80 for number in range(COUNT)]
        write_video(folder / "a.mkv", frames, times_ms=times_ms, codec="ffv1", format="matroska")
        return [Fraction(time, 1000) for time in (*times_ms, times_ms[-1] + 40)]
    codec, format = {"avi": ("mpeg4", "avi"), "h264.avi": ("libx264", "avi"), "ts": ("libx264", "mpegts")}[kind]
    name, bframes = ("a.mpg" if kind == "ts" else "a.avi"), (3 if kind == "h264.avi" else 0)
    write_video(folder / name, frames, codec=codec, format=format, bframes=bframes)
    return [number / Fraction(25) for number in range(COUNT + 1)]


@pytest.mark.parametrize(
    "kind",
    [
        "25",
        "ntsc",
        "jumpy",
        "h264.avi",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("60", "8", "mkv", "twice", "avi", "ts")),
    ],
)
def test_every_frame_of_every_clip_is_the_one_on_screen(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(preprocess.cutting, "JOB_FRAMES", 20)  # enter the video at many places
    (tmp_path / "videos").mkdir()
    times = video(tmp_path / "videos", kind)
    prepare(tmp_path / "videos", tmp_path / "out", stride=7, cut_threshold=100, keep_all=True)
    found = clips(tmp_path / "out")
    shown = [max(number for number, time in enumerate(times[:-1]) if time <= Fraction(k, FPS))
             for k in range(ceil(times[-1] * FPS))]  # fmt: skip
    assert len(found) == (len(shown) - 9) // 7 + 1
    for row, start in zip(found, range(0, len(shown), 7), strict=False):
        path = tmp_path / "out" / row["file"]
        assert numbers(decoded(path)) == shown[start : start + 9]
        assert (row["start_s"], row["end_s"]) == (start / FPS, (start + 9) / FPS)
        with av.open(str(path)) as container:
            (stream,) = container.streams
            times_of_clip = [frame.time for frame in container.decode(stream)]
            assert (stream.type, stream.average_rate, stream.frames) == ("video", FPS, 9)
        assert times_of_clip == [k / FPS for k in range(9)]


def test_the_video_is_entered_near_the_clip(tmp_path, monkeypatch):
    """Not read from its start for each one: the frames come from a seek, or the test fails."""
    monkeypatch.setattr(preprocess.cutting, "JOB_FRAMES", 20)
    monkeypatch.setattr(preprocess.cutting, "shown_frames", lambda *_: pytest.fail("read from the start"))
    monkeypatch.setattr(preprocess.cutting, "PREROLL_S", 0.5)
    (tmp_path / "videos").mkdir()
    video(tmp_path / "videos", "25")
    prepare(tmp_path / "videos", tmp_path / "out", cut_threshold=100, keep_all=True)
    rows = clips(tmp_path / "out")
    assert numbers(decoded(tmp_path / "out" / rows[-1]["file"]))[0] == int(rows[-1]["start_s"] * 25 + 1e-9)


def test_a_seek_that_leads_astray_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "videos").mkdir()
    video(tmp_path / "videos", "25")
    monkeypatch.setattr(preprocess.cutting, "PREROLL_S", -3.0)  # behind the frames that are wanted
    prepare(tmp_path / "videos", tmp_path / "out", cut_threshold=100, keep_all=True)
    rows = clips(tmp_path / "out")
    assert [numbers(decoded(tmp_path / "out" / row["file"]))[0] for row in rows] == [
        int(number * 9 * 25 / FPS) for number in range(len(rows))
    ]


def test_a_phone_s_video_stands_upright(tmp_path):
    lying = [np.rot90(counter(number, (64, 48))).copy() for number in range(40)]
    flat = write_video(tmp_path / "flat.mp4", lying)
    (tmp_path / "videos").mkdir()
    words = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-display_rotation", "-90", "-i", str(flat),
             "-c", "copy", str(tmp_path / "videos" / "phone.mp4")]  # fmt: skip
    subprocess.run(words, check=True)
    prepare(tmp_path / "videos", tmp_path / "out", cut_threshold=100, keep_all=True)
    row = clips(tmp_path / "out")[0]
    assert row["signals"]["visible"] == 1
    assert numbers(decoded(tmp_path / "out" / row["file"])) == [int(k * 25 / FPS) for k in range(9)]


def test_pixels_become_square(tmp_path):
    narrow = [counter(number, (32, 48)) for number in range(40)]
    write_video(tmp_path / "videos" / "a.mp4", narrow, aspect=Fraction(2))
    prepare(tmp_path / "videos", tmp_path / "out", cut_threshold=100, keep_all=True)
    row = clips(tmp_path / "out")[0]
    assert row["signals"]["visible"] == 1
    assert numbers(decoded(tmp_path / "out" / row["file"])) == [int(k * 25 / FPS) for k in range(9)]


def test_npz_holds_the_pixels_that_load_clip_reads(tmp_path):
    (tmp_path / "videos").mkdir()
    video(tmp_path / "videos", "ntsc")
    prepare(tmp_path / "videos", tmp_path / "out", cut_threshold=100, keep_all=True, format="npz")
    for row in clips(tmp_path / "out")[::4]:
        with np.load(tmp_path / "out" / row["file"], allow_pickle=False) as file:
            frames, fps = file["frames"], int(file["fps"])
        (source,) = (tmp_path / "videos").iterdir()
        wanted = load_clip(source, SIZE, round(row["start_s"] * FPS), 9, FPS)
        assert (frames.dtype, frames.shape, fps) == (np.uint8, (9, 48, 64, 3), FPS)
        assert (frames == wanted.transpose(1, 2, 3, 0)).all()
