"""Raw 1X World Model data -> manifests: which frames a clip is, and what is said of data that is not whole."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from footage import numbers, rows
from world_model_shards import SHARD, SIZE, state, write_split

from wangen.generator.cli import main
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.excerpts import Excerpt
from wangen.generator.manifests import read_manifest
from wangen.generator.prepare_steps import WorldModel
from wangen.generator.session import Report
from wangen.runtime.media import load_numbered
from wangen.runtime.raw_world_model import read_states
from wangen.runtime.world_model import run

SHARDS = [[(7, 20), (8, 33)], [(8, 12), (9, 40)]]
"""Segment 8 goes on in the next shard; a clip does not."""
SEGMENTS = [range(0, 20), range(20, 53), range(100, 112), range(112, 152)]
"""The numbers that the frames of each segment show."""


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both splits, as they are downloaded."""
    folder = tmp_path_factory.mktemp("worldmodel_raw_data")
    write_split(folder / "train_v2.0_raw", SHARDS)
    write_split(folder / "val_v2.0_raw", [[(0, 9), (1, 8)]], flat=True)
    return folder


def convert(source: Path, output: Path, **flags: Any) -> Report:
    return run(WorldModel(source=source, output=output, **({"frames": 5} | flags)))


def shown(manifest: Path) -> list[list[int]]:
    """The numbers that the frames of each clip show."""
    items, problems = read_manifest(manifest)
    assert problems == []
    found = []
    for item in items:
        assert item.excerpt
        found.append(numbers(load_numbered(item.path, SIZE, item.excerpt.numbers()).transpose(1, 2, 3, 0)))
    return found


def wanted(segments: Sequence[range], frames: int, step: int, stride: int) -> list[list[int]]:
    """What clips must show, counted out frame by frame."""
    found = []
    for segment in segments:
        for start in range(0, len(segment), stride):
            clip = [start + step * number for number in range(frames)]
            if clip[-1] < len(segment):
                found.append([segment[number] for number in clip])
    return found


@pytest.mark.parametrize(
    ("frames", "step", "stride"), [(5, 1, 5), (5, 2, 4), (9, 2, 3), (13, 3, 1), (1, 1, 7), (17, 2, 16)]
)
def test_clips_show_exactly_their_frames(raw, tmp_path, frames, step, stride):
    report = convert(raw, tmp_path, frames=frames, temporal_downsample=step, stride=stride)
    found = shown(tmp_path / "train.jsonl")
    assert found == wanted(SEGMENTS, frames, step, stride)
    assert all(len(clip) == len(set(clip)) == frames and frames % 4 == 1 for clip in found)
    assert report.counts["clips"] == len(found)


def test_without_a_stride_no_frame_is_in_two_clips(raw, tmp_path):
    convert(raw, tmp_path, temporal_downsample=2)
    found = [number for clip in shown(tmp_path / "train.jsonl") for number in clip]
    assert len(found) == len(set(found))
    first, second, *_ = rows(tmp_path / "train.jsonl")
    assert (first["first_frame"], second["first_frame"]) == (0, 9)


@pytest.mark.parametrize(("length", "clips"), [(8, 0), (9, 1), (10, 1), (17, 1), (18, 2)])
def test_the_last_clip_may_end_with_its_segment(tmp_path, length, clips):
    """Of 5 frames, every second one: a clip spans 9."""
    write_split(tmp_path, [[(0, length), (1, 9)]])
    report = convert(tmp_path, tmp_path / "out", temporal_downsample=2)
    found = [row["first_frame"] for row in rows(tmp_path / "out" / "train.jsonl")]
    assert found == [*(9 * number for number in range(clips)), length]
    assert report.counts["short"] == (clips == 0)


def test_an_index_that_comes_back_is_another_segment(tmp_path):
    write_split(tmp_path, [[(3, 6), (4, 3), (3, 6)]])
    convert(tmp_path, tmp_path / "out", stride=1)
    assert shown(tmp_path / "out" / "train.jsonl") == wanted([range(0, 6), range(9, 15)], 5, 1, 1)


def test_the_validation_split_lies_flat(raw, tmp_path):
    convert(raw, tmp_path / "a", split="val")
    convert(raw / "val_v2.0_raw", tmp_path / "b", split="val")
    assert shown(tmp_path / "a" / "val.jsonl") == shown(tmp_path / "b" / "val.jsonl") == [[*range(5)], [*range(9, 14)]]


def test_a_line_says_where_its_frames_and_states_are(raw, tmp_path):
    convert(raw, tmp_path, frames=9, temporal_downsample=2, stride=5, caption="a robot")
    line = rows(tmp_path / "train.jsonl")[-1]
    video, states = (tmp_path / line.pop(key) for key in ("file", "robot_states"))
    assert video.resolve() == (raw / "train_v2.0_raw" / "videos" / "video_1.mp4").resolve()
    assert line == {"prompt": "a robot", "first_frame": 32, "frame_step": 2, "frames": 9, "fps": 15.0,
                    "width": 64, "height": 64, "shard": 1, "segment": 1}  # fmt: skip
    found = read_states(states, Excerpt(32, 2, 9))
    np.testing.assert_array_equal(found, np.stack([state(SHARD + 32 + 2 * number) for number in range(9)]))
    with pytest.raises(WangenError, match="ends before the state of frame 54"):
        read_states(states, Excerpt(50, 1, 5))


@pytest.mark.parametrize("hz", ["null", "Infinity", "1e308", "1e-9", "true", "9" * 400])
def test_without_hz_that_can_be_the_rate_is_the_videos(tmp_path, hz):
    write_split(tmp_path, [[(0, 9)]])
    (tmp_path / "metadata.json").write_text(f'{{"num_shards": 1, "hz": {hz}}}')
    convert(tmp_path, tmp_path / "out", temporal_downsample=2)
    (line,) = rows(tmp_path / "out" / "train.jsonl")
    assert line["fps"] == 15.0


def test_a_manifest_of_other_lines_is_not_written_over(raw, tmp_path):
    convert(raw, tmp_path)
    convert(raw, tmp_path)
    before = (tmp_path / "train.jsonl").read_bytes()
    with pytest.raises(UsageError, match=r"train\.jsonl is there already, with other lines"):
        convert(raw, tmp_path, stride=2)
    assert (tmp_path / "train.jsonl").read_bytes() == before
    convert(raw, tmp_path, stride=2, overwrite=True)
    assert (tmp_path / "train.jsonl").read_bytes() != before


# What is wrong


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"frames": 8}, "--frames must be 4n+1, got 8"),
        ({"frames": 0}, "--frames must be at least 1"),
        ({"temporal_downsample": 0}, "--temporal_downsample must be at least 1"),
        ({"stride": 0}, "--stride must be at least 1"),
    ],
)
def test_wrong_flags(raw, tmp_path, flags, words):
    with pytest.raises(UsageError) as error:
        convert(raw, tmp_path, **flags)
    assert words in error.value.found


def test_no_segment_is_as_long_as_a_clip(raw, tmp_path, capsys):
    line = [
        "world_model",
        "--source",
        str(raw),
        "--output",
        str(tmp_path),
        "--frames",
        "21",
        "--temporal_downsample",
        "2",
    ]
    assert main(line) == 1
    assert "no segment has the 41 frames that a clip spans, the longest has 40" in capsys.readouterr().err
    assert not (tmp_path / "train.jsonl").exists()


def test_the_other_splits_folder(raw, tmp_path):
    with pytest.raises(UsageError, match="is the folder of the other split, and --split is val"):
        convert(raw / "train_v2.0_raw", tmp_path, split="val")


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_files_may_be_links_to_other_names(tmp_path):
    """As in the cache of Hugging Face, whose files have no ending."""
    real = write_split(tmp_path / "real", [[(0, 9)]], flat=True)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(real.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / path.name).symlink_to(tmp_path / "blobs" / str(number))
    convert(tmp_path / "snapshot", tmp_path / "out")
    assert shown(tmp_path / "out" / "train.jsonl") == [[0, 1, 2, 3, 4]]


def test_many_problems_are_counted(tmp_path):
    (tmp_path / "metadata.json").write_text('{"num_shards": 30}')
    with pytest.raises(WangenError, match=r"the data has 120 problems:(?s:.*)shard 4(?s:.*)… and 100 more") as error:
        convert(tmp_path, tmp_path / "o")
    assert error.value.found.count("\n") == 21


def test_a_folder_without_the_data(tmp_path, capsys):
    assert main(["world_model", "--source", str(tmp_path), "--output", str(tmp_path / "o")]) == 2
    assert "holds neither metadata.json nor train_v2.0_raw/metadata.json" in capsys.readouterr().err


def test_where_much_is_missing_not_every_shard_is_looked_for(tmp_path):
    (tmp_path / "metadata.json").write_text('{"num_shards": 1000000000}')
    with pytest.raises(WangenError, match="… and 3980 more; shards from 1000 on were not looked at") as error:
        convert(tmp_path, tmp_path / "o")
    assert error.value.found.count("\n") == 21


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def _say(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


BROKEN = {
    "a shard is missing": (lambda f: (f / "videos/video_1.mp4").unlink(), "video_1.mp4: is not there (shard 1)"),
    "fewer shards than said": (lambda f: _say(f / "metadata.json", num_shards=3),
                               "metadata_2.json: is not there (shard 2)"),
    "segments": (lambda f: _cut(f / "segment_indices/segment_idx_0.bin", 4),
                 "segment_idx_0.bin: has 32 bytes: 9 frames as metadata_0.json says, one number each, are 36"),
    "states": (lambda f: _cut(f / "robot_states/states_1.bin", 100),
               "states_1.bin: has 800 bytes: 9 frames as metadata_1.json says, 25 numbers each, are 900"),
    "frames": (lambda f: _say(f / "metadata/metadata_0.json", shard_num_frames=8),
               "video_0.mp4: has 9 frames, metadata_0.json says 8"),
    "sum": (lambda f: _say(f / "metadata.json", num_images=17),
            "metadata.json: says num_images 17, the shards have 18 frames"),
    "a video": (lambda f: _cut(f / "videos/video_0.mp4", 1500), "video_0.mp4: cannot be read as a video"),
    "no count": (lambda f: _say(f / "metadata/metadata_1.json", shard_num_frames="9"),
                 'metadata_1.json: shard_num_frames must be a whole number from 1 on, got "9"'),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_data_that_is_not_whole(tmp_path, capsys, case):
    folder = write_split(tmp_path / "raw", [[(0, 9)], [(1, 9)]])
    breaking, words = BROKEN[case]
    breaking(folder)
    assert main(["world_model", "--source", str(folder), "--output", str(tmp_path / "o"), "--frames", "5"]) == 1
    said = capsys.readouterr().err
    assert f"  - {words}" in said
    assert "Traceback" not in said
    assert not (tmp_path / "o" / "train.jsonl").exists()


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    folder = write_split(tmp_path / "raw", [[(0, 9)], [(1, 9)]])
    (folder / "videos/video_0.mp4").unlink()
    _cut(folder / "robot_states/states_1.bin", 4)
    with pytest.raises(WangenError, match=r"the data has 2 problems:\n(?s:.*)video_0\.mp4(?s:.*)states_1\.bin"):
        convert(folder, tmp_path / "o")


@pytest.mark.parametrize("text", ["", "[]", '{"num_shards": true}'])
def test_metadata_that_is_none(tmp_path, text):
    (tmp_path / "metadata.json").write_text(text)
    with pytest.raises(WangenError, match=r"is not JSON|is no JSON object|num_shards must be a whole number") as error:
        convert(tmp_path, tmp_path / "o")
    assert error.value.where == str(tmp_path / "metadata.json")
