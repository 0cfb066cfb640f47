"""`wangen export`: LoRAs from every world to every other, judged by the libraries that read them."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from loras import (
    KOHYA,
    LAYOUTS,
    LORAS,
    apply_lora,
    change_of,
    convert,
    every_module,
    model_of,
    output,
    same_change,
    wanted,
    write,
)
from parity import DITS, max_abs
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wangen.generator.cli import main
from wangen.generator.headers import read_header
from wangen.runtime.lora import Lora, LoraWeight, read_lora


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return opened.metadata() or {}


def pipeline_of(name: str) -> WanPipeline:
    return WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(),
                       transformer=model_of(name))  # fmt: skip


def diffusers_output(file: Path, name: str) -> torch.Tensor:
    """The model's output with the LoRA that diffusers' own loader reads."""
    pipeline = pipeline_of(name)
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name, local_files_only=True)
    return output(pipeline.transformer, name, 0)


def peft_output(folder: Path, name: str) -> torch.Tensor:
    """The model's output with the adapter that peft's own loader reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(model_of(name), str(folder))
    return output(model, name, 0)


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("name", LORAS)
def test_every_pair_of_layouts_round_trips(tmp_path: Path, name: str, source: str, target: str):
    """Same keys, and where scales are powers of two the same change of every weight to the last bit."""
    lora = every_module(name, scales=(1.0, 0.5, 2.0))
    first = write(tmp_path / "first.safetensors", lora, source)
    same_change(convert(first, tmp_path / "other.safetensors", "--layout", target), lora, 0.0)
    same_change(convert(tmp_path / "other.safetensors", tmp_path / "back.safetensors", "--layout", source), lora, 0.0)
    keys, back = load_file(first).keys(), load_file(tmp_path / "back.safetensors").keys()
    assert keys == back


@pytest.mark.parametrize("name", LORAS)
def test_several_layouts_are_written_in_one_call_and_read_by_the_libraries(tmp_path: Path, name: str):
    words = ["--layout", "diffusers", "comfyui", "kohya", "peft"]
    lora = read_lora(LORAS[name])
    convert(LORAS[name], tmp_path / "cats.safetensors", *words)
    files = {layout: tmp_path / f"cats-{layout}.safetensors" for layout in words[2:]}
    assert {path.name for path in tmp_path.iterdir()} == {
        "cats.safetensors", "export.report.json", *(path.name for path in files.values())}  # fmt: skip
    for path in (tmp_path / "cats.safetensors", *files.values()):
        same_change(read_lora(path), lora, 0.0)
    for path in (tmp_path / "cats.safetensors", files["comfyui"], files["kohya"]):
        assert max_abs(diffusers_output(path, name), wanted(name, 0, 1.0)) < 2e-4
    model = get_peft_model(model_of(name), LoraConfig(r=4, lora_alpha=4, target_modules=sorted(lora)))
    missing = set_peft_model_state_dict(model, load_file(files["peft"]))
    assert not missing.unexpected_keys
    assert max_abs(output(model, name, 0), wanted(name, 0, 1.0)) < 2e-4
    report = json.loads((tmp_path / "export.report.json").read_text(encoding="utf-8"))
    assert report["counts"] == {"modules": len(lora), "ranks": [4]}
    assert len(report["result"]["files"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", LORAS)
def test_a_peft_folder_is_written_and_read(tmp_path: Path, name: str, dtype: str):
    lora = every_module(name, scales=(1.0, 0.3, 5 / 3))
    first = write(tmp_path / "first.safetensors", lora, "kohya", KOHYA)
    again = convert(first, tmp_path / "adapter", "--layout", "peft", "--dtype", dtype)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json"}  # fmt: skip
    same_change(again, lora, {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10, "float8_e4m3fn": 2**-3}[dtype])
    model = model_of(name)
    apply_lora(model, again, name="own")
    assert max_abs(peft_output(tmp_path / "adapter", name), output(model, name, 0)) < 2e-5
    back = convert(tmp_path / "adapter", tmp_path / "back.safetensors", "--layout", "kohya")
    same_change(back, again, 1e-6)
    assert metadata_of(tmp_path / "back.safetensors")["modelspec.title"] == "cats"


def test_the_adapter_that_peft_saves_is_read_with_its_patterns(tmp_path: Path):
    model = model_of("i2v21")
    config = LoraConfig(
        r=4, lora_alpha=3, target_modules=["to_q", "add_k_proj", "proj_out"], init_lora_weights=False,
        rank_pattern={"proj_out": 2}, alpha_pattern={"^blocks.0.attn1.to_q": 7, r"blocks\.1\.attn1\.to_q": 5},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)
        adapted.save_pretrained(tmp_path / "adapter")
    truth = output(adapted, "i2v21", 0)
    lora = read_lora(tmp_path / "adapter")
    alphas = {"blocks.0.attn1.to_q": 7, "blocks.1.attn1.to_q": 5, "blocks.0.attn2.to_q": 3, "proj_out": 3}
    assert {name: lora[name].alpha for name in alphas} == alphas
    assert (lora["proj_out"].rank, len(lora)) == (2, 7)
    fresh = model_of("i2v21")
    apply_lora(fresh, lora, name="own")
    assert max_abs(output(fresh, "i2v21", 0), truth) < 2e-5
    for layout in LAYOUTS:
        convert(tmp_path / "adapter", tmp_path / f"{layout}.safetensors", "--layout", layout)
        same_change(read_lora(tmp_path / f"{layout}.safetensors"), lora, 1e-6)


def test_rank_stabilized_loras_are_scaled_by_the_root_of_the_rank(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=4, lora_alpha=3, use_rslora=True, target_modules=["to_q"], init_lora_weights=False)
        adapted = get_peft_model(model_of("t2v21"), config)
        adapted.save_pretrained(tmp_path)
    model = model_of("t2v21")
    apply_lora(model, read_lora(tmp_path), name="own")
    assert max_abs(output(model, "t2v21", 0), output(adapted, "t2v21", 0)) < 2e-5


def test_what_diffusers_saves_is_read_and_what_we_write_says_the_same(tmp_path: Path):
    """Its alphas stand in its metadata; ours there agree with the tensors, so that no reader scales twice."""
    model = model_of("t2v21")
    config = LoraConfig(r=4, lora_alpha=2, target_modules=["to_q", "net.2"], init_lora_weights=False,
                        alpha_pattern={"ffn.net.2": 8})  # fmt: skip
    model.add_adapter(config)
    truth = output(model, "t2v21", 0)
    layers = {name.replace(".default", ""): value for name, value in model.state_dict().items() if "lora_" in name}
    WanPipeline.save_lora_weights(
        str(tmp_path), layers, transformer_lora_adapter_metadata=model.peft_config["default"].to_dict()
    )
    lora = read_lora(tmp_path)
    assert {lora["blocks.0.attn1.to_q"].alpha, lora["blocks.1.ffn.net.2"].alpha} == {2, 8}
    for layout in ("diffusers", "comfyui"):
        convert(tmp_path, tmp_path / f"{layout}.safetensors", "--layout", layout)
        same_change(read_lora(tmp_path / f"{layout}.safetensors"), lora, 0.0)
        assert max_abs(diffusers_output(tmp_path / f"{layout}.safetensors", "t2v21"), truth) < 2e-5


@pytest.mark.parametrize("layout", ["comfyui", "diffusers"])
def test_different_ranks_and_alphas_reach_diffusers(tmp_path: Path, layout: str):
    lora = every_module("i2v21", scales=(1.0, 0.25, 3.0))
    lora.pop("patch_embedding")
    first = write(tmp_path / "first.safetensors", lora, "kohya")
    convert(first, tmp_path / "out.safetensors", "--layout", layout)
    model = model_of("i2v21")
    apply_lora(model, lora, name="own")
    assert max_abs(diffusers_output(tmp_path / "out.safetensors", "i2v21"), output(model, "i2v21", 0)) < 2e-5


@pytest.mark.parametrize("part", [".attn1.", ".attn2.", ".ffn.", "blocks.1.attn2.to_v"])
def test_files_with_some_modules_only_pass_through_kohya(tmp_path: Path, part: str):
    """The importer of diffusers raises KeyError on these; ours reads them, and writes what diffusers reads."""
    lora = {module: weight for module, weight in read_lora(LORAS["i2v21"]).items() if part in module}
    first = write(tmp_path / "first.safetensors", lora, "kohya")
    with pytest.raises(KeyError):
        pipeline_of("i2v21").load_lora_weights(str(tmp_path), weight_name="first.safetensors", local_files_only=True)
    same_change(convert(first, tmp_path / "comfyui.safetensors"), lora, 0.0)
    convert(first, tmp_path / "diffusers.safetensors", "--layout", "diffusers")
    model = model_of("i2v21")
    apply_lora(model, lora, name="own")
    assert max_abs(diffusers_output(tmp_path / "diffusers.safetensors", "i2v21"), output(model, "i2v21", 0)) < 2e-5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_every_number_is_rounded_once_to_the_dtype(tmp_path: Path, layout: str, dtype: str):
    lora = every_module("t2v21", scales=(1.0, 0.3))
    first = write(tmp_path / "first.safetensors", lora, "kohya")
    out = tmp_path / "out" if (layout, dtype) == ("peft", "float8_e4m3fn") else tmp_path / "out.safetensors"
    again = convert(first, out, "--layout", layout, "--dtype", dtype)
    digits = {"bfloat16": 8, "float16": 11, "float8_e4m3fn": 4}[dtype]
    for name, weight in again.items():
        assert weight.down.dtype == weight.up.dtype == getattr(torch, dtype)
        # the scale is split between the factors: compare each with what it stands for, up to one common factor
        by = float(weight.scale / lora[name].scale)
        down, up = weight.down.double(), weight.up.double()
        down_by = 2.0 ** round(float(torch.log2(down.abs().max() / lora[name].down.double().abs().max())))
        for found, exact in ((down / down_by, lora[name].down.double()), (up * down_by * by, lora[name].up.double())):
            smallest = float(exact.abs().max()) * 2**-8  # below lie the numbers without all digits
            error = (found - exact).abs() / exact.abs().clamp_min(smallest)
            assert float(error.max()) <= 2**-digits * 1.01, name


def test_float8_keeps_small_numbers_by_moving_alpha(tmp_path: Path):
    """Cast as they are, a trained LoRA's numbers would lose most of their digits."""
    lora = {name: type(weight)(weight.down * 0.2, weight.up * 0.02, weight.alpha)
            for name, weight in every_module("t2v21", scales=(1.0,)).items()}  # fmt: skip
    first = write(tmp_path / "first.safetensors", lora, "kohya")

    def error(found: Lora) -> float:
        parts = [(change_of(found[name]) - change_of(lora[name]), change_of(lora[name])) for name in lora]
        return float((sum(a.pow(2).sum() for a, _ in parts) / sum(b.pow(2).sum() for _, b in parts)) ** 0.5)

    eight = torch.float8_e4m3fn
    cast = {name: type(w)(w.down.to(eight).float(), w.up.to(eight).float(), w.alpha) for name, w in lora.items()}
    ours = convert(first, tmp_path / "out.safetensors", "--layout", "comfyui", "--dtype", "fp8")
    assert error(ours) < 0.05
    assert error(cast) > 0.5
    names = load_file(tmp_path / "out.safetensors")
    assert names["diffusion_model.blocks.0.self_attn.q.alpha"].dtype == torch.float32


def test_a_peft_file_is_refused_where_it_could_not_tell_the_alpha(tmp_path: Path, capsys):
    """Also where the float8 is that of the file."""
    eight = tmp_path / "eight.safetensors"
    lora = convert(LORAS["t2v21"], eight, "--layout", "kohya", "--dtype", "fp8")
    for words in (["peft"], ["comfyui", "peft"]):
        with pytest.raises(AssertionError):
            convert(eight, tmp_path / "out.safetensors", "--layout", *words)
        assert "a peft file cannot tell the alpha that float8 needs" in capsys.readouterr().err
        assert not list(tmp_path.glob("out*"))
    same_change(convert(eight, tmp_path / "folder", "--layout", "peft"), lora, 0.0)
    same_change(convert(eight, tmp_path / "out.safetensors", "--layout", "peft", "--dtype", "float32"), lora, 0.0)


def test_float16_keeps_its_digits_where_the_scale_is_small(tmp_path: Path):
    """In `up` alone, a scale of 2^-7 would leave numbers of 1e-4 hardly a digit."""
    torch.manual_seed(0)
    lora = {
        name: LoraWeight(torch.randn(128, 32).mul(0.02).half(), torch.randn(32, 128).mul(1e-4).half(), 1.0)
        for name in ("blocks.0.attn1.to_q", "blocks.0.attn1.to_k")
    }
    first = write(tmp_path / "first.safetensors", lora, "kohya")
    found = convert(first, tmp_path / "out.safetensors", "--layout", "comfyui")
    for name, weight in lora.items():
        change = change_of(weight)
        assert found[name].up.dtype == found[name].down.dtype == torch.float16
        assert found[name].scale == 1
        assert float((change_of(found[name]) - change).norm() / change.norm()) < 1e-3


def test_what_is_called_alike_in_both_families_keeps_the_name_of_its_own(tmp_path: Path):
    factors = {"lora_A": (2, 4), "lora_B": (4, 2)}
    modules = ("transformer.transformer_blocks.0.attn.to_q", "transformer.proj_out")
    save_file({f"{module}.{side}.weight": torch.ones(shape) for module in modules for side, shape in factors.items()},
              tmp_path / "first.safetensors")  # fmt: skip
    for layout, name in (("comfyui", "diffusion_model.proj_out"), ("kohya", "lora_unet_proj_out")):
        found = convert(tmp_path / "first.safetensors", tmp_path / f"{layout}.safetensors", "--layout", layout)
        assert any(key.startswith(f"{name}.") for key in load_file(tmp_path / f"{layout}.safetensors"))
        assert found.keys() == {"proj_out", "transformer_blocks.0.attn.to_q"}


def test_metadata_are_kept_but_for_hashes_and_the_change_is_noted(tmp_path: Path):
    first = write(tmp_path / "first.safetensors", read_lora(LORAS["t2v21"]), "kohya", KOHYA)
    convert(first, tmp_path / "a.safetensors", "--layout", "comfyui", "--dtype", "bf16")
    found = metadata_of(tmp_path / "a.safetensors")
    note = json.loads(found.pop("wangen.converted"))
    assert note == {"from": "kohya", "to": "comfyui", "from_dtype": ["F32"],
                    "alpha": "changed with the matrices, the scale of their product is the same"}  # fmt: skip
    kept = {key: value for key, value in KOHYA.items() if not key.startswith("sshs_")}
    assert found == {"format": "pt", **kept}
    moved = tmp_path / "elsewhere" / "b.safetensors"
    moved.parent.mkdir()
    shutil.copy(first, moved)
    convert(moved, moved.parent / "c.safetensors", "--layout", "comfyui", "--dtype", "bfloat16")
    assert (moved.parent / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_the_words_of_musubis_convert_lora_are_understood(tmp_path: Path):
    words = ["--input", str(LORAS["t2v21"]), "--output", str(tmp_path / "a.safetensors"), "--target", "other"]
    assert main(["convert_lora.py", *words]) == 0
    assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in load_file(tmp_path / "a.safetensors")
    back = ["--input", str(tmp_path / "a.safetensors"), "--output", str(tmp_path / "b.safetensors")]
    assert main(["convert-lora", *back, "--target", "default"]) == 0
    assert load_file(tmp_path / "b.safetensors").keys() == load_file(LORAS["t2v21"]).keys()


@pytest.mark.slow
def test_the_step_runs_as_a_module_and_merges(tmp_path: Path):
    out = tmp_path / "new" / "merged.safetensors"
    words = ["--dit", DITS["dit_t2v21"], "--lora_weight", LORAS["t2v21"], LORAS["t2v21"], "--lora_multiplier", "0.35",
             "0.25", "--dtype", "float32", "--save_path", out, "--report_dir", tmp_path / "reports"]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "wangen.runtime", "export", *map(str, words)], capture_output=True,
                          text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "20 weights" in done.stderr
    assert max_abs(output(model_of("t2v21", out), "t2v21", 0), wanted("t2v21", 0, 0.6)) < 2e-4
    assert [path.name for path in out.parent.iterdir()] == ["merged.safetensors"]
    report = json.loads((tmp_path / "reports" / "export.report.json").read_text(encoding="utf-8"))
    assert report["counts"]["changed"] == 20


def test_merging_says_which_modules_were_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    extra = read_lora(LORAS["t2v21"])
    extra["blocks.0.attn2.add_k_proj"] = extra["blocks.0.attn2.to_k"]
    lora = write(tmp_path / "lora.safetensors", extra, "diffusers")
    words = ["--dit", DITS["dit_t2v21"], "--lora_weight", lora, "--save_path", tmp_path / "merged.safetensors"]
    assert main(["export", *map(str, words)]) == 0
    assert "1 module not in this checkpoint and left out: blocks.0.attn2.add_k_proj" in capsys.readouterr().err


@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.parametrize(("own", "other"), [("low", "high"), ("high", "low")])
def test_merging_says_that_a_lora_is_of_the_other_expert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own: str, other: str, noted: bool
):
    dit = tmp_path / (f"wan2.2_t2v_{own}_noise_14B.safetensors" if not noted else "mine.safetensors")
    save_file(load_file(DITS["dit_t2v21"]), dit, {"wangen.expert": f"{own}_noise"} if noted else None)
    lora, told = tmp_path / "lora.safetensors", []
    for trained_for in (other, own):
        save_file(load_file(LORAS["t2v21"]), lora, {"wangen.expert": f"{trained_for}_noise"})
        words = ["--dit", str(dit), "--lora_weight", str(lora), "--save_path", str(tmp_path / "merged.safetensors")]
        assert main(["export", *words]) == 0
        told.append(capsys.readouterr().err)
    sentence = f"{lora} was trained for the {other}-noise expert, and is merged into the {own}-noise one"
    assert [sentence in one for one in told] == [True, False]
    assert read_header(tmp_path / "merged.safetensors").metadata["wangen.expert"] == f"{own}_noise"
