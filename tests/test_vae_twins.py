"""Wan 2.1's VAE and Qwen-Image's look alike: whose a file is says its name or the configuration beside it."""

import json
import shutil
from pathlib import Path

import pytest
from edit_set import make_edit_set
from tiny_qwen import TinyQwen

from wangen import profiles
from wangen.generator import kinds
from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.generator.vae_twins import twin_warning

WAN, QWEN = "Wan2.1_VAE.safetensors", "qwen_image_vae.safetensors"
PLAIN = "diffusion_pytorch_model.safetensors"
LIBRARY = {"wan": "AutoencoderKLWan", "qwen": "AutoencoderKLQwenImage"}


@pytest.mark.parametrize(
    ("task", "name", "config", "says"),
    [
        ("t2v-14B", QWEN, "", "its name says Qwen-Image, and t2v-14B takes Wan 2.1's VAE"),
        ("qwen-image", WAN, "", "its name says Wan 2.1, and qwen-image takes Qwen-Image's VAE"),
        ("qwen-image-edit", PLAIN, "wan", "its config.json says Wan 2.1, and qwen-image-edit takes Qwen-Image's VAE"),
        ("i2v-A14B", PLAIN, "qwen", "its config.json says Qwen-Image, and i2v-A14B takes Wan 2.1's VAE"),
        ("t2v-14B", WAN, "qwen", ""),
        ("qwen-image", QWEN, "", ""),
        ("qwen-image", PLAIN, "qwen", ""),
        ("qwen-image", PLAIN, "", ""),
        ("ti2v-5B", QWEN, "", ""),  # refused, by its tensors
    ],
)
def test_whose_vae_it_is_by_its_name_or_configuration(tmp_path: Path, task: str, name: str, config: str, says: str):
    (tmp_path / name).write_bytes(b"")
    if config:
        (tmp_path / "config.json").write_text(json.dumps({"_class_name": LIBRARY[config]}))
    for path in (tmp_path, tmp_path / name):
        assert says in (told := twin_warning(path, profiles.model(task)))
        assert bool(told) == bool(says)


def test_what_cannot_be_told_is_not_said(tmp_path: Path):
    (tmp_path / PLAIN).write_bytes(b"")
    (tmp_path / "config.json").write_text('["AutoencoderKLWan"]')
    assert twin_warning(tmp_path / PLAIN, profiles.model("qwen-image")) == ""
    assert twin_warning(tmp_path / "gone.safetensors", profiles.model("qwen-image")) == ""
    assert twin_warning(None, profiles.model("qwen-image")) == ""


def test_who_gives_another_file_is_sent_to_the_models_own(tiny_qwen: TinyQwen):
    for task, own in (("qwen-image-edit", "a Qwen-Image VAE"), ("t2v-14B", "a Wan 2.1 VAE")):
        with pytest.raises(WangenError) as refused:
            kinds.expect(tiny_qwen.single["t5"], "wan-vae-2.1", "--vae", task)
        assert f"--vae of {task} takes {own}" in refused.value.found
        assert refused.value.cure.startswith(f"give {own};")


@pytest.mark.slow
def test_every_step_that_takes_a_vae_says_it_once(tiny_qwen: TinyQwen, tmp_path: Path, capsys):
    made = make_edit_set(tmp_path / "set", tiny_qwen)
    vae = tmp_path / WAN
    shutil.copy(tiny_qwen.single["vae"], vae)
    dataset = ["--task", "qwen-image-edit", "--dataset_config", str(made.toml)]
    weights = [f"--vae={vae}", *(f"--{flag}={tiny_qwen.single[flag]}" for flag in ("t5", "dit"))]
    control = str(made.folder / "controls" / "house.png")
    prompt = ["--prompt", "x", "--control_image_path", control, "--video_size", "32", "32", "--infer_steps", "2"]
    training = ["--output_dir", str(tmp_path / "out"), "--output_name", "a", "--max_train_steps", "1"]
    lines = (
        ["check", *dataset, *weights],
        ["cache_latents", *dataset, f"--vae={vae}", "--device=cpu"],
        ["train", *dataset, *weights, "--cache_mode=auto", *training, "--device=cpu", "--mixed_precision=no",
         "--log_with=none"],
        ["generate", "--task", "qwen-image-edit", *weights, *prompt, "--save_path", str(tmp_path / "a.png"),
         "--device=cpu"],
    )  # fmt: skip
    for line in lines:
        assert main(line) == 0, line[0]
        told = capsys.readouterr().err
        assert told.count("its name says Wan 2.1, and qwen-image-edit takes") == 1, line[0]
        assert told.count("with other values: give qwen_image_vae.safetensors") == 1
