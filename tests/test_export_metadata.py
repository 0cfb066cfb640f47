"""`wangen export --metadata`, and what `export` refuses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loras import KOHYA, LORAS, convert, every_module, to_layout, write
from parity import DITS
from safetensors.torch import load_file, save_file

from wangen.generator.cli import main
from wangen.generator.headers import read_header
from wangen.runtime.lora import read_lora


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs --lora_weight and --save_path"),
        (["--lora_weight", "a"], "export needs --save_path"),
        (["--save_path", "a.safetensors"], "export needs --lora_weight\n"),
        (["--lora_weight", "a", "b", "--save_path", "c.safetensors"], "one LoRA is converted at a time"),
        (["--lora_weight", "a", "--save_path", "c"], "only --layout peft writes a folder"),
        (["--lora_weight", "a", "--save_path", "c.pt"], "must end in .safetensors"),
        (["--lora_weight", "a", "--save_path", "c.safetensors", "--dtype", "fp8_scaled"], "for whole checkpoints"),
        (["--lora_weight", "a", "--save_path", "c.safetensors", "--lora_multiplier", "1"], "belongs to merging"),
        (["--lora_weight", "a", "--save_path", "c.safetensors", "--dtype", "fp8", "--layout", "peft"], "name a folder"),
        (
            ["--lora_weight", "a", "--save_path", "c.safetensors", "--dit", "d", "--layout", "peft"],
            "original or diffusers",
        ),
        (
            ["--lora_weight", "a", "b", "--save_path", "c.safetensors", "--dit", "d", "--lora_multiplier", "1"],
            "2 --lora",
        ),
        (["--metadata"], "reads one file, 0 are given"),
        (["--metadata", "--lora_weight", "a", "--save_path", "b.txt"], "end --save_path in .json"),
        (["--metadata", "--lora_weight", "a", "--layout", "kohya", "--dtype", "bf16"], "--layout, --dtype would do"),
        (["--metadata", "--lora_weight", "a", "--lora_multiplier", "1", "--overwrite"], "--lora_multiplier, --overwr"),
        (["--lora_weight", "a", "--diffusers_prefix", "x"], "every known prefix is read"),
    ],
)
def test_flags_that_do_not_belong_together_are_answered(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_file_that_is_read_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = Path(shutil.copy(LORAS["t2v21"], tmp_path))
    before = file.read_bytes()
    assert main(["export", "--lora_weight", str(file), "--save_path", str(file)]) == 2
    assert "--save_path is the file that is read" in capsys.readouterr().err
    words = ["--dit", str(DITS["dit_t2v21"]), "--lora_weight", str(file), "--save_path", str(file)]
    assert main(["export", *words]) == 2
    assert file.read_bytes() == before


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["export", "--metadata", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_metadata_are_printed_with_what_is_nested_in_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lora = every_module("i2v21", scales=(0.5,), ranks=(2, 8))
    file = write(tmp_path / "a.safetensors", lora, "kohya", {**KOHYA, "broken": "{"})
    found = told(capsys, "--lora_weight", str(file))
    assert found["metadata"]["ss_datasets"] == [{"caption": "ü"}]
    assert (found["metadata"]["broken"], found["metadata"]["ss_network_dim"]) == ("{", "4")
    assert (found["lora"]["layout"], found["lora"]["num_modules"]) == ("kohya", len(lora))
    adapters = {(group["rank"], group["alpha"]): group["modules"] for group in found["lora"]["adapters"]}
    assert adapters.keys() == {(2, 1.0), (8, 4.0)}
    assert sum(sum(names.values()) for names in adapters.values()) == len(lora)
    assert found["tensors"] == 3 * len(lora)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"], "looking leaves nothing behind"


def test_the_page_shows_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parent.parent / "docs/export.md").read_text(encoding="utf-8")
    shown = page.split("$ wangen export --metadata --lora_weight out/cats.safetensors\n")[1].split("…")[0].rstrip()
    convert(LORAS["t2v21"], tmp_path / "cats.safetensors", "--dtype", "bfloat16")
    assert main(["export", "--metadata", "--lora_weight", str(tmp_path / "cats.safetensors")]) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_metadata_say_when_no_alpha_is_stored_and_what_is_not_understood(tmp_path: Path, capsys):
    plain = to_layout(read_lora(LORAS["t2v21"]), "comfyui")
    save_file(plain, tmp_path / "a.safetensors")
    (group,) = told(capsys, "--lora_weight", str(tmp_path / "a.safetensors"))["lora"]["adapters"]
    assert (group["rank"], group["alpha"]) == (4, None)
    assert group["modules"]["blocks.*.attn1.to_q"] == 2
    save_file({**plain, "diffusion_model.blocks.0.norm3.diff": torch.ones(2)}, tmp_path / "b.safetensors")
    unfit = told(capsys, "--lora_weight", str(tmp_path / "b.safetensors"))["lora"]["unfit"]
    assert "a LoRA with differences of whole weights or biases beside it; 1 of 41 keys is not understood" in unfit


def test_metadata_of_a_peft_folder_and_of_a_model_go_to_a_file(tmp_path: Path, capsys):
    convert(LORAS["t2v21"], tmp_path / "adapter", "--layout", "peft")
    capsys.readouterr()
    (group,) = told(capsys, "--lora_weight", str(tmp_path / "adapter"))["lora"]["adapters"]
    assert (group["rank"], group["alpha"]) == (4, 4.0)
    out = tmp_path / "dit.json"
    assert main(["export", "--metadata", "--dit", str(DITS["dit_i2v21"]), "--save_path", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert "image-to-video transformer" in found["kind"]
    assert found["tensors"] == len(read_header(DITS["dit_i2v21"]).tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_alphas_are_read_in_every_precision(tmp_path: Path, capsys, dtype: torch.dtype):
    tensors = to_layout(read_lora(LORAS["t2v21"]), "kohya")
    save_file({name: value.to(dtype) if not value.ndim else value for name, value in tensors.items()},
              tmp_path / "a.safetensors")  # fmt: skip
    (group,) = told(capsys, "--lora_weight", str(tmp_path / "a.safetensors"))["lora"]["adapters"]
    assert group["alpha"] == 2.0


def test_metadata_are_told_without_torch(tmp_path: Path):
    file = write(tmp_path / "a.safetensors", read_lora(LORAS["t2v21"]), "kohya")
    code = (
        "import sys\n"
        "from wangen.generator.cli import main\n"
        "assert main(['export', '--metadata', '--lora_weight', sys.argv[1]]) == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "LOHA"}, "this adapter is a LOHA"),
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "biases of its own"),
        ({"modules_to_save": ["head"]}, "whole modules"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "not the plain name of a module"),
        ({"alpha_pattern": {"0": 2}}, "not the plain name of a module"),
        ({"alpha_pattern": {"a": "b"}}, "malformed"),
        ({"alpha_pattern": [1]}, "malformed"),
        ({"lora_alpha": "x"}, "malformed"),
        ({"r": float("inf")}, "malformed"),
        ({"lora_alpha": float("inf")}, "not a number"),
        ([1], "no JSON object"),
        ("{", "no JSON"),
    ],
)
def test_configurations_that_are_no_plain_lora_are_refused(tmp_path: Path, capsys, config: Any, words: str):
    convert(LORAS["t2v21"], tmp_path / "adapter", "--layout", "peft")
    file = tmp_path / "adapter" / "adapter_config.json"
    if isinstance(config, dict):
        config = {**json.loads(file.read_text(encoding="utf-8")), **config}
    file.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    capsys.readouterr()
    out = str(tmp_path / "out.safetensors")
    assert main(["export", "--lora_weight", str(tmp_path / "adapter"), "--save_path", out]) == 1
    assert words in capsys.readouterr().err


def test_a_folder_without_a_lora_is_refused(tmp_path: Path, capsys):
    assert main(["export", "--lora_weight", str(tmp_path), "--save_path", str(tmp_path / "a.safetensors")]) == 1
    assert "--lora_weight: this folder holds no LoRA" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["nan", "-inf"])
def test_a_lora_with_broken_numbers_is_not_passed_on(tmp_path: Path, capsys, number: str):
    tensors = load_file(LORAS["t2v21"])
    tensors["lora_unet_blocks_0_ffn_0.lora_up.weight"][3, 1] = float(number)
    save_file(tensors, tmp_path / "a.safetensors")
    words = ["--lora_weight", str(tmp_path / "a.safetensors"), "--save_path", str(tmp_path / "b.safetensors")]
    assert main(["export", *words]) == 1
    said = capsys.readouterr().err
    assert "this LoRA holds NaN or infinity in blocks.0.ffn.net.0.proj; it is damaged" in said
    assert f"where: {tmp_path / 'a.safetensors'}" in said
    assert not (tmp_path / "b.safetensors").exists()
