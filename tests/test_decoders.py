"""Decoders beside PyAV: the same frames as PyAV's, and PyAV's own where a decoder cannot promise them.

What is said of torchcodec runs where torchcodec and FFmpeg's libraries are installed. PyNvVideoCodec needs a GPU: its
adapter is tested against a stand-in with the signatures of its wheel.
"""

import ast
import logging
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import av
import numpy as np
import pytest
import torch
from footage import BUNNY, counter, numbers, waves, write_video
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_in_decoders import SimpleDecoder, StandIn

from wangen.generator.dataset import read_facts
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.step_parts import Decoder
from wangen.runtime.decoders import choice
from wangen.runtime.decoders.base import FrameDecoder
from wangen.runtime.decoders.pyav import PYAV, shown_frames
from wangen.runtime.decoders.pynvvideocodec import PyNvVideoCodec
from wangen.runtime.decoders.stamps import stamps_of
from wangen.runtime.decoders.torchcodec import TorchCodec
from wangen.runtime.media import load_clip, load_numbered

SIZE = (64, 48)
CPU = torch.device("cpu")
TIMES_MS = [0, 20, 60, 100, 180, 200, 260, 340, 380, 400, 480, 580, 600, 660, 700, 720]


def write_clip(path: Path, pixel_format: str = "yuv420p", codec: str = "libx264", **context: Any) -> Path:
    """30 frames that tell their numbers, with B-frames and several keyframes, at 25 frames per second."""
    container_format = {".mkv": "matroska", ".webm": "webm"}.get(path.suffix, path.suffix[1:])
    with av.open(str(path), "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = *SIZE, pixel_format
        stream.options = {"crf": "12", "bf": "3", "g": "8", "threads": "1"} if codec == "libx264" else {}
        for name, value in context.items():
            setattr(stream.codec_context, name, value)
        for number in range(30):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(counter(number), format="rgb24")))
        container.mux(stream.encode())
    return path


def cut(source: Path, path: Path, frames: int) -> Path:
    """The clip with an edit list that begins after so many frames: their packets are there and not shown."""
    with av.open(str(path), "w") as container, av.open(str(source)) as whole:
        stream = whole.streams.video[0]
        copied = container.add_stream_from_template(stream)
        ticks = int(frames / 25 / stream.time_base)
        for packet in whole.demux(stream):
            if packet.dts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - ticks, packet.dts - ticks, copied
                container.mux(packet)
    return path


def turn(source: Path, path: Path, matrix: tuple[int, int, int, int]) -> Path:
    """The clip with a display matrix, as a telephone writes it."""
    content = bytearray(source.read_bytes())
    a, b, c, d = (value << 16 for value in matrix)
    place = content.index(b"tkhd") + 4 + 4 + 36
    content[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("clips")
    plain = write_clip(folder / "plain.mp4")
    drawn = [counter(number) for number in range(30)]
    np.savez(folder / "plain.npz", frames=np.stack(drawn), fps=np.asarray(25))
    return {
        "plain": plain,
        "bunny": BUNNY,
        "matroska": write_clip(folder / "plain.mkv"),
        "webm": write_clip(folder / "plain.webm", codec="libvpx-vp9"),
        "bt709, full range": write_clip(folder / "full.mp4", colorspace=1, color_range=2),
        "4:4:4": write_clip(folder / "full_colour.mp4", "yuv444p"),
        "variable": write_video(folder / "variable.mp4", drawn[: len(TIMES_MS)], times_ms=TIMES_MS),
        "variable matroska": write_video(
            folder / "variable.mkv", drawn[: len(TIMES_MS)], times_ms=TIMES_MS, format="matroska"
        ),
        "edited": cut(plain, folder / "edited.mp4", 10),
        "quarter": turn(plain, folder / "quarter.mp4", (0, 1, -1, 0)),
        "half": turn(plain, folder / "half.mp4", (-1, 0, 0, -1)),
        "three quarters": turn(plain, folder / "three_quarters.mp4", (0, -1, 1, 0)),
        "tilted": turn(plain, folder / "tilted.mp4", (1, 1, -1, 1)),
        "10 bits": write_clip(folder / "deep.mp4", "yuv420p10le"),
        "avi": write_clip(folder / "plain.avi", codec="mpeg4"),
        "npz": folder / "plain.npz",
    }


def test_stamps_say_what_decoding_says(clips: dict[str, Path]):
    for name, path in clips.items():
        if name in ("avi", "npz"):
            continue
        for fps, source_fps in ((16, None), (25, None), (60, None), (16, 12.5), (10, 30.0)):
            pts = [frame.pts for frame in shown_frames(path, fps, source_fps)]
            stamps = stamps_of(path)
            found = stamps.shown(range(1000), fps, source_fps)
            assert [stamps.frames[number] for number in found] == pts, (name, fps, source_fps)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps_ms=st.lists(st.integers(1, 120), min_size=1, max_size=20),
    start_ms=st.integers(0, 700),
    container=st.sampled_from(["mp4", "matroska"]),
    fps=st.sampled_from([8, 16, 24, 62.5]),
)
def test_stamps_of_any_rate_say_what_decoding_says(
    tmp_path: Path, steps_ms: list[int], start_ms: int, container: str, fps: float
):
    times = [start_ms + sum(steps_ms[:number]) for number in range(len(steps_ms) + 1)]
    path = write_video(tmp_path / "any.mp4", waves(len(times), (16, 16)), times_ms=times, format=container)
    stamps = stamps_of(path)
    found = [stamps.frames[number] for number in stamps.shown(range(1000), fps, None)]
    assert found == [frame.pts for frame in shown_frames(path, fps)]


def size_of(path: Path) -> tuple[int, int]:
    facts = read_facts(path)
    return facts.width, facts.height


def assert_same(path: Path, decoder: FrameDecoder, what: str = "") -> None:
    """Clips from the start and from within, at several rates, and by number: the bytes of PyAV."""
    size = size_of(path)
    for start, count, fps, source_fps in ((0, 9, 16, None), (3, 5, 16, None), (7, 9, 50, None), (2, 7, 16, 12.5)):
        words = (path, size, start, count, fps, source_fps)
        assert np.array_equal(load_clip(*words, decoder=decoder), load_clip(*words)), (what, words)
    for chosen in (range(0, 4), range(5, 15, 3), range(12, 13)):
        assert np.array_equal(load_numbered(path, size, chosen, decoder), load_numbered(path, size, chosen)), what


@pytest.fixture(scope="module")
def torchcodec() -> TorchCodec:
    try:
        return TorchCodec.on(CPU)
    except UsageError as error:
        pytest.skip(error.found)


def test_torchcodec_gives_the_bytes_of_pyav(
    clips: dict[str, Path], torchcodec: TorchCodec, caplog: pytest.LogCaptureFixture
):
    taken = [name for name in clips if name not in ("tilted", "10 bits", "avi")]
    for name in taken:
        assert_same(clips[name], torchcodec, name)
    assert not caplog.records, "torchcodec itself decoded them all"


def test_what_torchcodec_would_show_otherwise_is_left_to_pyav(
    clips: dict[str, Path], torchcodec: TorchCodec, caplog: pytest.LogCaptureFixture
):
    for name, reason in (("tilted", "turned"), ("10 bits", "more than 8 bits"), ("avi", "container")):
        assert_same(clips[name], torchcodec, name)
        assert reason in caplog.text
    assert len(caplog.records) == 3


def test_threads_may_ask_torchcodec_at_once(clips: dict[str, Path], torchcodec: TorchCodec):
    paths = [clips[name] for name in ("plain", "matroska", "variable", "edited", "quarter")] * 4
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: assert_same(path, torchcodec), paths))


def test_torchcodec_reads_a_long_video_once_for_its_clips_and_anew_when_it_changed(
    clips: dict[str, Path], torchcodec: TorchCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened = []
    real = sys.modules["torchcodec.decoders"].VideoDecoder
    monkeypatch.setattr(
        "torchcodec.decoders.VideoDecoder", lambda path, **words: opened.append(path) or real(path, **words)
    )
    path = tmp_path / "a.mp4"
    path.write_bytes(clips["plain"].read_bytes())
    assert_same(path, torchcodec)
    assert opened == [path]
    path.write_bytes(clips["variable"].read_bytes())
    assert_same(path, torchcodec)
    assert opened == [path, path]


def test_a_damaged_clip_is_one_message_by_torchcodec_too(
    clips: dict[str, Path], torchcodec: TorchCodec, tmp_path: Path
):
    path = tmp_path / "a.mp4"
    for content in (clips["plain"].read_bytes()[:900], b"", b"no clip"):
        path.write_bytes(content)
        with pytest.raises(WangenError, match="cannot be decoded") as raised:
            load_clip(path, SIZE, 0, 9, 16, decoder=torchcodec)
        assert raised.value.where == str(path)
    with pytest.raises(WangenError, match="ends before frame 20"):
        load_clip(clips["plain"], SIZE, 0, 81, 16, decoder=torchcodec)
    with pytest.raises(WangenError, match="frame 30 cannot be read"):
        load_numbered(clips["plain"], SIZE, range(25, 31), torchcodec)


def test_a_clip_never_has_frames_of_two_decoders(clips: dict[str, Path], caplog: pytest.LogCaptureFixture):
    """A stamp that is not the one asked for, in the middle of a clip, hands all of it to PyAV."""
    decoder, path = StandIn(), clips["plain"]
    whole = load_clip(path, SIZE, 0, 15, 16)
    assert np.array_equal(load_clip(path, SIZE, 0, 15, 16, decoder=decoder), 255 - whole)
    assert not caplog.records
    decoder.late_from = 12
    assert np.array_equal(load_clip(path, SIZE, 0, 15, 16, decoder=decoder), whole)
    assert np.array_equal(load_clip(path, SIZE, 0, 5, 16, decoder=decoder), 255 - whole[:, :5])
    assert np.array_equal(load_clip(clips["matroska"], SIZE, 0, 15, 16, decoder=decoder)[0, 14], whole[0, 14])
    assert [record.getMessage() for record in caplog.records] == [
        "  plain.mp4: not decoded by torchcodec but by PyAV: a frame came whose time stamp is another than asked for; "
        "further files like it are not named"
    ]


def test_a_first_packet_without_a_frame_is_left_to_pyav(
    clips: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """An edit inside an open group of pictures: the first packets cannot be decoded, and times count from later on."""
    path = clips["plain"]
    first = next(iter(shown_frames(path, 25)))
    late = SimpleNamespace(pts=first.pts + 1, rotation=0, bits=8)
    monkeypatch.setattr("wangen.runtime.decoders.base._first", lambda *_: late)
    assert np.array_equal(load_clip(path, SIZE, 0, 9, 16, decoder=StandIn()), load_clip(path, SIZE, 0, 9, 16))
    assert "its first packet gives no frame" in caplog.text


def test_a_frame_that_stays_on_screen_is_decoded_once(clips: dict[str, Path]):
    """`StandIn.decode` asserts it; here the repeated frames are those that PyAV repeats."""
    shown = load_clip(clips["variable"], SIZE, 0, 40, 60, decoder=StandIn())
    assert numbers(255 - shown.transpose(1, 2, 3, 0)) == numbers(
        load_clip(clips["variable"], SIZE, 0, 40, 60).transpose(1, 2, 3, 0)
    )


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> type[SimpleDecoder]:
    module = ModuleType("PyNvVideoCodec")
    module.SimpleDecoder, module.OutputColorType = SimpleDecoder, SimpleNamespace(RGB="RGB")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", module)
    monkeypatch.setattr(SimpleDecoder, "made", [])
    return SimpleDecoder


@pytest.mark.slow
def test_pynvvideocodec_is_asked_for_the_frames_that_pyav_shows(
    clips: dict[str, Path], nvidia: type[SimpleDecoder], caplog: pytest.LogCaptureFixture
):
    decoder = PyNvVideoCodec.on(torch.device("cuda", 1))
    for name in ("plain", "matroska", "variable", "edited", "webm"):
        assert_same(clips[name], decoder, name)
    assert nvidia.made == [{"gpu": 1, "device": True, "color": "RGB"}] * 35
    assert not caplog.records


def test_the_stand_in_has_the_signatures_of_the_wheel():
    """Read from the wheel's source: without a driver it cannot be imported."""
    found = find_spec("PyNvVideoCodec")
    if found is None or found.origin is None:
        pytest.skip("PyNvVideoCodec is not installed")
    source = Path(found.origin).parent / "decoders" / "SimpleDecoder.py"
    (wheel,) = (
        node for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
    )
    methods = {
        node.name: [word.arg for word in node.args.args] for node in wheel.body if isinstance(node, ast.FunctionDef)
    }
    for name in ("__init__", "__len__", "get_batch_frames_by_index"):
        assert list(signature(getattr(SimpleDecoder, name)).parameters) == methods[name]


def test_what_pynvvideocodec_numbers_otherwise_is_left_to_pyav(
    clips: dict[str, Path],
    nvidia: type[SimpleDecoder],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    decoder = PyNvVideoCodec.on(torch.device("cuda"))
    assert_same(clips["quarter"], decoder)
    monkeypatch.setattr(nvidia, "lag", 1)
    assert_same(clips["plain"], decoder)
    told = [record.getMessage().partition("PyAV: ")[2].partition(";")[0] for record in caplog.records]
    assert told == ["its picture is to be turned", "a frame came whose time stamp is another than asked for"]


def test_a_failure_of_the_library_is_told_and_pyav_decodes(
    clips: dict[str, Path],
    nvidia: type[SimpleDecoder],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(nvidia, "lag", 100)
    assert_same(clips["plain"], PyNvVideoCodec.on(torch.device("cuda")))
    assert "it fails with 'out of range'" in caplog.text


def test_what_is_offered_is_what_can_be_chosen():
    assert get_args(Decoder) == ("auto", *choice.DECODERS)


@pytest.fixture
def opened() -> Iterator[None]:
    choice.open_decoder.cache_clear()
    yield
    choice.open_decoder.cache_clear()


@pytest.mark.usefixtures("opened")
def test_a_decoder_that_is_asked_for_and_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    with pytest.raises(UsageError, match="--decoder torchcodec: it cannot be loaded") as raised:
        choice.open_decoder("torchcodec", "cpu")
    assert "pip install torchcodec" in raised.value.cure
    with pytest.raises(UsageError, match="needs an NVIDIA GPU, and the device is cpu"):
        choice.open_decoder("pynvvideocodec", "cpu")
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", None)
    with pytest.raises(UsageError, match="pynvvideocodec: it cannot be loaded") as raised:
        PyNvVideoCodec.on(torch.device("cuda"))
    assert "pip install PyNvVideoCodec" in raised.value.cure


@pytest.mark.usefixtures("opened")
def test_auto_is_torchcodec_on_a_gpu_and_pyav_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    assert choice.open_decoder("auto", "cpu") is choice.open_decoder(None) is choice.open_decoder("pyav") is PYAV
    monkeypatch.setattr("wangen.runtime.devices.choose_device", lambda *_: torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    assert choice.open_decoder("auto", "cuda") is PYAV
    assert "decoding by PyAV: --decoder torchcodec: it cannot be loaded" in caplog.text
    monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace(__version__="0.14.0+cu130"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", ModuleType("torchcodec.decoders"))
    choice.open_decoder.cache_clear()
    decoder = choice.open_decoder("auto", "cuda")
    assert isinstance(decoder, TorchCodec)
    assert decoder.device.type == "cuda"


@pytest.mark.usefixtures("opened")
def test_a_torchcodec_without_cuda_decodes_on_the_cpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace(__version__="0.13.0+cpu"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", ModuleType("torchcodec.decoders"))
    assert TorchCodec.on(torch.device("cuda")).device == CPU
    assert "not built for CUDA" in caplog.text
