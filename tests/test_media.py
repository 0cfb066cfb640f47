"""Files -> frames: pictures of every mode upright and whole, clips exact by time stamp."""

import os
import struct
import subprocess
from fractions import Fraction
from pathlib import Path

import av
import imageio_ffmpeg
import numpy as np
import pytest
from helpers import make_clip, make_image
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from wangen.generator.dataset import read_facts
from wangen.generator.errors import WangenError
from wangen.generator.geometry import resampled_frames
from wangen.runtime.media import fit, load_clip, load_image

SIZE = (64, 48)
STEP = 6


def numbered_clip(
    path: Path,
    num_frames: int,
    rate: int = 25,
    *,
    codec: str = "libx264",
    format: str = "mp4",
    times_ms: list[int] | None = None,
) -> Path:
    """A clip whose frame n is flat grey of level 6n + 10, so that a decoded frame tells its number."""
    with av.open(str(path), "w", format=format) as container:
        stream = container.add_stream(codec, rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        stream.bit_rate = 4_000_000
        for number in range(num_frames):
            level = np.full((SIZE[1], SIZE[0], 3), number * STEP + 10, np.uint8)
            frame = av.VideoFrame.from_ndarray(level, format="rgb24")
            if times_ms:
                frame.pts, frame.time_base = times_ms[number] * 90, Fraction(1, 90000)
                stream.codec_context.time_base = Fraction(1, 90000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def numbers(frames: np.ndarray) -> list[int]:
    """(3, T, H, W) -> the number that each frame carries; it must be clear."""
    levels = (frames.astype(float).mean(axis=(0, 2, 3)) - 10) / STEP
    assert np.abs(levels - levels.round()).max() < 0.4
    return [int(level) for level in levels.round()]


def on_screen(count: int, source_fps: float, fps: int = 16) -> list[int]:
    return [int(k * source_fps / fps + 1e-9) for k in range(count)]


# Pictures


def test_every_exif_orientation_is_applied(tmp_path: Path):
    upright = np.zeros((48, 64, 3), np.uint8)
    upright[:24, :32] = (255, 0, 0)
    upright[:24, 32:] = (0, 255, 0)
    upright[24:, :32] = (0, 0, 255)
    image = Image.fromarray(upright)
    undo = {
        1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    for orientation, transpose in undo.items():
        stored = image.transpose(transpose) if transpose is not None else image
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / f"{orientation}.png"
        stored.save(path, exif=exif)
        scan = tmp_path / f"tiff {orientation}.png"  # a TIFF under another's ending
        stored.save(scan, "TIFF", tiffinfo={0x0112: orientation})
        for file in (path, scan):
            facts = read_facts(file)
            assert (facts.width, facts.height) == (64, 48)
            assert (load_image(file, SIZE)[:, 0].transpose(1, 2, 0) == upright).all(), file.name


@pytest.mark.parametrize("suffix", [".png", ".webp", ".avif"])
def test_transparency_lies_over_white(tmp_path: Path, suffix: str):
    pixels = np.zeros((48, 64, 4), np.uint8)
    pixels[:, 32:] = (200, 0, 0, 255)
    path = tmp_path / f"a{suffix}"
    Image.fromarray(pixels).save(path, **({} if suffix == ".png" else {"quality": 100}))
    frame = load_image(path, SIZE)
    assert frame.shape == (3, 1, 48, 64)
    assert (frame[:, 0, :, :28] >= 250).all()
    assert abs(int(frame[0, 0, 20, 60]) - 200) < 6


def test_palettes_and_half_transparent_palettes(tmp_path: Path):
    image = Image.new("P", (16, 16), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(1, (8, 0, 16, 16))
    image.save(tmp_path / "solid.png")
    image.save(tmp_path / "clear.png", transparency=0)
    assert load_image(tmp_path / "solid.png", (16, 16))[:, 0, 4, 4].tolist() == [255, 0, 0]
    assert load_image(tmp_path / "clear.png", (16, 16))[:, 0, 4, 4].tolist() == [255, 255, 255]
    assert load_image(tmp_path / "clear.png", (16, 16))[:, 0, 4, 12].tolist() == [0, 0, 255]


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path: Path):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)[None].repeat(48, 0)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    frame = load_image(tmp_path / "deep.png", SIZE)
    assert np.abs(frame[:, 0].astype(int) - (ramp / 257)).max() <= 0.51


def test_grey_bilevel_and_cmyk(tmp_path: Path):
    Image.new("L", SIZE, 90).save(tmp_path / "grey.png")
    Image.new("1", SIZE, 1).save(tmp_path / "one.png")
    Image.new("LA", SIZE, (0, 0)).save(tmp_path / "la.png")
    Image.new("CMYK", SIZE, (0, 255, 255, 0)).save(tmp_path / "print.jpg", quality=100)
    assert (load_image(tmp_path / "grey.png", SIZE) == 90).all()
    assert (load_image(tmp_path / "one.png", SIZE) == 255).all()
    assert (load_image(tmp_path / "la.png", SIZE) == 255).all()
    red, green, blue = load_image(tmp_path / "print.jpg", SIZE)[:, 0, 20, 20].tolist()
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize("source", [(640, 480), (480, 640), (1000, 50), (33, 47), (64, 49), (1, 1)])
def test_the_picture_covers_the_bucket_and_is_cropped_at_its_centre(source: tuple[int, int]):
    image = Image.new("RGB", source, (9, 99, 199))
    fitted = fit(image, SIZE)
    assert fitted.size == SIZE
    assert np.ptp(np.asarray(fitted).reshape(-1, 3), axis=0).max() == 0  # no border

    ramp = np.linspace(0, 255, source[0]).astype(np.uint8)[None, :, None].repeat(source[1], 0).repeat(3, 2)
    columns = np.asarray(fit(Image.fromarray(ramp), SIZE))[:, :, 0].astype(float)
    if source[0] > 1:
        assert abs(columns.mean() - 127.5) < 3  # as much is cut from the left as from the right


def test_a_picture_of_the_right_size_keeps_its_pixels(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert (load_image(tmp_path / "a.png", SIZE)[:, 0].transpose(1, 2, 0) == pixels).all()


def test_resizing_is_lanczos(tmp_path: Path):
    make_image(tmp_path / "a.png", (320, 240))
    with Image.open(tmp_path / "a.png") as image:
        wanted = np.asarray(image.convert("RGB").resize(SIZE, Image.Resampling.LANCZOS))
    assert (load_image(tmp_path / "a.png", SIZE)[:, 0].transpose(1, 2, 0) == wanted).all()


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.bmp", "a.avif"])
def test_a_truncated_or_foreign_picture_is_one_message(tmp_path: Path, name: str):
    path = make_image(tmp_path / name, (200, 150))
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:20], b"", b"not a picture at all"):
        path.write_bytes(content)
        with pytest.raises(WangenError, match="cannot be decoded") as raised:
            load_image(path, SIZE)
        assert raised.value.where == str(path)
        assert raised.value.cure


def test_a_picture_beyond_all_measure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(WangenError, match="cannot be decoded"):
        load_image(make_image(tmp_path / "a.png", (200, 150)), SIZE)


# Clips


@pytest.mark.parametrize(
    ("format", "codec", "rate"),
    [
        ("mp4", "libx264", 25),
        ("mp4", "libx264", 16),
        ("mp4", "libx264", 8),
        ("mp4", "libx264", 30),
        ("mov", "mpeg4", 24),
        ("matroska", "libx264", 16),
        ("matroska", "libx264", 25),
        ("webm", "libvpx-vp9", 16),
        ("webm", "libvpx-vp9", 8),
        ("avi", "mpeg4", 25),
        ("avi", "mpeg4", 8),
        ("avi", "libx264", 16),
        ("avi", "libx264", 25),
        ("asf", "wmv2", 16),
        ("asf", "libx264", 16),
        ("flv", "libx264", 16),
    ],
)
def test_a_clip_keeps_its_speed_and_shows_the_frame_that_is_on_screen(
    tmp_path: Path, format: str, codec: str, rate: int
):
    path = numbered_clip(tmp_path / "a.mp4", 33, rate, codec=codec, format=format)
    promised = resampled_frames(read_facts(path), 16)
    assert abs(promised / 16 - 33 / rate) <= 0.5 / 16 + 1e-6
    frames = load_clip(path, SIZE, 0, promised, 16)
    assert frames.shape == (3, promised, 48, 64)
    assert numbers(frames) == on_screen(promised, rate)


def test_frames_are_counted_from_the_start_offset(tmp_path: Path):
    path = numbered_clip(tmp_path / "a.mp4", 33, 25)
    whole = load_clip(path, SIZE, 0, 21, 16)
    assert (load_clip(path, SIZE, 4, 17, 16) == whole[:, 4:]).all()
    assert numbers(load_clip(path, SIZE, 16, 5, 16)) == on_screen(21, 25)[16:]


def test_a_stream_that_begins_late_begins_with_its_first_frame(tmp_path: Path):
    times = [540 + 40 * number for number in range(25)]
    path = numbered_clip(tmp_path / "a.mkv", 25, format="matroska", times_ms=times)
    assert numbers(load_clip(path, SIZE, 0, 16, 16)) == on_screen(16, 25)


def test_a_variable_frame_rate_is_followed(tmp_path: Path):
    times = [0, 10, 20, 300, 310, 600, 900, 1000, 1500, 1540]
    path = numbered_clip(tmp_path / "a.mp4", len(times), times_ms=times)
    promised = resampled_frames(read_facts(path), 16)
    assert promised in (25, 26)
    wanted = [max(n for n, time in enumerate(times) if time <= k * 62.5 + 0.1) for k in range(promised)]
    assert numbers(load_clip(path, SIZE, 0, promised, 16)) == wanted


def test_source_fps_replaces_the_stamps(tmp_path: Path):
    path = numbered_clip(tmp_path / "a.mp4", 33, 25)
    assert resampled_frames(read_facts(path), 16, 16.0) == 33
    assert numbers(load_clip(path, SIZE, 0, 33, 16, 16.0)) == list(range(33))
    assert resampled_frames(read_facts(path), 16, 32.0) == 17
    assert numbers(load_clip(path, SIZE, 0, 17, 16, 32.0)) == list(range(0, 33, 2))


@pytest.mark.parametrize(("quarters", "matrix"), [(1, (0, 1, -1, 0)), (2, (-1, 0, 0, -1)), (3, (0, -1, 1, 0))])
def test_a_turned_clip_stands_upright(tmp_path: Path, quarters: int, matrix: tuple[int, int, int, int]):
    plain = make_clip(tmp_path / "plain.mp4", num_frames=3, size=SIZE)
    before = load_clip(plain, SIZE, 0, 1, 16)[:, 0]
    content = bytearray(plain.read_bytes())
    # PyAV writes no display matrix; these are those a telephone writes for "turn clockwise by so many quarters".
    a, b, c, d = (value << 16 for value in matrix)
    place = content.index(b"tkhd") + 4 + 4 + 36
    content[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    turned = tmp_path / "turned.mp4"
    turned.write_bytes(content)
    facts = read_facts(turned)
    size = SIZE if quarters == 2 else SIZE[::-1]
    assert (facts.width, facts.height) == size
    assert (load_clip(turned, size, 0, 1, 16)[:, 0] == np.rot90(before, -quarters, axes=(1, 2))).all()


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi", "a.flv"])
def test_a_clip_whose_title_is_not_utf8_is_read(tmp_path: Path, name: str):
    path = make_clip(tmp_path / "plain.mp4", num_frames=17, size=SIZE)
    words = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", path, "-metadata"]
    subprocess.run([*map(os.fsencode, words), b"title=Stra\xdfe", os.fsencode(tmp_path / name)], check=True)
    assert read_facts(tmp_path / name).num_frames == 17
    assert load_clip(tmp_path / name, SIZE, 0, 17, 16).shape == (3, 17, 48, 64)


def test_too_few_frames_are_said_and_never_filled_up(tmp_path: Path):
    path = numbered_clip(tmp_path / "a.mp4", 10, 16)
    with pytest.raises(WangenError, match="ends before frame 10") as raised:
        load_clip(path, SIZE, 0, 17, 16)
    assert raised.value.where == str(path)


def test_frames_that_an_edit_list_hides_are_not_used(tmp_path: Path):
    """A telephone's or editor's cut without encoding again: the packets before the cut are there and not shown."""
    source = numbered_clip(tmp_path / "whole.mp4", 33, 16)
    path = tmp_path / "cut.mp4"
    with av.open(str(path), "w") as cut, av.open(str(source)) as whole:
        stream = whole.streams.video[0]
        copied = cut.add_stream_from_template(stream)
        tick = int(1 / 16 / stream.time_base)
        for packet in whole.demux(stream):
            if packet.dts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - 10 * tick, packet.dts - 10 * tick, copied
                cut.mux(packet)
    assert numbers(load_clip(path, SIZE, 0, 23, 16)) == list(range(10, 33))
    with pytest.raises(WangenError, match="ends before frame 23"):
        load_clip(path, SIZE, 0, 25, 16)


def test_a_damaged_clip_is_one_message(tmp_path: Path):
    path = numbered_clip(tmp_path / "a.mkv", 33, 16, format="matroska")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:100], b"", b"no clip"):
        path.write_bytes(content)
        with pytest.raises(WangenError) as raised:
            load_clip(path, SIZE, 0, 33, 16)
        assert raised.value.where == str(path)
    with pytest.raises(WangenError, match="cannot be decoded"):
        load_clip(tmp_path / "missing.mp4", SIZE, 0, 1, 16)


def test_sound_without_a_picture_is_one_message(tmp_path: Path):
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(WangenError, match="no video stream"):
        load_clip(tmp_path / "a.mp4", SIZE, 0, 1, 16)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_frames=st.integers(1, 38),
    rate=st.sampled_from([5, 8, 12, 15, 16, 24, 25, 30, 50, 60]),
    form=st.sampled_from([("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4"), ("avi", "libx264")]),
    source_fps=st.sampled_from([None, None, 10.0, 16.0, 23.976]),
)
def test_every_frame_that_geometry_promises_is_there(
    tmp_path: Path, num_frames: int, rate: int, form: tuple[str, str], source_fps: float | None
):
    format, codec = form
    path = numbered_clip(tmp_path / "any.mp4", num_frames, rate, codec=codec, format=format)
    promised = resampled_frames(read_facts(path), 16, source_fps)
    frames = numbers(load_clip(path, SIZE, 0, promised, 16, source_fps))
    assert frames == [min(n, num_frames - 1) for n in on_screen(promised, source_fps or rate)]
