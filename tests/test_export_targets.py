"""What `wangen export` does about files that are there already: it replaces what it makes itself, and nothing else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loras import LAYOUTS, LORAS, convert, every_module, same_change, write
from parity import DITS
from safetensors.torch import load_file, save_file

from wangen.generator.cli import main
from wangen.runtime.lora import read_lora

T2V, DIT = LORAS["t2v21"], DITS["dit_t2v21"]

MODEL = "a Wan text-to-video transformer"


def model(path: Path) -> None:
    shutil.copy(DIT, path)


def dora(path: Path) -> None:
    save_file({**load_file(T2V), "lora_unet_blocks_0_self_attn_q.dora_scale": torch.ones(1)}, path)


def text(path: Path) -> None:
    path.write_text("my notes")


def lora(path: Path) -> None:
    shutil.copy(T2V, path)


def merging(out: Path, *more: str) -> list[str]:
    return ["export", "--dit", str(DIT), "--lora_weight", str(T2V), "--save_path", str(out), *more]


def converting(out: Path, *more: str) -> list[str]:
    return ["export", "--lora_weight", str(T2V), "--save_path", str(out), *more]


@pytest.mark.parametrize(
    ("words", "there", "told"),
    [
        (converting, model, MODEL),
        (converting, dora, "a DoRA"),
        (converting, text, "a file of another kind"),
        (merging, model, MODEL),
        (merging, lora, "a LoRA for Wan"),
    ],
)
def test_a_file_of_another_kind_is_replaced_only_when_that_is_said(
    tmp_path: Path, capsys, words: Callable[..., list[str]], there: Callable[[Path], None], told: str
):
    out = tmp_path / "out.safetensors"
    there(out)
    before = out.read_bytes()
    assert main(words(out)) == 2
    said = capsys.readouterr().err
    assert told in said
    assert "--overwrite" in said
    assert str(out) in said
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert main(words(out, "--overwrite")) == 0
    assert out.read_bytes() != before


@pytest.mark.parametrize("words", [converting, merging])
def test_what_the_same_command_made_is_replaced(tmp_path: Path, words: Callable[..., list[str]]):
    out = tmp_path / "out.safetensors"
    assert main(words(out)) == 0
    before = out.read_bytes()
    assert main(words(out, "--dtype", "float32" if words is merging else "bfloat16")) == 0
    assert out.read_bytes() != before


@pytest.mark.parametrize("words", [converting, merging])
def test_a_folder_in_the_way_is_said(tmp_path: Path, capsys, words: Callable[..., list[str]]):
    (tmp_path / "out.safetensors").mkdir()
    assert main(words(tmp_path / "out.safetensors", "--overwrite")) == 2
    assert "a folder" in capsys.readouterr().err


def test_all_targets_are_looked_at_before_the_first_is_written(tmp_path: Path, capsys):
    model(tmp_path / "cats-kohya.safetensors")
    words = converting(tmp_path / "new/../cats.safetensors", "--layout", "comfyui", "kohya")
    assert main(words) == 2
    assert MODEL in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("*.*")] == ["cats-kohya.safetensors"]
    source = tmp_path / "dogs-kohya.safetensors"
    lora(source)
    words = ["--lora_weight", str(source), "--save_path", str(tmp_path / "dogs.safetensors"), "--overwrite"]
    assert main(["export", *words, "--layout", "comfyui", "kohya"]) == 2
    assert "--save_path is the file that is read" in capsys.readouterr().err
    assert not (tmp_path / "dogs.safetensors").exists()


def test_a_lora_under_a_name_that_nobody_gave_stays_unless_it_was_converted(tmp_path: Path, capsys):
    lora(tmp_path / "cats-kohya.safetensors")
    words = converting(tmp_path / "cats.safetensors", "--layout", "comfyui", "kohya")
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "a LoRA for Wan is there and would be replaced" in told
    assert "cats-kohya.safetensors" in told
    assert (tmp_path / "cats-kohya.safetensors").read_bytes() == T2V.read_bytes()
    assert main([*words, "--overwrite"]) == 0
    assert main(words) == 0  # now both are converted ones


def test_a_layout_that_the_dtype_cannot_hold_ends_it_before_the_first_is_written(tmp_path: Path, capsys):
    """Only where the scale is multiplied into the matrices are the numbers too large, however it is shared out."""
    wide = {"blocks.0.attn1.to_q": type(every_module("t2v21", scales=(1,))["blocks.0.attn1.to_q"])(
        torch.ones(1, 256), torch.full((256, 1), 300.0), 1e8)}  # fmt: skip
    source = write(tmp_path / "wide.safetensors", wide, "kohya")
    words = ["--lora_weight", str(source), "--save_path", str(tmp_path / "a.safetensors"), "--dtype", "float16"]
    assert main(["export", *words, "--layout", "kohya", "comfyui"]) == 1
    assert "numbers that float16 cannot hold" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["wide.safetensors"]


def test_a_peft_folder_is_replaced_only_when_it_holds_a_lora(tmp_path: Path, capsys):
    folder = tmp_path / "adapter"
    convert(T2V, folder, "--layout", "peft")
    convert(T2V, folder, "--layout", "peft", "--dtype", "bfloat16")
    model(folder / "adapter_model.safetensors")
    config = (folder / "adapter_config.json").read_text(encoding="utf-8")
    assert main(converting(folder, "--layout", "peft")) == 2
    assert MODEL in capsys.readouterr().err
    (folder / "adapter_model.safetensors").unlink()  # what is left may belong to an adapter_model.bin
    assert main(converting(folder, "--layout", "peft")) == 2
    assert "adapter_config.json" in capsys.readouterr().err
    assert (folder / "adapter_config.json").read_text(encoding="utf-8") == config
    convert(T2V, folder, "--layout", "peft", "--overwrite")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_file_is_written_beside_a_configuration_that_would_change_its_alphas(tmp_path: Path, capsys, layout: str):
    convert(T2V, tmp_path / "adapter", "--layout", "peft")
    words = converting(tmp_path / "adapter/adapter_model.safetensors", "--layout", layout, "--overwrite")
    assert main(words) == 2
    assert "adapter_config.json" in capsys.readouterr().err


def test_json_that_is_no_description_stays(tmp_path: Path, capsys):
    out = tmp_path / "a.json"
    out.write_text(json.dumps({"kind": "mine"}))
    words = ["export", "--metadata", "--lora_weight", str(T2V), "--save_path", str(out)]
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert json.loads(out.read_text()) == {"kind": "mine"}
    assert main([*words, "--overwrite"]) == 0
    assert main(words) == 0, "it may be told again"
    assert "lora" in json.loads(out.read_text())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float32"])
def test_a_peft_file_without_its_configuration_keeps_its_strength(tmp_path: Path, dtype: str):
    lora = every_module("t2v21", scales=(1.0, 0.3))
    source = write(tmp_path / "first.safetensors", lora, "kohya")
    meant = convert(source, tmp_path / "adapter", "--layout", "peft", "--dtype", dtype)
    alone = Path(shutil.copy(tmp_path / "adapter/adapter_model.safetensors", tmp_path / "cats.safetensors"))
    same_change(read_lora(alone), meant, 0.0)
    same_change(read_lora(alone), lora, 2**-3)


def test_a_value_without_its_flag_is_answered_with_the_flag(tmp_path: Path, capsys):
    assert main(["export", "cats.safetensors"]) == 2
    assert "--lora_weight cats.safetensors" in capsys.readouterr().err
    assert main(["export", "cats.safetensors", "--save_path", "a.safetensors"]) == 2
    assert "--lora_weight cats.safetensors" in capsys.readouterr().err


def test_the_words_of_merge_lora_are_understood(tmp_path: Path):
    out = tmp_path / "merged.safetensors"
    words = ["--dit", str(DIT), "--lora_weight", str(T2V), "--lora_multiplier", "0.5", "--save_merged_model", str(out)]
    assert main(["merge_lora.py", *words]) == 0
    assert load_file(out).keys() == load_file(DIT).keys()
