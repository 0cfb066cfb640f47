"""Sampling: `generate` makes the pipelines' pictures, bit by bit of the way, and repeats its own."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from edit_set import CAPTIONS, make_edit_set
from PIL import Image
from tiny_qwen import SHORT, TinyQwen, picture, pipeline_of, smaller

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.errors import UsageError
from wangen.generator.sample_prompts import defaults_of, make_prompt
from wangen.runtime import train
from wangen.runtime.denoising import flow_scheduler
from wangen.runtime.evaluation_file import read_evaluation

pytestmark = pytest.mark.slow

PROMPT, NEGATIVE = "make the sky  green", "a blurred picture"


def line(tiny: TinyQwen, task: str, folder: Path, *more: str) -> list[str]:
    weights = [f"--{flag}={path}" for flag, path in tiny.single.items()]
    return ["generate", "--task", task, *weights, "--prompt", PROMPT, "--negative_prompt", NEGATIVE, "--seed", "7",
            "--infer_steps", "3", "--device", "cpu", "--save_path", str(folder / "made.png"), *more]  # fmt: skip


def made(folder: Path) -> np.ndarray:
    with Image.open(folder / "made.png") as image:
        return np.asarray(image.convert("RGB")).astype(int)


def assert_same_picture(ours: np.ndarray, theirs: Image.Image) -> None:
    """To the rounding of a byte, of which few fall the other way."""
    wanted = np.asarray(theirs).astype(int)
    assert ours.shape == wanted.shape
    assert np.abs(ours - wanted).max() <= 1
    assert (ours != wanted).mean() < 0.01


def test_a_picture_from_text_is_the_pipeline_s(tiny_qwen: TinyQwen, tmp_path: Path):
    assert main(line(tiny_qwen, "qwen-image", tmp_path, "--video_size", "64", "96")) == 0
    theirs = pipeline_of("qwen-image", tiny_qwen)(
        prompt=PROMPT, negative_prompt=NEGATIVE, height=64, width=96, num_inference_steps=3, true_cfg_scale=4.0,
        generator=torch.Generator().manual_seed(7),
    ).images[0]  # fmt: skip
    assert_same_picture(made(tmp_path), theirs)


@pytest.mark.parametrize("guidance", [4.0, 1.0])
def test_an_edited_picture_is_the_pipeline_s(tiny_qwen: TinyQwen, tmp_path: Path, monkeypatch, guidance: float):
    """At a 64th of the area, so that the tiny models on a CPU take a moment."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module

    smaller(monkeypatch, "qwen-image-edit", 8)
    original = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: original(area // 64, ratio))
    control = picture((300, 200))
    control.save(tmp_path / "control.png")
    more = ["--control_image_path", str(tmp_path / "control.png"), "--guidance_scale", str(guidance)]
    assert main(line(tiny_qwen, "qwen-image-edit", tmp_path, *more)) == 0
    guided = {"negative_prompt": NEGATIVE, "true_cfg_scale": guidance} if guidance > 1 else {}
    theirs = pipeline_of("qwen-image-edit", tiny_qwen)(
        image=control, prompt=PROMPT, num_inference_steps=3, generator=torch.Generator().manual_seed(7), **guided
    ).images[0]
    assert theirs.size == (160, 96)  # 3:2 at 128x128 in multiples of 32
    assert_same_picture(made(tmp_path), theirs)


def test_a_picture_from_two_is_the_pipeline_s(tiny_qwen: TinyQwen, tmp_path: Path, monkeypatch, capsys):
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as module

    smaller(monkeypatch, "qwen-image-edit-plus", 8)
    original = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: original(area // 64, ratio))
    controls = [picture((300, 200)), picture((120, 200), 3)]
    for number, control in enumerate(controls):
        control.save(tmp_path / f"control{number}.png")
    paths = [str(tmp_path / f"control{number}.png") for number in range(2)]
    assert main(line(tiny_qwen, "qwen-image-edit-plus", tmp_path, "--control_image_path", *paths)) == 0
    theirs = pipeline_of("qwen-image-edit-plus", tiny_qwen)(
        image=controls, prompt=PROMPT, negative_prompt=NEGATIVE, num_inference_steps=3, true_cfg_scale=4.0,
        generator=torch.Generator().manual_seed(7),
    ).images[0]  # fmt: skip
    assert_same_picture(made(tmp_path), theirs)
    again = ["generate", "--from", str(tmp_path / "made.png"), "--device", "cpu", "--save_path",
             str(tmp_path / "again.png"), *(f"--{flag}={path}" for flag, path in tiny_qwen.single.items())]  # fmt: skip
    assert main([*again, "--control_image_path", *paths]) == 0
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "made.png").read_bytes()
    assert main([*again, "--control_image_path", *reversed(paths)]) != 0
    assert main([*again, "--control_image_path", *paths, "--save_path", paths[1]]) == 2
    assert "is the file of --control_image_path" in capsys.readouterr().err


def test_swapped_blocks_make_the_same_picture(tiny_qwen: TinyQwen, tmp_path: Path):
    for swapped in (0, 2):
        (tmp_path / str(swapped)).mkdir()
        more = ["--video_size", "32", "64", "--blocks_to_swap", str(swapped)]
        assert main(line(tiny_qwen, "qwen-image", tmp_path / str(swapped), *more)) == 0
    assert np.array_equal(made(tmp_path / "0"), made(tmp_path / "2"))


@pytest.mark.parametrize("tokens", [256, 1000, 4096, 8192])
def test_noise_levels_are_those_of_the_official_scheduler(tiny_qwen: TinyQwen, tokens: int):
    shift = profiles.model("qwen-image").shift
    ours = flow_scheduler("euler", shift.at(tokens), shift.terminal)
    ours.set_timesteps(20)
    theirs = pipeline_of("qwen-image", tiny_qwen).scheduler
    theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / 20, 20), mu=0.5 + (tokens - 256) * (0.9 - 0.5) / (8192 - 256))
    assert torch.allclose(ours.sigmas, theirs.sigmas, atol=1e-6)
    assert torch.allclose(ours.timesteps, theirs.timesteps, atol=1e-3)


def test_a_trained_lora_changes_the_picture_and_samples_are_made_on_the_way(tiny_qwen: TinyQwen, tmp_path, monkeypatch):
    smaller(monkeypatch, "qwen-image-edit", 8, **SHORT)
    edits = make_edit_set(tmp_path / "set", tiny_qwen).fill()
    control = edits.folder / "controls" / "house.png"
    (tmp_path / "prompts.txt").write_text(f"{PROMPT} --ci {control} --w 64 --h 32 --s 2\n", encoding="utf-8")
    train.run(edits.train(tmp_path / "out", learning_rate=0.05, sample_prompts=tmp_path / "prompts.txt",
                          sample_at_first=True, vae=tiny_qwen.single["vae"], t5=tiny_qwen.single["t5"]))  # fmt: skip
    samples = [json.loads(row) for row in (tmp_path / "out/samples/samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["controls"]) for row in samples] == [(0, ["house.png"]), (6, ["house.png"])]
    more = ["--control_image_path", str(control), "--video_size", "32", "64"]
    assert main(line(tiny_qwen, "qwen-image-edit", tmp_path, *more)) == 0
    base = made(tmp_path)
    lora = ["--lora_weight", str(tmp_path / "out")]
    assert main(line(tiny_qwen, "qwen-image-edit", tmp_path, *more, *lora)) == 0
    assert np.abs(made(tmp_path) - base).max() > 1


def see_through(path: Path, color: str) -> Path:
    """A picture with a hole; returns a second one, beside it, with a colour in the hole."""
    shown = picture((96, 64)).convert("RGBA")
    shown.paste((0, 0, 0, 0), (20, 10, 60, 50))
    shown.save(path)
    filled = path.with_name("filled.png")
    Image.alpha_composite(Image.new("RGBA", shown.size, color), shown).convert("RGB").save(filled)
    return filled


def test_the_colour_behind_a_transparent_picture_is_the_one_that_is_asked_for(
    tiny_qwen: TinyQwen, tmp_path: Path, monkeypatch, capsys
):
    smaller(monkeypatch, "qwen-image-edit")
    filled, found = see_through(tmp_path / "hole.png", "#00ff00"), {}
    for name, more in {"hole": ["--background_color", "#0F0"], "filled": [], "white": []}.items():
        (folder := tmp_path / name).mkdir()
        control = filled if name == "filled" else tmp_path / "hole.png"
        size = ["--video_size", "32", "64", "--control_image_path", str(control)]
        assert main(line(tiny_qwen, "qwen-image-edit", folder, *size, *more)) == 0
        found[name] = made(folder)
    assert np.array_equal(found["hole"], found["filled"])
    assert not np.array_equal(found["hole"], found["white"])
    again = ["generate", "--from", str(tmp_path / "hole" / "made.png"), "--device", "cpu", "--save_path",
             str(tmp_path / "again.png"), *(f"--{flag}={path}" for flag, path in tiny_qwen.single.items())]  # fmt: skip
    assert main([*again, "--control_image_path", str(tmp_path / "hole.png")]) == 0
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "hole" / "made.png").read_bytes()
    wrong = ["--control_image_path", str(filled), "--background_color", "green"]
    assert main(line(tiny_qwen, "qwen-image-edit", tmp_path, *wrong)) == 2
    assert "background_color must be a colour like #ffffff, got 'green'" in capsys.readouterr().err


def test_samples_and_evaluations_have_the_dataset_s_colour_behind_transparent_pictures(
    tiny_qwen: TinyQwen, tmp_path: Path, monkeypatch
):
    smaller(monkeypatch, "qwen-image-edit")
    edits = make_edit_set(tmp_path / "set", tiny_qwen, background_color="'#00ff00'")
    see_through(edits.folder / "controls" / "house.png", "#00ff00").unlink()
    edits.fill()
    (tmp_path / "prompts.txt").write_text(f"{PROMPT} --ci {edits.folder}/controls/house.png --w 64 --h 32 --s 2\n")
    train.run(edits.train(tmp_path / "out", max_train_steps=1, sample_prompts=tmp_path / "prompts.txt",
                          sample_at_first=True, vae=tiny_qwen.single["vae"], t5=tiny_qwen.single["t5"]))  # fmt: skip
    row = json.loads((tmp_path / "out/samples/samples.jsonl").read_text().splitlines()[0])
    assert row["background_color"] == "#00ff00"
    weights = [f"--{flag}={path}" for flag, path in tiny_qwen.single.items()]
    judge = ["evaluate", "--task", "qwen-image-edit", "--dataset_config", str(edits.toml), *weights, "--lora_weight",
             str(tmp_path / "out" / "edit.safetensors"), "--output_dir", str(tmp_path / "judged"), "--device", "cpu",
             "--infer_steps", "2", "--num_prompts", "3"]  # fmt: skip
    assert main(judge) == 0
    shown = [np.asarray(Image.open(path)) for path in (tmp_path / "judged").rglob("*-control1.png")]
    green = [(pixels == (0, 255, 0)).all(axis=-1).mean() for pixels in shown]
    assert sum(share > 0.1 for share in green) == 1


@pytest.mark.parametrize(
    ("task", "values", "words"),
    [
        ("qwen-image", {"control_image_path": ["a.png"]}, "control images belong to other models"),
        ("qwen-image", {"frame_count": 5}, "qwen-image makes pictures"),
        ("qwen-image", {"sample_steps": 1}, "sample_steps 1 is no whole number from 2 to 1000"),
        ("qwen-image", {"sample_sampler": "unipc"}, "qwen-image is sampled with euler, not unipc"),
        ("qwen-image-edit", {}, "qwen-image-edit takes one control image, and 0 are given"),
        ("qwen-image-edit", {"control_image_path": ["a.png", "b.png"]}, "takes one control image, and 2 are given"),
        ("qwen-image-edit-plus", {"control_image_path": ["a.png"] * 4}, "takes one to 3 control images, and 4"),
        ("qwen-image-edit", {"control_image_path": "gone.png"}, "there is no picture gone.png"),
    ],
)
def test_what_a_prompt_cannot_ask_is_said(tmp_path: Path, task: str, values: dict[str, object], words: str):
    model = profiles.model(task)
    with pytest.raises(UsageError, match=words) as error:
        make_prompt({"prompt": "x", **values}, model, 1, defaults_of(model), where="--prompt", folder=tmp_path)
    assert "--task qwen-image-edit-plus" in error.value.cure or "and 2 are given" not in words


def test_checkpoints_are_compared_on_held_out_edits(tiny_qwen: TinyQwen, tmp_path: Path, monkeypatch):
    smaller(monkeypatch, "qwen-image-edit", 8, **SHORT)
    edits = make_edit_set(tmp_path / "set", tiny_qwen).fill()
    train.run(edits.train(tmp_path / "out", learning_rate=0.02))
    weights = [f"--{flag}={path}" for flag, path in tiny_qwen.single.items()]
    line = ["evaluate", "--task", "qwen-image-edit", "--dataset_config", str(edits.toml), *weights, "--lora_weight",
            str(tmp_path / "out" / "edit.safetensors"), "--output_dir", str(tmp_path / "judged"), "--device", "cpu",
            "--infer_steps", "2"]  # fmt: skip
    assert main(line) == 0
    report = json.loads((tmp_path / "judged" / "evaluate.report.json").read_text())
    controls = sorted((tmp_path / "judged").rglob("*-control*.png"))
    told = [
        name for video in read_evaluation(tmp_path / "judged" / "evaluation.json").videos for name in video.controls
    ]
    assert [tmp_path / "judged" / name for name in told] == controls
    assert len(controls) == len(CAPTIONS)
    pictures = sorted(set((tmp_path / "judged").rglob("*.png")) - set(controls))
    assert len(pictures) == 2 * len(CAPTIONS)  # base and LoRA of each, though two edits have one prompt
    assert report["counts"]["videos"] == len([path for path in pictures if "first" not in path.parent.name])
    assert len({np.asarray(Image.open(path)).shape[:2] for path in pictures}) >= 1
    assert main(["report", "--output_dir", str(tmp_path / "judged")]) == 0
    page = (tmp_path / "judged" / "report.html").read_text(encoding="utf-8")
    assert page.count("<figcaption>control image 1</figcaption>") == len(CAPTIONS)
