"""Clips in HDR, transparent and interlaced ones: `check`, `cache_latents` and `preprocess` name them, with a cure."""

import subprocess
from pathlib import Path

import av
import imageio_ffmpeg
import numpy as np
import pytest
from footage import decoded, prepare, write_video
from test_check_media import examined
from test_recipes import samples_of, write_toml

from wangen.generator.cautions import clip_cautions
from wangen.generator.dataset import read_facts
from wangen.generator.steps import CacheLatents
from wangen.runtime import cache_latents
from wangen.runtime.media import load_clip

SIZE = (64, 48)
VAE = Path(__file__).parent / "vectors/vae21/Wan2.1_VAE.pth"
PQ, HLG, BT709 = 16, 18, 1
BLOCK = "video_directory = '@/clips'\ntarget_frames = [5]\nresolution = [{}, {}]"


def clip(
    path: Path, *, transfer: int = BT709, codec: str = "libx264", pixels: str = "yuv420p", alpha: int = 255
) -> Path:
    """Two dozen red frames; the left half has this alpha where the format has one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = np.full((SIZE[1], SIZE[0], 4), (200, 40, 40, 255), np.uint8)
    picture[:, :32, 3] = alpha
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=16)
        stream.width, stream.height, stream.pix_fmt = *SIZE, pixels
        stream.codec_context.color_trc = transfer
        for _ in range(24):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgba")))
        container.mux(stream.encode())
    return path


def ffmpeg(*words: str) -> None:
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", *words], check=True)


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
@pytest.mark.parametrize("transfer", [PQ, HLG, BT709])
def test_the_facts_say_whether_a_clip_is_in_hdr(tmp_path: Path, transfer: int, suffix: str):
    facts = read_facts(clip(tmp_path / f"a{suffix}", transfer=transfer))
    assert (facts.hdr, facts.transparent) == (transfer != BT709, False)


@pytest.mark.parametrize("alpha", [255, 128, 0])
@pytest.mark.parametrize(
    ("name", "codec", "pixels"),
    [("a.mov", "qtrle", "argb"), ("a.mov", "prores_ks", "yuva444p10le"), ("a.mkv", "ffv1", "bgra"),
     ("a.mov", "png", "rgba")],
)  # fmt: skip
def test_the_facts_say_whether_a_clip_is_transparent(tmp_path: Path, name: str, codec: str, pixels: str, alpha: int):
    facts = read_facts(clip(tmp_path / name, codec=codec, pixels=pixels, alpha=alpha))
    assert (facts.hdr, facts.transparent) == (False, alpha < 255)


@pytest.mark.parametrize(("pixels", "found"), [("yuv420p", False), ("yuva420p", True)])
def test_a_webm_says_itself_that_it_is_transparent(tmp_path: Path, pixels: str, found: bool):
    facts = read_facts(clip(tmp_path / "a.webm", codec="libvpx-vp9", pixels=pixels, alpha=0))
    assert (facts.hdr, facts.transparent) == (False, found)


def dataset(folder: Path) -> Path:
    """Five clips with captions, two in HDR and one transparent, in two blocks of one folder."""
    for name, words in {
        "b.mp4": {"transfer": HLG}, "a.mov": {"transfer": PQ}, "c.mp4": {},
        "e.mov": {"codec": "qtrle", "pixels": "argb"},
        "d.mov": {"codec": "qtrle", "pixels": "argb", "alpha": 0},
    }.items():  # fmt: skip
        clip(folder / "clips" / name, **words)
        (folder / "clips" / name).with_suffix(".txt").write_text("red")
    return write_toml(folder, BLOCK.format(64, 48), BLOCK.format(32, 32))


@pytest.mark.parametrize(
    ("suffix", "words"),
    [(".mpg", ("mpeg2video", "-flags", "+ilme+ildct")), (".mp4", ("libx264", "-flags", "+ilme+ildct")),
     (".mov", ("prores_ks", "-flags", "+ildct"))],
)  # fmt: skip
@pytest.mark.parametrize("interlaced", [True, False])
def test_interlaced_clips_are_named(tmp_path: Path, suffix: str, words: tuple[str, ...], interlaced: bool):
    path, made = tmp_path / f"a{suffix}", tmp_path / "OUT.mp4"
    woven = ("-vf", "interlace", "-c:v", *words) if interlaced else ("-r", "25", "-c:v", words[0])
    source = ("-f", "lavfi", "-i", "testsrc2=s=64x48:r=50:d=0.4")
    ffmpeg(*source, *woven, str(path))
    assert read_facts(path).interlaced == interlaced
    cautions = list(clip_cautions({path: read_facts(path)}))
    assert len(cautions) == interlaced
    for caution in cautions:
        assert caution.startswith("1 clip is interlaced (a")
        ffmpeg(*(caution.partition("each: ffmpeg ")[2].replace("IN", str(path)).replace("OUT.mp4", str(made)).split()))
        assert not list(clip_cautions({made: read_facts(made)}))


def test_check_counts_and_names_them_once(tmp_path: Path):
    found = examined(dataset(tmp_path))
    assert found.findings == ()
    assert found.warnings == ()
    in_hdr, transparent = found.cautions
    assert in_hdr.startswith("2 clips are in HDR (a.mov, b.mp4), and their colours are taken as stored, pale and flat")
    assert transparent.startswith("1 clip is transparent (d.mov), and the colours that lie beneath are taken")


def test_caching_counts_and_names_them_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    step = CacheLatents(dataset_config=dataset(tmp_path), debug_mode="image", task="t2v-1.3B", vae=VAE)
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr("wangen.runtime.sources.YOUNG_NS", 0)
    for _ in range(2):  # the second time by what is remembered
        caplog.clear()
        cache_latents.run(step)
        assert caplog.text.count("2 clips are in HDR (a.mov, b.mp4)") == 1
        assert caplog.text.count("1 clip is transparent (d.mov)") == 1


def test_ordinary_media_are_not_named(tmp_path: Path):
    write_video(tmp_path / "a.mp4", [np.zeros((48, 64, 3), np.uint8)] * 5)
    assert not list(clip_cautions({tmp_path / "a.mp4": read_facts(tmp_path / "a.mp4")}))


def test_their_pixels_and_recipes_are_those_of_before(tmp_path: Path):
    for sample in samples_of(dataset(tmp_path)):
        assert set(sample.latent_recipe()) == {
            "source", "width", "height", "resize", "start", "frames", "fps", "source_fps",
        }  # fmt: skip
    pixels = load_clip(tmp_path / "clips/d.mov", SIZE, 0, 1, 16)[:, 0].transpose(1, 2, 0)
    assert (pixels == (200, 40, 40)).all()


def test_footage_is_named_before_it_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    clip(tmp_path / "videos/a.mp4", transfer=HLG)
    prepare(tmp_path / "videos", tmp_path / "out", keep_all=True)
    assert caplog.text.count("1 clip is in HDR (a.mp4)") == 1


def test_the_line_for_transparent_clips_lays_them_over_white(tmp_path: Path):
    path = clip(tmp_path / "a.mov", codec="qtrle", pixels="argb", alpha=0)
    (caution,) = clip_cautions({path: read_facts(path)})
    made = tmp_path / "OUT.mp4"
    words = caution.partition('ffmpeg -i IN -vf "')[2].partition('" -pix_fmt')[0]
    ffmpeg("-i", str(path), "-vf", words, "-pix_fmt", "yuv420p", str(made))
    frame = decoded(made)[0].astype(int)
    assert np.abs(frame[8:-8, 8:24] - 255).max() < 6
    assert np.abs(frame[8:-8, 40:56] - (200, 40, 40)).max() < 12
    assert not list(clip_cautions({made: read_facts(made)}))
