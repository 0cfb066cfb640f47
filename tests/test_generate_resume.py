"""`generate` again: what is there whole, with the very settings, is kept; nothing of somebody else's is overwritten."""

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import make_clip, read_tree, write_tree
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny import TinyRun

from wangen.generator.errors import WangenError
from wangen.generator.files import temporary_beside
from wangen.generator.steps import Generate
from wangen.runtime import generate, train
from wangen.runtime.sampling import videos
from wangen.runtime.sampling.output import read_settings
from wangen.runtime.sampling.resume import is_made


def options_for(tiny_run: TinyRun, path: Path, **changes) -> Generate:
    options = Generate(
        **tiny_run.weights, task="t2v-1.3B", prompt="a red square", video_size=(64, 64), video_length=1, infer_steps=1,
        guidance_scale=1.0, save_path=path, device="cpu",
    )  # fmt: skip
    return replace(options, **changes)


@pytest.fixture(scope="module")
def lora(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    train.run(tiny_run.options(folder, max_train_steps=2, learning_rate=1e-2))
    return folder / "lora.safetensors"


def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on loading anything fails the test."""
    for name in ("make_scenes", "Sampler"):
        monkeypatch.setattr(generate, name, lambda *_: pytest.fail("a model was loaded"))


def test_what_is_there_is_kept_and_no_model_is_loaded(tiny_run, lora, tmp_path, monkeypatch, caplog):
    options = options_for(tiny_run, tmp_path / "out", num_videos=3, lora_weight=(lora,))
    first = generate.run(options)
    before = read_tree(tmp_path / "out")
    no_model(monkeypatch)
    with caplog.at_level("INFO"):
        again = generate.run(options)
    assert "3 of 3 are there already (--fresh makes them again)" in caplog.text
    assert (first.counts["videos"], again.counts["videos"], again.counts["kept"]) == (3, 0, 3)
    assert again.result["files"] == first.result["files"]
    assert read_tree(tmp_path / "out") == before


@pytest.mark.parametrize("kernel", ["flash", "xformers", "sage"])
def test_what_a_kernel_made_that_took_the_place_of_another_is_kept(tiny_run, tmp_path, monkeypatch, kernel):
    """None of them runs on a CPU."""
    options = options_for(tiny_run, tmp_path, attention=kernel)
    first = generate.run(options)
    no_model(monkeypatch)
    assert generate.run(options).result["files"] == first.result["files"]
    assert generate.run(replace(options, attention="sdpa")).counts["kept"] == 1


def test_only_what_is_missing_is_made_and_is_the_same(tiny_run, tmp_path, caplog):
    options = options_for(tiny_run, tmp_path, num_videos=3)
    generate.run(options)
    before = read_tree(tmp_path)
    (tmp_path / "seed-43.png").unlink()
    kept = (tmp_path / "seed-42.png").stat().st_mtime_ns
    with caplog.at_level("INFO"):
        assert generate.run(options).counts["videos"] == 1
    assert "2 of 3 are there already" in caplog.text
    assert read_tree(tmp_path) == before
    assert (tmp_path / "seed-42.png").stat().st_mtime_ns == kept


@pytest.mark.slow
def test_a_run_that_broke_off_goes_on(tiny_run, tmp_path, monkeypatch):
    options = options_for(tiny_run, tmp_path / "out", num_videos=3)
    sample, calls = videos.denoise, []

    def full_at_the_third(*words, **names):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sample(*words, **names)

    with monkeypatch.context() as patch:
        patch.setattr(videos, "denoise", full_at_the_third)
        with pytest.raises(WangenError, match="out of memory"):
            generate.run(options)
    assert generate.run(options).counts == {"videos": 1, "kept": 2, "frames": 1, "steps": 1}
    generate.run(replace(options, save_path=tmp_path / "whole"))
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "whole")


@pytest.mark.slow
def test_the_file_that_is_named_is_kept_too_and_replaced_by_other_settings(tiny_run, tmp_path, monkeypatch):
    options = options_for(tiny_run, tmp_path / "look.png")
    generate.run(options)
    first = (tmp_path / "look.png").read_bytes()
    generate.run(replace(options, seed=1))
    assert (tmp_path / "look.png").read_bytes() != first
    no_model(monkeypatch)
    assert generate.run(replace(options, seed=1)).counts["kept"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["look.png"]


@pytest.mark.slow
def test_other_settings_get_a_name_of_their_own_which_is_found_again(tiny_run, tmp_path, monkeypatch):
    for prompt in ("a red square", "a blue wall", "a clip"):
        generate.run(options_for(tiny_run, tmp_path, prompt=prompt))
    assert sorted(read_tree(tmp_path)) == ["seed-42-2.png", "seed-42-3.png", "seed-42.png"]
    (tmp_path / "seed-42-2.png").unlink()
    with monkeypatch.context() as patch:
        no_model(patch)
        kept = generate.run(options_for(tiny_run, tmp_path, prompt="a clip"))
    assert kept.result["file"] == tmp_path / "seed-42-3.png"
    made = generate.run(options_for(tiny_run, tmp_path, prompt="a blue wall"))
    assert made.result["file"] == tmp_path / "seed-42-2.png"


@pytest.mark.slow
def test_a_lora_that_was_trained_anew_under_its_name_is_another_one(tiny_run, lora, tmp_path):
    own = shutil.copyfile(lora, tmp_path / "own.safetensors")
    options = options_for(tiny_run, tmp_path / "out", lora_weight=(own,))
    generate.run(options)
    weights = load_file(own)
    name = next(name for name in weights if "lora_B" in name)
    save_file({**weights, name: weights[name] * 1.001}, own)
    assert generate.run(options).result["file"] == tmp_path / "out/seed-42-2.png"
    files = [read_settings(tmp_path / "out" / name, "--from") for name in ("seed-42.png", "seed-42-2.png")]
    assert files[0].pop("loras") != files[1].pop("loras")
    assert files[0] == files[1]


@pytest.mark.slow
def test_other_versions_of_the_libraries_make_another_video(tiny_run, tmp_path, monkeypatch):
    options = options_for(tiny_run, tmp_path)
    generate.run(options)
    monkeypatch.setattr("wangen.runtime.sampling.repeat.version", lambda _name: "9.0")
    assert generate.run(options).result["file"] == tmp_path / "seed-42-2.png"


def test_fresh_makes_the_same_files_again(tiny_run, tmp_path):
    options = options_for(tiny_run, tmp_path, num_videos=2)
    generate.run(options)
    before = read_tree(tmp_path)
    for path in tmp_path.iterdir():
        path.touch()
    times = [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())]
    assert generate.run(replace(options, fresh=True)).counts["videos"] == 2
    assert read_tree(tmp_path) == before
    after = [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())]
    assert all(one < other for one, other in zip(times, after, strict=True))


def test_a_try_always_makes_what_it_tries(tiny_run, tmp_path):
    options = options_for(tiny_run, tmp_path, smoke=True).effective()
    assert options.fresh


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.slow
def test_a_file_that_cannot_be_decoded_is_not_ours_and_stays(tiny_run, tmp_path, frames):
    options = options_for(tiny_run, tmp_path, video_length=frames)
    path = generate.run(options).result["file"]
    whole, settings = path.read_bytes(), read_settings(path, "--from")
    assert is_made(path, settings)
    for length in (0, 40, *range(len(whole) // 8, len(whole) - 16, len(whole) // 8)):
        path.write_bytes(whole[:length])
        assert not is_made(path, settings), length
    torn = path.read_bytes()
    report = generate.run(options)
    assert report.result["file"] == path.with_name(f"seed-42-2{path.suffix}")
    assert read_tree(tmp_path) == {path.name: torn, report.result["file"].name: whole}


def other_run_between(monkeypatch: pytest.MonkeyPatch, options: Generate) -> list[Path]:
    """While the next run samples, another one with these options begins and ends; its files are returned."""
    sample, files = videos.denoise, []

    def run_the_other_first(*words, **names):
        if not files:
            files.append(Path())
            files[:] = generate.run(options).result["files"]
        return sample(*words, **names)

    monkeypatch.setattr(videos, "denoise", run_the_other_first)
    return files


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.slow
def test_two_runs_into_one_folder_at_once_lose_no_video(tiny_run, tmp_path, monkeypatch, links):
    if not links:

        def refused(*_words):
            raise PermissionError(errno.EPERM, "no links here")

        monkeypatch.setattr("os.link", refused)
    others = other_run_between(monkeypatch, options_for(tiny_run, tmp_path, prompt="a blue wall"))
    report = generate.run(options_for(tiny_run, tmp_path))
    assert [path.name for path in (*others, report.result["file"])] == ["seed-42.png", "seed-42-2.png"]
    assert sorted(read_tree(tmp_path)) == ["seed-42-2.png", "seed-42.png"]
    assert read_settings(report.result["file"], "--from")["prompt"] == "a red square"
    assert report.summary.startswith(str(report.result["file"]))


def test_what_a_killed_run_left_goes_and_what_a_live_one_writes_stays(tiny_run, tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    mine = temporary_beside(tmp_path / "seed-42.png")
    left = mine.with_name(mine.name.replace(f"{os.getpid():08x}", f"{ended.pid:08x}"))
    write_tree(tmp_path, {path.name: b"half" for path in (mine, left)})
    generate.run(options_for(tiny_run, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine.name, "seed-42.png"]


def test_two_equal_runs_at_once_leave_one_video(tiny_run, tmp_path, monkeypatch):
    others = other_run_between(monkeypatch, options_for(tiny_run, tmp_path))
    assert generate.run(options_for(tiny_run, tmp_path)).result["files"] == others
    assert list(read_tree(tmp_path)) == ["seed-42.png"]


def test_a_link_that_leads_nowhere_is_not_replaced(tiny_run, tmp_path):
    (tmp_path / "seed-42.png").symlink_to(tmp_path / "gone")
    assert generate.run(options_for(tiny_run, tmp_path)).result["file"].name == "seed-42-2.png"
    assert (tmp_path / "seed-42.png").is_symlink()


def test_what_is_not_of_this_step_is_never_overwritten(tiny_run, tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "seed-42.png")
    (tmp_path / "seed-43.png").mkdir()
    make_clip(tmp_path / "seed-42.mp4", num_frames=5, fps=16, size=(64, 64))
    before = read_tree(tmp_path)
    made = generate.run(options_for(tiny_run, tmp_path, num_videos=2)).result["files"]
    made += generate.run(options_for(tiny_run, tmp_path, video_length=5)).result["files"]
    assert [path.name for path in made] == ["seed-42-2.png", "seed-43-2.png", "seed-42-2.mp4"]
    assert {name: read_tree(tmp_path)[name] for name in before} == before
