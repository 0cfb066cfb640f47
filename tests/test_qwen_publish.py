"""Publishing edit datasets: control images go along, and what is published is cached, checked and trained."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from edit_set import CAPTIONS, make_edit_set
from helpers import read_tree
from PIL import Image
from tiny_qwen import TinyQwen, smaller

from wangen import profiles
from wangen.generator import check, scripts
from wangen.generator.cache_sizes import Texts
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


def run_bundle(bundle: Path, tiny: TinyQwen, task: str, monkeypatch) -> None:
    """Check, cache and train with the steps of the bundle's script, on tiny weights that see small pictures."""
    smaller(monkeypatch, task)
    monkeypatch.chdir(bundle)
    lines = scripts.read_steps((bundle / "train_edits.sh").read_bytes(), "sh")
    steps = {step.command: step for words in lines for step in [parse(find_step(words[0]), words[1:])]}
    assert {step.task for step in steps.values() if hasattr(step, "task")} == {task}
    here = {"device": "cpu", "log_file": None, "lock": None}
    weights = tiny.single
    for kind, own, module in (
        (Check, {**weights, "tokenizer": None, "log_file": None}, check),
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


@pytest.mark.slow
@pytest.mark.parametrize("task", ["qwen-image", "qwen-image-edit", "qwen-image-edit-plus"])
def test_what_is_published_is_cached_checked_and_trained(tiny_qwen: TinyQwen, tmp_path: Path, monkeypatch, task: str):
    place = workspace(tmp_path, tiny_qwen, task)
    assert publish(place) == 0
    bundle = place / "published" / "linux"
    controls = sorted(path.name for path in (place / "datasets/edits/controls").glob("*"))
    assert beside(bundle, "controls") == controls
    run_bundle(bundle, tiny_qwen, task, monkeypatch)
    (block,) = read_dataset(bundle / "files/tomls/edits_linux.toml")
    assert (block.control_directory is None) == (task == "qwen-image")


def beside(bundle: Path, folder: str) -> list[str]:
    """The pictures in a folder beside the published ones, in order."""
    names = read_tree(bundle / "files/datasets/edits")
    return sorted(Path(name).name for name in names if name.startswith(f"{folder}/") and name.endswith(".png"))


def scattered(place: Path) -> list[dict[str, str]]:
    """The lines of a jsonl whose control images and masks lie and are called as nobody would expect."""
    origin, lines = place / "datasets/edits", []
    (place / "other").mkdir()
    for number, stem in enumerate(CAPTIONS):
        line = {"image_path": f"datasets/edits/{stem}.png", "caption": CAPTIONS[stem]}
        controls = sorted((origin / "controls").glob(f"{stem}*.png"))
        for index, path in enumerate(controls):
            path.rename(place / "other" / f"before {number}{index}.png")
            line["control_path" if len(controls) == 1 else f"control_path_{index}"] = (
                f"other/before {number}{index}.png"
            )
        with Image.open(origin / f"{stem}.png") as picture:
            Image.new("L", picture.size, 255 - number).save(place / "other" / f"m{number}.png")
        lines.append({**line, "mask_path": f"other/m{number}.png"})
    shutil.rmtree(origin / "controls", ignore_errors=True)
    return lines


def write_lines(path: Path, lines: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("task", ["qwen-image", "qwen-image-edit", "qwen-image-edit-plus"])
def test_control_images_and_masks_that_a_jsonl_names_are_published_beside_their_pictures(
    tiny_qwen: TinyQwen, tmp_path: Path, monkeypatch, capsys, task: str
):
    place = workspace(tmp_path, tiny_qwen, task)
    lines = scattered(place)
    if task == "qwen-image":
        lines[0]["control_path"] = "other/m0.png"
    path = write_lines(place / "edits.jsonl", lines)
    assert publish(place, "--source", str(path)) == 0
    unused = "not taken: 1 control images of the jsonl (qwen-image takes none)" in capsys.readouterr().out
    assert unused == (task == "qwen-image")
    bundle, several = place / "published" / "linux", task == "qwen-image-edit-plus"
    lake = ["lake_0.png", "lake_1.png"] if several else ["lake.png"]
    assert beside(bundle, "controls") == ([] if task == "qwen-image" else ["hill.png", "house.png", *lake])
    assert beside(bundle, "masks") == ["hill.png", "house.png", "lake.png"]
    origin = {key: place / name for key, name in lines[1].items() if key.startswith("control_path")}
    for (key, before), name in zip(sorted(origin.items()), lake, strict=bool(origin)):
        assert (bundle / "files/datasets/edits/controls" / name).read_bytes() == before.read_bytes(), key
    run_bundle(bundle, tiny_qwen, task, monkeypatch)
    (block,) = read_dataset(bundle / "files/tomls/edits_linux.toml")
    assert block.mask_directory
    assert len(list(block.cache_directory.glob("*.mask.safetensors"))) == 3
    before = read_tree(place / "published")
    assert publish(place) == 0
    assert read_tree(place / "published") == before


def test_lines_inside_the_dataset_s_folder_name_control_images_beside_the_pictures(
    tiny_qwen: TinyQwen, tmp_path: Path, capsys
):
    """Two are named by lines, one lies where the folder has it; a file that a line names is no picture of its own."""
    place = workspace(tmp_path, tiny_qwen, "qwen-image-edit")
    folder = place / "datasets/edits"
    for stem in ("house", "lake"):
        (folder / "controls" / f"{stem}.png").rename(folder / f"{stem} before.png")
    write_lines(folder / "lines.jsonl", [
        {"file": f"{stem}.png", "caption": CAPTIONS[stem], "control_path": f"{stem} before.png"}
        for stem in ("house", "lake")
    ])  # fmt: skip
    assert publish(place) == 0
    assert "not taken" not in capsys.readouterr().out
    assert beside(place / "published/linux", "controls") == ["hill.png", "house.png", "lake.png"]
    assert beside(place / "published/linux", "64") == ["hill.png", "house.png", "lake.png"]


@pytest.mark.parametrize("case", ["two pictures change places", "controls 0 and 1 change places"])
def test_lines_that_give_a_picture_another_one_s_control_image_are_followed(
    tiny_qwen: TinyQwen, tmp_path: Path, case: str
):
    """The names of the files in `controls/` would say otherwise."""
    several = case.startswith("controls")
    place = workspace(tmp_path, tiny_qwen, "qwen-image-edit-plus" if several else "qwen-image-edit")
    folder = place / "datasets/edits"
    if several:
        for stem in ("hill", "house"):
            (folder / f"{stem}.png").unlink()
        given = {"lake": ["lake_1.png", "lake_0.png"]}
        for number, colour in enumerate(("red", "blue")):
            Image.new("RGB", (64, 64), colour).save(folder / "controls" / f"lake_{number}.png")
    else:
        given = {"hill": ["house.png"], "house": ["hill.png"], "lake": ["lake.png"]}
    write_lines(folder / "lines.jsonl", [
        {"file": f"{stem}.png", "caption": CAPTIONS[stem],
         **{f"control_path_{number}": f"controls/{name}" for number, name in enumerate(names)}}
        for stem, names in given.items()
    ])  # fmt: skip
    assert publish(place) == 0
    for stem, names in given.items():
        for number, name in enumerate(names):
            there = place / "published/linux/files/datasets/edits/controls"
            there /= f"{stem}_{number}.png" if several else f"{stem}.png"
            assert there.read_bytes() == (folder / "controls" / name).read_bytes()


@pytest.mark.parametrize(("kind", "name"), [("mask", "house_0.png"), ("control", "house_12345.png")])
def test_what_a_jsonl_names_by_a_number_that_no_look_into_the_folder_finds_is_called_as_its_picture(
    tiny_qwen: TinyQwen, tmp_path: Path, kind: str, name: str
):
    """Masks have no numbers, and numbers have at most four digits."""
    place = workspace(tmp_path, tiny_qwen, "qwen-image-edit")
    folder = place / "datasets/edits"
    for stem in ("hill", "lake"):
        (folder / f"{stem}.png").unlink()
    (folder / f"{kind}s").mkdir(exist_ok=True)
    shutil.copy(folder / "controls/house.png", folder / f"{kind}s" / name)
    line = {"file": "house.png", "caption": CAPTIONS["house"], "control_path": "controls/house.png"}
    write_lines(folder / "lines.jsonl", [{**line, f"{kind}_path": f"{kind}s/{name}"}])
    assert publish(place) == 0
    assert beside(place / "published/linux", f"{kind}s") == ["house.png"]


def test_what_a_jsonl_lacks_or_names_twice_is_said(tiny_qwen: TinyQwen, tmp_path: Path, capsys):
    place = workspace(tmp_path, tiny_qwen, "qwen-image-edit-plus")
    lines = scattered(place)
    picture = place / "datasets/edits/lake.png"
    shutil.copy(picture, picture.with_name("lake_1.png"))
    shutil.copy(picture, picture.with_name("lake.webp"))
    house, lake, hill = lines
    del house["control_path"], hill["mask_path"]
    lines += [
        {**lake, "image_path": "datasets/edits/lake_1.png"},
        {**lake, "image_path": "datasets/edits/lake.webp", "control_path_1": "other/m0.png"},
        {**lake, "control_path_0": "other/m1.png"},
    ]
    path = write_lines(place / "edits.jsonl", lines)
    assert publish(place, "--source", str(path)) != 0
    told = capsys.readouterr().err
    for part in (
        "house.png: has no control image, and qwen-image-edit-plus takes one to 3 control images; write control_path",
        "hill.png: has no mask, and others have one; write its mask_path",
        "lake.png: has control images that differ: edits.jsonl line 2, edits.jsonl line 6; keep one of them",
    ):
        assert part in told
    write_lines(path, [*lines[3:5], {**lines[1], **lines[1]}])
    assert publish(place, "--source", str(path)) != 0
    told = capsys.readouterr().err
    for part in (
        "before 11.png would be lake_1.png in controls/ of the bundle, as that of another picture; rename",
        "lake.webp: would share what is in controls/ of the bundle with lake.png, and has other files; rename",
    ):
        assert part in told


def test_a_folder_of_masks_goes_along_with_every_model(tmp_path: Path, capsys):
    folder = tmp_path / "datasets/edits"
    (folder / "masks").mkdir(parents=True)
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (64, 64), "red").save(folder / name)
        (folder / name).with_suffix(".txt").write_text("red")
        Image.new("L", (64, 64), 255).save(folder / "masks" / f"{name[0]}.png")
    (tmp_path / "wangen.toml").write_text('platforms = ["linux"]\nmodel = "t2v-1.3B"\nresolution = 64\n')
    assert publish(tmp_path) == 0
    bundle = tmp_path / "published/linux"
    assert beside(bundle, "masks") == ["a.png", "b.png"]
    (block,) = read_dataset(bundle / "files/tomls/edits_linux.toml")
    assert block.mask_directory == Path("files/datasets/edits/masks")
    assert main(["clean", "edits", "--bundle", "--workspace", str(tmp_path)]) == 0
    assert not (bundle / "files/datasets/edits/masks").exists()
    (folder / "masks/a.png").unlink()
    capsys.readouterr()
    assert publish(tmp_path) != 0
    assert "a.png: has no mask in" in capsys.readouterr().err


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
        found.append(check._survey(block, model, check.UNSAID, Texts(model, check.UNSAID)).cache_bytes)
    assert found[1] - found[0] == 3 * 16 * 4 * (64 * 32 - 8 * 8)  # three of 16 channels in float32


@pytest.mark.slow
def test_the_room_for_the_cache_is_about_what_it_takes(tiny_qwen: TinyQwen, tmp_path: Path):
    """With the embeddings' real width; the tiny encoder's are narrower by a known factor."""
    made = make_edit_set(tmp_path / "set", tiny_qwen).fill()
    (block,) = read_dataset(made.toml)
    model = profiles.model("qwen-image-edit")
    estimate = check._survey(block, model, check.UNSAID, Texts(model, check.UNSAID)).cache_bytes
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
