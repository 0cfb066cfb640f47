"""Clips in .npz: facts from the headers, frames cut as those of mp4 are, and one message for each bad file."""

import gc
import pickle
import time
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import image_bytes, write_tree
from test_media import SIZE, numbered_clip, numbers

from wangen.generator.dataset import media_of, read_facts, scan
from wangen.generator.errors import WangenError
from wangen.generator.npz import is_other_archive, read_npz, read_npz_facts
from wangen.runtime.media import load_clip


def numbered_npz(path: Path, num_frames: int, fps: float | None = 25, *, packed: bool = False) -> Path:
    """Frame n is flat grey of level 6n + 10, as in `numbered_clip`."""
    levels = np.arange(num_frames, dtype=np.uint8) * 6 + 10
    frames = np.broadcast_to(levels[:, None, None, None], (num_frames, SIZE[1], SIZE[0], 3))
    write = np.savez_compressed if packed else np.savez
    write(path, frames=frames, **({} if fps is None else {"fps": np.asarray(fps)}))
    return path


@pytest.mark.slow
def test_threads_read_headers_beside_each_other(tmp_path):
    """Each collection of garbage lets another thread go on, in the middle of what reads a header's words for numpy.

    Python 3.11.7 gave a SystemError about 10 times in 1200.
    """
    path = numbered_npz(tmp_path / "a.npz", 2)

    def read(depth: int) -> list[float]:
        return read(depth - 1) if depth else [read_npz(path)[1].fps for _ in range(300)]

    def give_way(*_: object) -> None:
        time.sleep(1e-5)

    usual = gc.get_threshold()
    gc.set_threshold(5, 1000, 1000)
    gc.callbacks.append(give_way)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(read, (0, 7, 14, 21)))
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*usual)
    assert found == [[25.0] * 300] * 4


@pytest.mark.parametrize("fps", [16, 24, 30])
@pytest.mark.parametrize(("rate", "source_fps"), [(25, None), (16, None), (16, 20.0)])
def test_frames_are_cut_as_those_of_an_mp4_are(tmp_path, fps, rate, source_fps):
    mp4 = numbered_clip(tmp_path / "a.mp4", 20, rate)
    npz = numbered_npz(tmp_path / "a.npz", 20, rate, packed=True)
    for start, count in ((0, 9), (3, 5)):
        cut = [numbers(load_clip(path, SIZE, start, count, fps, source_fps)) for path in (mp4, npz)]
        assert cut[0] == cut[1]
    found, wanted = read_facts(npz), read_facts(mp4)
    assert (found.width, found.height, found.num_frames) == (*SIZE, 20)
    assert found.duration_s == pytest.approx(wanted.duration_s) == 20 / rate
    for path in (mp4, npz):
        with pytest.raises(WangenError, match=r"too short: frames 0 to 80 at \d+ fps"):
            load_clip(path, SIZE, 0, 81, fps)


def test_pixels_are_kept_and_a_mask_is_grey(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (5, SIZE[1], SIZE[0], 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", frames=frames, fps=16)
    assert np.array_equal(load_clip(tmp_path / "a.npz", SIZE, 0, 5, 16), frames.transpose(3, 0, 1, 2))
    assert load_clip(tmp_path / "a.npz", (32, 24), 0, 5, 16, grey=True).shape == (1, 5, 24, 32)
    assert media_of("A.NPZ") == "video"


def test_a_clip_that_says_no_frame_rate_plays_at_16(tmp_path):
    path = numbered_npz(tmp_path / "a.npz", 8, None)
    assert read_npz_facts(path).fps == 16
    assert numbers(load_clip(path, SIZE, 0, 8, 16)) == list(range(8))
    assert numbers(load_clip(path, SIZE, 0, 8, 16, source_fps=8.0)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_facts_are_read_without_the_frames(tmp_path):
    np.savez(tmp_path / "a.npz", frames=np.zeros((81, 240, 416, 3), np.uint8), fps=16.0)  # 24 MB
    read_facts(tmp_path / "a.npz")
    tracemalloc.start()
    facts = read_facts(tmp_path / "a.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (facts.width, facts.height, facts.num_frames, facts.duration_s) == (416, 240, 81, 81 / 16)
    assert peak < 2**20


FRAMES = np.zeros((2, 8, 8, 3), np.uint8)
BAD = {
    "floats": ({"frames": FRAMES.astype(np.float32)}, r"frames is float32 \[2, 8, 8, 3\], not uint8"),
    "channels first": ({"frames": FRAMES.transpose(0, 3, 1, 2)}, r"frames is uint8 \[2, 3, 8, 8\]"),
    "one picture": ({"frames": FRAMES[0]}, "not uint8 "),
    "nothing in it": ({"frames": FRAMES[:0]}, "^has no frames\\n"),
    "objects": ({"frames": np.array([{}], dtype=object)}, "frames is object"),
    "another name": ({"images": FRAMES, "labels": FRAMES}, r"holds no array called frames \(but images, labels\)"),
    "a list of rates": ({"frames": FRAMES, "fps": np.array([16, 16])}, r"fps is int64\[2\], not one number"),
    "no rate": ({"frames": FRAMES, "fps": np.array(np.nan)}, "fps is nan"),
    "a rate of 0": ({"frames": FRAMES, "fps": np.array(0)}, "fps is 0"),
    "words": ({"frames": FRAMES, "fps": np.array("16")}, "fps is str"),
}


@pytest.mark.parametrize(("arrays", "words"), BAD.values(), ids=BAD)
def test_a_bad_one_is_named_with_what_is_wrong_and_the_form(tmp_path, arrays, words):
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    for read in (read_facts, lambda path: load_clip(path, SIZE, 0, 1, 16)):
        with pytest.raises(WangenError, match=words) as error:
            read(path)
        assert (error.value.where, error.value.cure) == (
            str(path), "save numpy.savez(path, frames=uint8 [F, H, W, 3], fps=16)",
        )  # fmt: skip


def test_damaged_and_strange_files_are_refused(tmp_path):
    good = numbered_npz(tmp_path / "good.npz", 6).read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 255
    short = tmp_path / "short.npz"
    with zipfile.ZipFile(short, "w") as archive, zipfile.ZipFile(tmp_path / "good.npz") as whole:
        archive.writestr("frames.npy", whole.read("frames.npy")[:-100])
    files = {"cut": good[:-200], "empty": b"", "picture": image_bytes(), "pickle": pickle.dumps([1])}
    for name, content in files.items():
        (tmp_path / f"{name}.npz").write_bytes(content)
        with pytest.raises(WangenError, match=r"cannot be read as a clip in \.npz"):
            read_facts(tmp_path / f"{name}.npz")
    with pytest.raises(WangenError, match="is cut short: 55296 bytes of frames expected, 55196 found"):
        read_facts(short)
    (tmp_path / "flipped.npz").write_bytes(flipped)
    with pytest.raises(WangenError, match=r"cannot be read as a clip in \.npz \(Bad CRC-32"):
        load_clip(tmp_path / "flipped.npz", SIZE, 0, 6, 16)
    with pytest.raises(WangenError, match="No such file"):
        read_facts(tmp_path / "none.npz")


def test_a_folder_takes_clips_and_leaves_other_trainers_caches(tmp_path):
    write_tree(tmp_path, {"cat.png": image_bytes(format="PNG"), "cat.txt": "a cat", "walk.txt": "a walk"})
    np.savez(tmp_path / "cat.npz", latents=FRAMES)
    numbered_npz(tmp_path / "walk.npz", 5)
    items, problems = scan(tmp_path)
    assert [(item.path.name, item.caption) for item in items] == [("cat.png", "a cat"), ("walk.npz", "a walk")]
    assert problems == []
    assert [is_other_archive(tmp_path / name) for name in ("cat.npz", "walk.npz", "cat.png")] == [True, False, False]
    (tmp_path / "bad.npz").write_bytes(b"PK")
    (tmp_path / "bad.txt").write_text("bad")
    assert ["cannot be read as a clip in .npz" in str(problem) for problem in scan(tmp_path)[1]] == [True]
