"""Lines of a manifest that take frames of a longer video by number: what is read, cached, trained on and refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from footage import numbers, write_video
from safetensors.torch import load_file
from test_manifest_dataset import write_manifest
from train_cases import VECTORS, Cases, wide_prompts
from world_model_shards import SIZE, picture, write_shard, write_split

from wangen import profiles
from wangen.generator import check
from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.generator.manifests import read_manifest
from wangen.generator.prepare_steps import WorldModel
from wangen.generator.steps import CacheLatents, CacheText, Check, CheckCache, Train
from wangen.runtime import cache_latents, cache_text, check_cache, numbered_frames, train, world_model
from wangen.runtime.cache.recipes import digest
from wangen.runtime.media import ClipDataset, load_clip, load_numbered, target_frames
from wangen.runtime.samples import read_samples

MODEL = profiles.model("ti2v-5B")


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An mp4 of 75 frames with B frames and seven keyframes."""
    return write_split(tmp_path_factory.mktemp("shard"), [[(0, 75)]]) / "videos" / "video_0.mp4"


def line(file: Path | str, first: int, **changes: Any) -> dict[str, Any]:
    return {"file": str(file), "prompt": "", "first_frame": first, "frames": 5, "width": 64, "height": 64} | changes


def shown(pixels: np.ndarray) -> list[int]:
    """(3, T, H, W) -> the numbers that the frames show."""
    return numbers(pixels.transpose(1, 2, 3, 0))


# Frames by number


def test_the_shard_is_a_hard_one(shard):
    """Its frames are stored in another order than they are shown, so that the tests below say something."""
    with av.open(str(shard)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    times = [packet.pts for packet in packets]
    assert times != sorted(times)
    assert sum(packet.is_keyframe for packet in packets) == 7


@pytest.mark.parametrize("step", [1, 2, 13])
def test_every_frame_is_found_by_its_number(shard, step):
    whole = load_clip(shard, SIZE, 0, 75, 30)
    assert shown(whole) == list(range(75))
    for first in range(75 - step):
        found = load_numbered(shard, SIZE, range(first, first + step + 1, step))
        np.testing.assert_array_equal(found, whole[:, first : first + step + 1 : step])


def test_what_lies_before_is_not_decoded(shard, monkeypatch):
    decoded = []
    real = numbered_frames._from_keyframe

    def counting(*words: Any) -> Any:
        for frame in real(*words):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(numbered_frames, "_from_keyframe", counting)
    load_numbered(shard, SIZE, range(70, 72))
    assert len(decoded) <= 12


def test_a_rate_that_varies_and_files_of_other_kinds_count_the_same(tmp_path):
    """AVI has no time stamps for B frames, and an MPEG program stream no index."""
    frames = [picture(number) for number in range(30)]
    times_ms = np.cumsum([20 + 37 * (number % 5) for number in range(30)]).tolist()
    np.savez(tmp_path / "n.npz", frames=np.stack(frames), fps=16)
    made = [
        write_video(tmp_path / "varies.mp4", frames, times_ms=times_ms),
        write_video(tmp_path / "a.mkv", frames, 30, format="matroska"),
        write_video(tmp_path / "a.avi", frames, 30, codec="mpeg4", format="avi"),
        write_shard(tmp_path / "b.avi", range(30)),
        write_shard(tmp_path / "b.mpg", range(30), codec="mpeg2video"),
        tmp_path / "n.npz",
    ]
    for path in made:
        for first in range(17):
            numbers_wanted = range(first, 30, 3)
            assert shown(load_numbered(path, SIZE, numbers_wanted)) == list(numbers_wanted), path.name


def test_a_frame_after_the_end(shard, tmp_path):
    np.savez(tmp_path / "n.npz", frames=np.zeros((9, 8, 8, 3), np.uint8), fps=16)
    with pytest.raises(WangenError, match="frame 75 cannot be read"):
        load_numbered(shard, SIZE, range(73, 79))
    with pytest.raises(WangenError, match="frame 10 cannot be read"):
        load_numbered(tmp_path / "n.npz", (8, 8), range(8, 12, 2))


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    path = write_video(tmp_path / "a.mp4", [picture(number) for number in range(10)], 30)
    assert shown(load_numbered(path, SIZE, range(3, 5))) == [3, 4]
    write_video(path, [picture(number) for number in range(50, 90)], 15)
    assert shown(load_numbered(path, SIZE, range(30, 32))) == [80, 81]


# Lines


def test_an_excerpt_is_cut_by_its_own_frames_whatever_the_models_rate(shard, tmp_path):
    path = write_manifest(tmp_path / "a.jsonl", line(shard, 10, frame_step=3), line(shard, 40, prompt="a robot"))
    first, second = read_samples(CheckCache(manifest=path), MODEL)
    assert shown(target_frames(first)) == [10, 13, 16, 19, 22]
    assert shown(target_frames(first, first_only=True)) == [10]
    assert shown(target_frames(second)) == [40, 41, 42, 43, 44]
    assert (first.name, second.name) == ("video_0.mp4:10+5x3", "video_0.mp4:40+5")
    assert (first.item.captions, second.item.captions) == (("",), ("a robot",))
    assert "fps" not in first.latent_recipe()


def test_a_toml_may_take_windows_of_an_excerpt(shard, tmp_path):
    write_manifest(tmp_path / "a.jsonl", line(shard, 10, frame_step=2, frames=13))
    (tmp_path / "a.toml").write_text(
        "[[datasets]]\nmanifest = 'a.jsonl'\ntarget_frames = [5]\nframe_extraction = 'chunk'\nsource_fps = 5\n"
    )
    samples = read_samples(CheckCache(dataset_config=tmp_path / "a.toml"), MODEL)
    assert [shown(target_frames(sample)) for sample in samples] == [[10, 12, 14, 16, 18], [20, 22, 24, 26, 28]]
    assert [sample.name for sample in samples] == ["video_0.mp4:10+5x2", "video_0.mp4:20+5x2"]


def test_the_key_follows_the_frames(shard, tmp_path):
    def recipes(**changes: Any) -> tuple[str, str]:
        """Of the latent and of CLIP's view of the first frame."""
        path = write_manifest(tmp_path / "a.jsonl", line(shard, **({"first": 10, "frame_step": 2} | changes)))
        (sample,) = read_samples(CheckCache(manifest=path), MODEL)
        return digest(sample.latent_recipe()), digest(sample.clip_recipe())

    latent, view = recipes()
    assert recipes(prompt="another", fps=3) == (latent, view)
    for changes in ({"first": 11}, {"frame_step": 3}, {"frames": 9}):
        other, other_view = recipes(**changes)
        assert other != latent
        assert (other_view == view) == ("first" not in changes)


def test_the_dataset_for_torch_reads_excerpts(shard, tmp_path):
    path = write_manifest(tmp_path / "a.jsonl", line(shard, 10, frame_step=3))
    item = ClipDataset(path, frames=5, size=(64, 64))[0]
    assert isinstance(item["frames"], torch.Tensor)
    assert numbers(((item["frames"] + 1) * 127.5).round().numpy().transpose(0, 2, 3, 1)) == [10, 13, 16, 19, 22]
    with pytest.raises(WangenError, match="has 5 frames, 9 are asked for"):
        ClipDataset(path, frames=9, size=(64, 64))[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"first_frame": -1}, "first_frame must be a whole number from 0 on, got -1"),
        ({"first_frame": "3"}, "first_frame must be a whole number from 0 on, got 3"),
        ({"frame_step": 0}, "frame_step must be a whole number from 1 on, got 0"),
        ({"frames": None}, "frames must be a whole number from 1 on, got None"),
        ({"mask_path": "@"}, "takes frames of a longer video, and has a clip as its control or mask"),
        ({"prompt": " "}, "its caption is empty"),
        ({"prompt": ["a cat", "\u200b"]}, "its caption is empty"),
    ],
)
def test_lines_that_cannot_be_used(shard, tmp_path, changes, words):
    given = {key: str(shard) if value == "@" else value for key, value in changes.items()}
    path = write_manifest(tmp_path / "a.jsonl", line(shard, 3) | given)
    items, problems = read_manifest(path)
    assert items == []
    assert [problem.found for problem in problems] == [f"line 1: {words}"]


def test_an_empty_caption_is_for_excerpts_alone(shard, tmp_path):
    path = write_manifest(tmp_path / "a.jsonl", {"file": str(shard), "prompt": ""})
    assert [problem.found for problem in read_manifest(path)[1]] == ["line 1: its caption is empty"]


def test_a_line_that_takes_more_than_there_is_is_refused_before_anything_starts(shard, tmp_path):
    path = write_manifest(tmp_path / "a.jsonl", line(shard, 0), line(shard, 67, frame_step=2))
    said = "line 2 of the manifest takes frame 75, and the last one is 74"
    with pytest.raises(WangenError, match=said):
        read_samples(CheckCache(manifest=path), MODEL)
    looked = check.run(Check(manifest=path, task="ti2v-5B"))
    assert not looked.ok
    assert said in json.dumps(looked.result, default=str)
    write_manifest(tmp_path / "a.jsonl", line(shard, 0), line(shard, 66, frame_step=2))
    assert len(read_samples(CheckCache(manifest=path), MODEL)) == 2


def test_target_frames_that_no_excerpt_has(shard, tmp_path):
    write_manifest(tmp_path / "a.jsonl", line(shard, 10))
    (tmp_path / "a.toml").write_text("[[datasets]]\nmanifest = 'a.jsonl'\ntarget_frames = [9]\n")
    with pytest.raises(WangenError, match="line 1 of the manifest takes 5 frames, 9 are needed"):
        read_samples(CheckCache(dataset_config=tmp_path / "a.toml"), MODEL)


def test_excerpts_are_not_published_as_whole_files(shard, tmp_path, capsys):
    path = write_manifest(tmp_path / "a.jsonl", line(shard, 10, prompt="a robot"))
    (tmp_path / "wangen.toml").write_text('model = "ti2v-5B"\nplatforms = ["linux"]\nnum_frames = 5\n')
    assert main(["publish", "walks", "--workspace", str(tmp_path), "--source", str(path)]) != 0
    assert "line 1: takes frames of a longer video, and a bundle holds whole files" in capsys.readouterr().err


# From raw data to a step of training


@pytest.mark.slow
def test_raw_data_trains_the_model_that_goes_on_from_its_first_frames(tmp_path, monkeypatch):
    raw = write_split(tmp_path / "raw", [[(0, 19), (1, 8)], [(1, 18)]])
    world_model.run(WorldModel(source=raw, output=tmp_path, frames=9, temporal_downsample=2))
    manifest = tmp_path / "train.jsonl"
    wide_prompts(monkeypatch)
    vae, t5 = VECTORS / "vae22" / "Wan2.2_VAE.pth", VECTORS / "t5" / "models_t5_umt5-xxl-enc-bf16.pth"
    step: dict[str, Any] = {"manifest": manifest, "task": "ti2v-5B", "device": "cpu"}
    made = cache_latents.run(CacheLatents(vae=vae, vae_dtype="float32", **step))
    cache_text.run(CacheText(t5=t5, t5_dtype="float32", **step))
    assert check_cache.run(CheckCache(manifest=manifest, task="ti2v-5B")).ok
    entries = sorted((tmp_path / "train_cache").glob("*.latent.safetensors"))
    assert [entry.name.partition("-")[0] for entry in entries] == ["video_0_mp4_0_9x2", "video_1_mp4_0_9x2"]
    assert all(tensor.shape == (48, 3, 4, 4) for entry in entries for tensor in load_file(entry).values())
    before = [entry.read_bytes() for entry in entries]
    assert made.ok

    cases = Cases(tmp_path, {"dit": VECTORS / "dit_ti2v5b" / "model.safetensors"})
    options: Train = cases.options(tmp_path / "out", dataset_config=None, manifest=manifest, task="ti2v-5B",
                                   max_train_steps=1)  # fmt: skip
    assert train.run(options).ok
    assert (tmp_path / "out" / "lora.safetensors").is_file()

    # Another stride keeps what is the same and encodes what is new.
    more = WorldModel(source=raw, output=tmp_path, frames=9, temporal_downsample=2, stride=1, overwrite=True)
    world_model.run(more)
    with pytest.raises(WangenError, match="cache"):
        train.run(replace(options, output_dir=tmp_path / "other"))
    cache_latents.run(CacheLatents(vae=vae, vae_dtype="float32", **step))
    again = sorted((tmp_path / "train_cache").glob("*.latent.safetensors"))
    assert len(again) == 5
    assert [entry.read_bytes() for entry in again if entry in entries] == before
