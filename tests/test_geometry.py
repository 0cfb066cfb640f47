"""Buckets and clip windows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wangen.generator.dataset import MediaFacts
from wangen.generator.geometry import bucket_of, buckets, misfit, resampled_frames, too_short, windows
from wangen.generator.tomls import DatasetEntry

RESOLUTIONS = [(256, 256), (512, 512), (832, 480), (480, 832), (960, 544), (1280, 704)]


def entry(**changes: Any) -> DatasetEntry:
    values: dict[str, Any] = {"directory": Path(), "media": "video", "cache_directory": Path()}
    return DatasetEntry(**values | changes)


def image(width: int, height: int) -> MediaFacts:
    return MediaFacts(width, height, 1, 0.0)


@pytest.mark.parametrize(
    ("resolution", "count"), [((256, 256), 17), ((512, 512), 33), ((832, 480), 42), ((960, 544), 47)]
)
def test_there_are_as_many_buckets_as_elsewhere(resolution: tuple[int, int], count: int):
    assert len(buckets(resolution, 16)) == count
    assert resolution in buckets(resolution, 16)


@pytest.mark.parametrize("resolution", RESOLUTIONS)
@pytest.mark.parametrize("step", [16, 32])
def test_buckets_are_symmetric_multiples_of_the_step_and_near_the_area(resolution: tuple[int, int], step: int):
    found = set(buckets(resolution, step))
    assert {(height, width) for width, height in found} == found
    area = resolution[0] * resolution[1]
    for width, height in found:
        assert width % step == height % step == 0
        assert area * 0.8 <= width * height <= area


@given(st.integers(1, 6000), st.integers(1, 6000), st.sampled_from(RESOLUTIONS))
@example(51, 204, (960, 544))  # between two buckets of one area
def test_a_turned_item_gets_the_turned_bucket(width: int, height: int, resolution: tuple[int, int]):
    block = entry(resolution=resolution, enable_bucket=True)
    chosen = bucket_of(image(width, height), block, 16)
    if width != height:
        assert bucket_of(image(height, width), block, 16) == chosen[::-1]
    aspect = width / height
    distances = [max(w / h / aspect, aspect * h / w) for w, h in buckets(resolution, 16)]
    assert max(chosen[0] / chosen[1] / aspect, aspect * chosen[1] / chosen[0]) <= min(distances) * (1 + 1e-12)


def test_without_buckets_everything_has_the_resolution():
    assert bucket_of(image(300, 900), entry(resolution=(832, 480)), 16) == (832, 480)
    assert bucket_of(image(300, 900), entry(resolution=(850, 490)), 16) == (848, 480)
    assert bucket_of(image(300, 900), entry(resolution=(850, 490), bucket_no_upscale=True), 16) == (848, 480)


@given(st.integers(1, 900), st.integers(1, 900))
def test_no_upscale_keeps_small_items_at_their_size(width: int, height: int):
    block = entry(resolution=(512, 512), enable_bucket=True, bucket_no_upscale=True)
    chosen = bucket_of(image(width, height), block, 16)
    if width * height <= 512 * 512:
        assert chosen == (max(16, width // 16 * 16), max(16, height // 16 * 16))
    else:
        assert chosen in buckets((512, 512), 16)


def test_a_resolution_below_the_step_still_has_a_bucket():
    assert bucket_of(image(20, 10), entry(resolution=(8, 8), enable_bucket=True), 16) == (16, 16)


@given(st.integers(1, 200), st.sampled_from([1, 5, 9, 17, 33, 81]))
def test_windows_are_those_of_the_dataset_schema(num_frames: int, count: int):
    fits = num_frames >= count
    last = num_frames - count

    def starts(extraction: str, **more: Any) -> list[int]:
        found = windows(entry(target_frames=(count,), frame_extraction=extraction, **more), num_frames)
        assert all(length == count and 0 <= start <= last for start, length in found)
        return [start for start, _ in found]

    assert starts("head") == ([0] if fits else [])
    assert starts("chunk") == ([s for s in range(0, num_frames, count) if s + count <= num_frames] if fits else [])
    assert starts("slide", frame_stride=3) == (list(range(0, last + 1, 3)) if fits else [])
    assert starts("uniform", frame_sample=1) == starts("head")
    spaced = sorted({int(start + 1e-9) for start in np.linspace(0, last, 4)}) if fits else []
    assert starts("uniform", frame_sample=4) == spaced


@given(st.integers(1, 300), st.integers(1, 129))
def test_full_takes_the_longest_4n_plus_1(num_frames: int, max_frames: int):
    ((start, count),) = windows(entry(frame_extraction="full", max_frames=max_frames), num_frames)
    assert start == 0
    assert count % 4 == 1
    assert count <= min(num_frames, max_frames) < count + 4


def test_several_lengths_give_windows_of_each():
    assert windows(entry(target_frames=(1, 5, 17), frame_extraction="head"), 9) == [(0, 1), (0, 5)]


@given(st.integers(1, 500), st.sampled_from([8.0, 15.0, 16.0, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0]))
def test_resampling_keeps_the_duration_to_half_a_frame(num_frames: int, rate: float):
    facts = MediaFacts(64, 48, num_frames, num_frames / rate)
    found = resampled_frames(facts, 16)
    assert abs(found - num_frames * 16 / rate) <= 0.5 + 1e-6 or found == 1
    assert resampled_frames(facts, 16, rate) == found
    assert resampled_frames(facts, 16, 16.0) == num_frames


@given(st.integers(1, 200), st.sampled_from([(17,), (5, 33), (81,)]), st.sampled_from(["head", "slide", "full"]))
def test_a_video_is_too_short_when_no_window_fits(num_frames: int, target_frames: tuple[int, ...], extraction: str):
    facts = MediaFacts(64, 48, num_frames, num_frames / 16)
    block = entry(target_frames=target_frames, frame_extraction=extraction)
    words = too_short(facts, block, fps=16)
    assert (words is None) == bool(windows(block, num_frames))
    if extraction == "head":
        alone = too_short(facts, min(target_frames), fps=16)
        assert (alone is None) == (words is None)
        assert not words or not alone or words[0] == alone[0]


def test_the_length_that_fits_is_named():
    facts = MediaFacts(64, 48, 24, 99.0)
    assert too_short(facts, entry(target_frames=(33, 81), source_fps=16.0), fps=16) == (
        "has 24 frames at 16 fps, 33 are needed", "set target_frames = [21] in the dataset's TOML or take it out",
    )  # fmt: skip


def test_where_every_frame_would_do_the_flag_for_that_is_named():
    facts = MediaFacts(64, 48, 33, 33 / 24)
    assert too_short(facts, entry(target_frames=(33,)), fps=16) == (
        "has 22 frames at 16 fps, 33 are needed",
        "set target_frames = [21] in the dataset's TOML, source_fps = 16.0 to take every frame whatever its time, "
        "or take it out",
    )


def test_clips_of_a_manifest_at_another_rate_are_to_be_made_at_the_model_s():
    block = entry(target_frames=(81,), manifest=Path("train.jsonl"), mixed=True)
    found, cure = too_short(MediaFacts(64, 48, 81, 81 / 25), block, fps=16)
    assert found == "has 52 frames at 16 fps, 81 are needed"
    assert cure == (
        "make the clips at 16 fps, set target_frames = [49] in a TOML whose block names this manifest or take it out"
    )
    _, cure = too_short(MediaFacts(64, 48, 24, 1.5), block, fps=16)
    assert cure == "set target_frames = [21] in a TOML whose block names this manifest or take it out"


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from(["head", "chunk", "slide", "uniform", "full"]))
def test_a_control_clip_reaches_to_the_last_frame_that_is_used(num_frames: int, num_control: int, extraction: str):
    block = entry(target_frames=(5, 9), frame_extraction=extraction, frame_sample=3)
    facts, control = (MediaFacts(64, 48, number, number / 16) for number in (num_frames, num_control))
    last = max((start + count for start, count in windows(block, num_frames)), default=0)
    assert (misfit(facts, control, block, 16, still=False, mask=False) is None) == (num_control >= last)
    assert misfit(facts, image(64, 48), block, 16, still=True, mask=False) is None


@pytest.mark.parametrize(
    ("mask", "fits"), [((64, 48), True), ((1280, 960), True), ((63, 48), True), ((48, 64), False), ((64, 46), False)]
)
def test_a_mask_has_the_shape_of_its_picture(mask: tuple[int, int], fits: bool):
    assert (misfit(image(64, 48), image(*mask), entry(), 16, still=True, mask=True) is None) == fits
    assert misfit(image(64, 48), image(*mask), entry(), 16, still=True, mask=False) is None
