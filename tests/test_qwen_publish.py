"""Publishing edit datasets: control images go along, and what is published is cached, checked and trained."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from edit_set import CAPTIONS, make_edit_set
from helpers import read_tree
from tiny_qwen import TinyQwen, smaller

from wangen import profiles
from wangen.generator import check, scripts
from wangen.generator.cli import main
from wangen.generator.commands import parse
from wangen.generator.steps import CacheLatents, CacheText, Check, CheckCache, Train, find_step
from wangen.generator.tomls import read_dataset
from wangen.runtime import cache_latents, cache_text, check_cache, train


def workspace(folder: Path, tiny: TinyQwen, task: str) -> Path:
    """A workspace with the drawn dataset `edits`, control images beside the pictures."""
    made = make_edit_set(folder / "drawn", tiny, task)
    shutil.copytree(made.folder / "targets", folder / "datasets" / "edits")
    if task != "qwen-image":
        shutil.copytree(made.folder / "controls", folder / "datasets" / "edits" / "controls")
    (folder / "wangen.toml").write_text(f'platforms = ["linux", "windows"]\nmodel = "{task}"\nresolution = 64\n')
    return folder


def publish(place: Path, *more: str) -> int:
    return main(["publish", "edits", "--workspace", str(place), *more])


@pytest.mark.parametrize("task", ["qwen-image", "qwen-image-edit", "qwen-image-edit-plus"])
def test_what_is_published_is_cached_checked_and_trained(tiny_qwen: TinyQwen, tmp_path: Path, monkeypatch, task: str):
    smaller(monkeypatch, task)
    place = workspace(tmp_path, tiny_qwen, task)
    assert publish(place) == 0
    bundle = place / "published" / "linux"
    monkeypatch.chdir(bundle)
    controls = sorted(path.name for path in (place / "datasets/edits/controls").glob("*"))
    published = sorted(name for name in read_tree(bundle / "files/datasets/edits") if name.startswith("controls/"))
    assert [name for name in published if name.endswith(".png")] == [f"controls/{name}" for name in controls]
    lines = scripts.read_steps((bundle / "train_edits.sh").read_bytes(), "sh")
    steps = {step.command: step for words in lines for step in [parse(find_step(words[0]), words[1:])]}
    assert {step.task for step in steps.values() if hasattr(step, "task")} == {task}
    (block,) = read_dataset(steps["train"].dataset_config)
    assert (block.control_directory is None) == (task == "qwen-image")
    here = {"device": "cpu", "log_file": None, "lock": None}
    weights = tiny_qwen.single
    for kind, own, module in (
        (CacheLatents, {"vae": weights["vae"], "vae_dtype": "float32", **here}, cache_latents),
        (CacheText, {"t5": weights["t5"], "t5_dtype": "float32", **here}, cache_text),
        (CheckCache, {"vae": None, "t5": None, "vae_dtype": None, "t5_dtype": None, "log_file": None}, check_cache),
    ):
        step = steps[kind.command]
        assert isinstance(step, kind)
        assert module.run(replace(step, **own)).ok
    step = steps["train"]
    assert isinstance(step, Train)
    assert (step.timestep_sampling, step.learning_rate) == ("qwen_shift", 5e-5)
    report = train.run(replace(step, dit=weights["dit"], vae=None, t5=None, max_train_steps=1, max_train_epochs=None,
                               mixed_precision="no", log_with=("none",), **here))  # fmt: skip
    assert Path(report.result["lora"]).is_file()


def test_check_knows_the_weights_and_the_control_images(tiny_qwen: TinyQwen, tmp_path: Path, capsys, monkeypatch):
    place = workspace(tmp_path, tiny_qwen, "qwen-image-edit")
    assert publish(place) == 0
    monkeypatch.chdir(place / "published/linux")
    toml = place / "published/linux/files/tomls/edits_linux.toml"
    weights = [f"--{flag}={path}" for flag, path in tiny_qwen.single.items()]
    line = [Check.command, "--dataset_config", str(toml), "--task", "qwen-image-edit", *weights]
    assert main(line) == 0
    assert main([*line, f"--t5={tiny_qwen.single['dit']}"]) != 0
    assert "takes a Qwen2.5-VL text encoder" in capsys.readouterr().err
    text = toml.read_text().splitlines()
    toml.write_text("\n".join(row for row in text if not row.startswith("control_directory")) + "\n")
    assert main(line) != 0
    assert "house.png: has 0 control images, and qwen-image-edit takes one control image" in capsys.readouterr().err


def test_control_images_of_their_own_size_need_room_of_their_own(tiny_qwen: TinyQwen, tmp_path: Path):
    model, found = profiles.model("qwen-image-edit"), []
    for settings in ({}, {"control_resolution": [512, 256]}):
        made = make_edit_set(tmp_path / str(len(found)), tiny_qwen, **settings)
        (block,) = read_dataset(made.toml)
        found.append(check._cache_bytes(check._survey(block, model), model))
    assert found[1] - found[0] == 3 * 16 * 4 * (64 * 32 - 8 * 8)  # three of 16 channels in float32


def test_the_room_for_the_cache_is_about_what_it_takes(tiny_qwen: TinyQwen, tmp_path: Path):
    """With the embeddings' real width; the tiny encoder's are narrower by a known factor."""
    made = make_edit_set(tmp_path / "set", tiny_qwen).fill()
    (block,) = read_dataset(made.toml)
    model = profiles.model("qwen-image-edit")
    estimate = check._cache_bytes(check._survey(block, model), model)
    files = {path: path.stat().st_size for path in (made.folder / "cache").glob("*.safetensors")}
    texts = sum(size for path, size in files.items() if "text_encoder_output" in path.name)
    real = sum(files.values()) - texts + texts * 3584 / 256 * 2 / 4
    assert 0.7 < estimate / real < 1.5


def test_publishing_again_follows_the_control_images(tiny_qwen: TinyQwen, tmp_path: Path, capsys):
    place = workspace(tmp_path, tiny_qwen, "qwen-image-edit")
    assert publish(place) == 0
    before = read_tree(place / "published")
    assert publish(place) == 0
    assert read_tree(place / "published") == before
    controls = place / "datasets/edits/controls"
    shutil.copy(controls / "hill.png", controls / "house.png")
    assert publish(place) == 0
    folder = place / "published/linux/files/datasets/edits"
    assert (folder / "controls/house.png").read_bytes() == (controls / "hill.png").read_bytes()
    assert {path.stem for path in (folder / "64").glob("*.png")} == set(CAPTIONS)
    capsys.readouterr()
    (controls / "house.png").unlink()
    assert publish(place) != 0
    assert "house.png: has no control" in capsys.readouterr().err
    shutil.rmtree(controls)
    assert publish(place) != 0
    assert "qwen-image-edit edits pictures, and there are no control images" in capsys.readouterr().err
