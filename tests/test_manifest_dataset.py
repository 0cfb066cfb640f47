"""`--manifest` in place of a dataset TOML in every step, and manifests as blocks of one and as a source of publish."""

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import image_bytes, make_clip, make_image, write_tree
from tiny import TinyRun

from wangen import profiles
from wangen.generator import check
from wangen.generator.cli import main
from wangen.generator.commands import parse
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.items import read_items
from wangen.generator.manifests import read_manifest
from wangen.generator.publish.source import read_source
from wangen.generator.steps import CacheLatents, CacheText, Check, CheckCache, Train
from wangen.generator.tomls import DatasetEntry, read_dataset
from wangen.runtime import cache_latents, cache_text, cache_tools, check_cache, train
from wangen.runtime.samples import folders_left_out, read_samples

MODEL = profiles.model("t2v-1.3B")


def write_manifest(path: Path, *values: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in values), encoding="utf-8")
    return path


def clip_line(name: str, **changes: Any) -> dict[str, Any]:
    """A line as `wangen preprocess` writes it."""
    line = {"file": f"clips/{name}", "prompt": f"what {name} shows", "source": "walk.mp4", "source_digest": "0" * 64}
    line |= {"start_s": 0.0, "end_s": 0.5625, "fps": 16, "frames": 9, "width": 64, "height": 48}
    return line | {"signals": {"motion": 3.2}} | changes


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of 9 frames of 64x48, one of them in .npz, with a manifest to train on and one that is held out."""
    folder = tmp_path_factory.mktemp("prepared")
    for seed, name in enumerate(("a.mp4", "c.mp4")):
        make_clip(folder / "clips" / name, 9, 16, (64, 48), seed=seed)
    pixels = np.random.default_rng(0).integers(0, 256, (9, 48, 64, 3), dtype=np.uint8)
    np.savez(folder / "clips" / "b.npz", frames=pixels, fps=16)
    write_manifest(folder / "train.jsonl", clip_line("a.mp4"), clip_line("b.npz"))
    write_manifest(folder / "val.jsonl", clip_line("c.mp4"))
    return folder


# What a manifest says of itself


def test_the_lines_decide_size_length_and_place(prepared):
    (entry,) = read_dataset(prepared / "train.jsonl")
    assert entry == DatasetEntry(
        directory=prepared, media="video", cache_directory=prepared / "train_cache", manifest=prepared / "train.jsonl",
        mixed=True, resolution=(64, 48), enable_bucket=True, target_frames=(9,),
    )  # fmt: skip
    samples = read_samples(CheckCache(manifest=prepared / "train.jsonl"), MODEL)
    assert [(sample.name, sample.size, sample.item.caption) for sample in samples] == [
        ("a.mp4:0+9", (64, 48), "what a.mp4 shows"), ("b.npz:0+9", (64, 48), "what b.npz shows"),
    ]  # fmt: skip


def packed(path: Path, *manifests: Path) -> Path:
    """A tar of manifests, with a file that is none."""
    with tarfile.open(path, "w") as tar:
        for manifest in manifests:
            tar.add(manifest, f"lines/{manifest.name}")
        tar.add(__file__, "notes.py")
    return path


def test_a_tar_of_manifests_is_one_with_all_their_lines(prepared, tmp_path):
    folder = tmp_path / "set"
    shutil.copytree(prepared, folder)
    parts = [write_manifest(folder / "part0.jsonl", clip_line("a.mp4")), folder / "part1.ndjson"]
    parts[1].write_text("\ufeff" + json.dumps(clip_line("b.npz")), encoding="utf-8")
    tar = packed(folder / "many.tar", *parts)
    wanted, _ = read_manifest(folder / "train.jsonl")
    items, problems = read_manifest(tar)
    assert problems == []
    assert [replace(item, caption_path=folder / "train.jsonl") for item in items] == wanted
    (entry,) = read_dataset(tar)
    assert (entry.cache_directory, entry.target_frames) == (folder / "many_cache", (9,))
    recipes = [
        [sample.latent_recipe() for sample in read_samples(CheckCache(manifest=manifest), MODEL)]
        for manifest in (tar, folder / "train.jsonl")
    ]
    assert recipes[0] == recipes[1]
    broken = write_manifest(folder / "part2.jsonl", {"file": "clips/none.mp4", "prompt": "x"})
    _, (problem,) = read_manifest(packed(tar, *parts, broken))
    assert "clips/none.mp4 is not there" in problem.found


@pytest.mark.parametrize(("content", "words"), [(b"", "cannot read the tar"), (b"x" * 2000, "cannot read the tar"),
                                                (None, "the tar holds no manifest")])  # fmt: skip
def test_a_tar_that_holds_no_lines_is_refused(tmp_path, capsys, content, words):
    tar = packed(tmp_path / "set.tar")
    if content is not None:
        tar.write_bytes(content)
    assert main(["check_cache", "--manifest", str(tar)]) == 1
    assert words in capsys.readouterr().err


def test_a_tar_in_a_folder_of_media_is_not_read(tmp_path):
    make_image(tmp_path / "media/a.png")
    (tmp_path / "media/a.txt").write_text("a picture")
    packed(tmp_path / "media/old.tar", write_manifest(tmp_path / "old.jsonl", {"file": "b.png", "prompt": "x"}))
    assert [item.path.name for item in read_source(tmp_path / "media", MODEL).items] == ["a.png"]


def test_images_clips_and_lengths_may_be_mixed(tmp_path):
    for number in (9, 14):
        make_clip(tmp_path / f"{number}.mp4", number, 16, (64, 48))
    make_image(tmp_path / "a.png", (48, 64))
    path = write_manifest(
        tmp_path / "set.jsonl", {"file": "9.mp4", "prompt": "x", "frames": 9, "width": 64, "height": 48},
        {"image_path": "a.png", "caption": ["one", "two"]}, {"file": "14.mp4", "text": "y", "frames": 14},
    )  # fmt: skip
    clips, images = read_dataset(path)
    assert (clips.frame_extraction, clips.max_frames, clips.resolution) == ("full", 13, (64, 48))
    assert (images.media, images.resolution) == ("image", (832, 480))
    assert [item.path.name for entry in (clips, images) for item in read_items(entry)[0]] == [
        "9.mp4", "14.mp4", "a.png",
    ]  # fmt: skip
    names = [sample.name for sample in read_samples(CheckCache(manifest=path), MODEL)]
    assert names == ["9.mp4:0+9", "14.mp4:0+13", "a.png"]


def test_a_line_that_says_no_length_does_not_shorten_its_clip(tmp_path):
    for number in (9, 21):
        make_clip(tmp_path / f"{number}.mp4", number, 16, (64, 48))
    path = write_manifest(tmp_path / "set.jsonl", {"file": "9.mp4", "prompt": "x", "frames": 9},
                          {"file": "21.mp4", "prompt": "y"})  # fmt: skip
    assert read_dataset(path)[0].max_frames == 81
    names = [sample.name for sample in read_samples(CheckCache(manifest=path, resolution="32"), MODEL)]
    assert names == ["9.mp4:0+9", "21.mp4:0+21"]


def test_another_resolution_has_a_cache_of_its_own(prepared):
    own, small = read_dataset(prepared / "train.jsonl", "64x48,32")
    assert (own.cache_directory.name, own.resolution) == ("train_cache", (64, 48))
    assert (small.cache_directory.name, small.resolution) == ("train_32_cache", (32, 32))
    options = CacheLatents(manifest=prepared / "train.jsonl", vae=Path("v"), resolution="32")
    assert folders_left_out(options) == {prepared / "train_cache"}
    with pytest.raises(UsageError, match="'big' is no resolution"):
        read_dataset(prepared / "train.jsonl", "big")


def test_a_block_of_a_toml_may_name_a_manifest_and_say_otherwise(prepared, tmp_path):
    path = tmp_path / "set.toml"
    text = f"[general]\nnum_repeats = 3\n[[datasets]]\nmanifest = '{(prepared / 'train.jsonl').as_posix()}'\n"
    path.write_text(text)
    (entry,) = read_dataset(path)
    assert entry == replace(read_dataset(prepared / "train.jsonl")[0], num_repeats=3)
    path.write_text(text + "target_frames = [5]\nresolution = 32\ncache_directory = '/tmp/elsewhere'\n")
    (entry,) = read_dataset(path)
    assert (entry.target_frames, entry.resolution, entry.enable_bucket) == ((5,), (32, 32), False)
    assert entry.cache_directory == Path("/tmp/elsewhere")
    path.write_text(text + "frame_extraction = 'chunk'\n")
    (entry,) = read_dataset(path)
    assert (entry.target_frames, entry.frame_extraction) == ((9,), "chunk")
    path.write_text(text + "image_directory = 'x'\n")
    with pytest.raises(UsageError, match="a block names image_directory and manifest"):
        read_dataset(path)
    path.write_text(text + "mask_directory = 'x'\n")
    with pytest.raises(UsageError, match="mask_directory belongs to folders of media, this block has manifest"):
        read_dataset(path)


def test_a_relative_manifest_of_a_toml_is_found_beside_it(prepared, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="wangen")
    monkeypatch.chdir(tmp_path)
    path = prepared / "set.toml"
    path.write_text("[[datasets]]\nmanifest = 'train.jsonl'\n")
    assert read_dataset(path)[0].cache_directory == prepared / "train_cache"
    assert "start at its own folder" in caplog.text


# What is wrong


def test_lines_that_cannot_be_read_are_named_by_step_and_line(prepared, tmp_path, capsys):
    path = write_manifest(
        tmp_path / "set.jsonl", clip_line("gone.mp4"), {"prompt": "x"}, {"file": "notes.txt", "prompt": "x"},
        {"file": str(prepared / "clips/a.mp4"), "prompt": "x", "caption": "y"},
        {"file": str(prepared / "clips/a.mp4"), "video_path": "b.mp4", "prompt": "y"},
        {"file": "\ud800.mp4", "prompt": "x"}, {"file": str(prepared / "clips/a.mp4"), "prompt": "half \ud800"},
    )  # fmt: skip
    (tmp_path / "notes.txt").write_text("x")
    wanted = [
        "line 1: clips/gone.mp4 is not there; mend the path or take the line out",
        'line 2: has no file; write "file": "…"',
        "line 3: notes.txt is no image or video by its ending; mend this line",
        "line 4: has caption and prompt, one is needed; mend this line",
        "line 5: has file and video_path, one is needed; mend this line",
        "line 6: \\ud800.mp4 is not there; mend the path or take the line out",
        "line 7: its caption holds half a character; mend this line",
    ]
    assert main(["check", "--manifest", str(path), "--task", "t2v-1.3B"]) == 1
    said = capsys.readouterr().err
    assert all(f"set.jsonl: {line}" in said for line in wanted), said
    with pytest.raises(WangenError, match=r"the dataset has 7 problems(?s:.*)line 7") as error:
        read_samples(CheckCache(manifest=path), MODEL)
    assert error.value.where == str(path)


@pytest.mark.parametrize(("content", "words"), [(b"", "holds no lines"), (b"{", "line 1: is not JSON")])
def test_a_manifest_without_an_item(tmp_path, content, words):
    path = write_tree(tmp_path, {"set.jsonl": content}) / "set.jsonl"
    with pytest.raises(WangenError, match=words):
        read_samples(CheckCache(manifest=path), MODEL)


@pytest.mark.parametrize("step", ["check", "cache_latents", "cache_text", "check_cache", "train"])
def test_exactly_one_of_toml_and_manifest_is_given(step, capsys):
    words = {"cache_latents": ["--vae", "v"], "cache_text": ["--t5", "t"],
             "train": ["--output_dir", "o", "--output_name", "n"]}.get(step, [])  # fmt: skip
    assert main([step, *words]) == 2
    assert f"{step} needs --dataset_config or --manifest\n" in capsys.readouterr().err
    assert main([step, *words, "--dataset_config", "a.toml", "--manifest", "m.jsonl"]) == 2
    assert "--dataset_config and --manifest contradict each other\n" in capsys.readouterr().err


def test_the_command_line_wins_over_the_config_file(tmp_path):
    file = tmp_path / "flags.toml"
    file.write_text('dataset_config = "a.toml"\nseed = 7\noutput_name = "n"\n')
    words = ["--config_file", str(file), "--manifest", "m.jsonl", "--output", "out", "--lora_weights", "w",
             "--max_steps", "9", "--num_epochs", "2", "--save_steps", "3", "--val_manifest", "v.jsonl"]  # fmt: skip
    step = parse(Train, words)
    assert (step.dataset_config, step.manifest, step.dataset, step.seed) == (None, *[Path("m.jsonl")] * 2, 7)
    assert (step.output_dir, step.network_weights, step.validation_config) == (Path("out"), Path("w"), Path("v.jsonl"))
    assert (step.max_train_steps, step.max_train_epochs, step.save_every_n_steps) == (9, 2, 3)


# Every step


def test_a_manifest_goes_through_every_step_and_trains(prepared: Path, tiny_run: TinyRun, tmp_path, caplog, capsys):
    caplog.set_level("INFO", logger="wangen")
    weights, val = tiny_run.weights, prepared / "val.jsonl"
    for path in (prepared / "train.jsonl", val):
        looked = check.run(Check(manifest=path, task="t2v-1.3B", vae=weights["vae"], dit=weights["dit"]))
        assert looked.ok, looked.result
        cache_latents.run(CacheLatents(manifest=path, vae=weights["vae"], vae_dtype="float32", device="cpu"))
        cache_text.run(CacheText(manifest=path, t5=weights["t5"], t5_dtype="float32", device="cpu"))
        assert check_cache.run(CheckCache(manifest=path)).ok
    assert looked.counts["clips"] == 1
    assert len(list((prepared / "train_cache").glob("*.safetensors"))) == 5
    options = tiny_run.options(tmp_path / "out", dataset_config=None, manifest=prepared / "train.jsonl",
                               max_train_steps=2, validation_config=val, validation_timesteps=1)  # fmt: skip
    report = train.run(options)
    assert report.inputs["dataset_config"] == prepared / "train.jsonl"
    assert (tmp_path / "out" / "lora.safetensors").is_file()
    assert "held-out" in caplog.text
    missing = replace(options, output_dir=tmp_path / "other", resolution="32")
    with pytest.raises(WangenError) as error:
        train.run(missing)
    assert f"--manifest {prepared / 'train.jsonl'}" in error.value.cure
    (prepared / "val_cache").rename(tmp_path / "val_cache")
    with pytest.raises(WangenError) as error:
        train.run(replace(options, output_dir=tmp_path / "third"))
    assert f"--manifest {val}" in error.value.cure
    assert cache_tools.prune(prepared / "train.jsonl", yes=True) == 0
    assert "there is nothing to remove" in capsys.readouterr().out


# Publishing


def test_a_manifest_is_published_as_the_folder_that_it_lists(prepared, tmp_path, capsys, monkeypatch):
    place = tmp_path / "work"
    place.mkdir()
    (place / "wangen.toml").write_text('model = "t2v-1.3B"\nplatforms = ["linux"]\nnum_frames = 9\n')
    words = ["publish", "walks", "--workspace", str(place), "--source", str(prepared / "train.jsonl")]
    assert main([*words, "--resolution", "64x48"]) == 0, capsys.readouterr().err
    (toml,) = place.rglob("files/tomls/*.toml")
    monkeypatch.chdir(toml.parents[2])
    entries = read_dataset(toml)
    items = [item for entry in entries for item in read_items(entry)[0]]
    assert sorted((item.path.name, item.caption) for item in items) == [
        ("a.mp4", "what a.mp4 shows"), ("b.npz", "what b.npz shows"),
    ]  # fmt: skip
    assert entries[0].target_frames == (9,)


def test_other_archives_in_a_folder_are_said_and_not_published(tmp_path):
    write_tree(tmp_path, {"cat.png": image_bytes(format="PNG"), "cat.txt": "a cat"})
    np.savez(tmp_path / "cat.npz", latents=np.zeros(3))
    source = read_source(tmp_path, MODEL)
    assert ([item.path.name for item in source.items], source.problems) == (["cat.png"], [])
    assert source.left_out == ["cat.npz (holds no frames)"]


def test_a_line_may_repeat_itself(tmp_path):
    line = {"file": "a.png", "image_path": "a.png", "prompt": "x", "caption": "x", "file_name": "a.png"}
    write_tree(tmp_path, {"a.png": image_bytes(format="PNG"), "s.jsonl": json.dumps(line)})
    ((item,), problems) = read_manifest(tmp_path / "s.jsonl")
    assert (item.captions, problems) == (("x",), [])
