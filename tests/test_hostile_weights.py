"""Files that wish to do harm end in an answer or in a WangenError: nothing executes, hangs, swells or crashes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hostile import entry, safetensors

TESTS = Path(__file__).parent
VECTORS = TESTS / "vectors"
FAST, THOROUGH = 500, 15_000  # mutations of small files
MODELS = (
    "dit_t2v21/model.safetensors",
    "dit_i2v21/model.safetensors",
    "dit_ti2v5b/model.safetensors",
    "vae21/Wan2.1_VAE.pth",
    "vae22/Wan2.2_VAE.pth",
    "t5/models_t5_umt5-xxl-enc-bf16.pth",
    "clip/models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
)

HOLES = pytest.mark.skipif(sys.platform == "win32", reason="a file of terabytes would fill the disk there")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with small good files of every format."""
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    weights = {"blocks.0.self_attn.q.weight": torch.ones(3, 2).T, "patch_embedding.weight": torch.ones(2, 16, 1, 2, 2)}
    torch.save({"model": weights | {"fp8": torch.ones(4).to(torch.float8_e4m3fn)}}, seeds / "a.pth")
    make_gguf(seeds / "a.gguf")
    lora = VECTORS / "lora_t2v21" / "lora_musubi.safetensors"
    (seeds / "a.safetensors").write_bytes(lora.read_bytes())
    names = [f"m-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        (seeds / name).write_bytes(safetensors({name: entry()}, bytes(8)))
    index = {"metadata": {"total_size": 16}, "weight_map": {name: name for name in names}}
    (seeds / "m.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def make_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "wan")
    writer.add_tokenizer_model("t5")
    writer.add_token_list(["a", "b"])
    writer.add_array("comfy.gguf.orig_shape.b", [2, 4, 8])
    values = np.ones((2, 32), np.float32)
    stored = gguf.quants.quantize(values, GGMLQuantizationType.Q8_0)
    writer.add_tensor("b", stored, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("c", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with a small good model of every kind."""
    (tmp_path / "seeds").mkdir()
    for name in MODELS:
        shutil.copy(VECTORS / name, tmp_path / "seeds" / name.replace("/", "_"))
    return tmp_path


def judge(folder: Path, source: str, count: int = 0, seed: int = 0) -> dict[str, list[str]]:
    """What `hostile_judge` reports; the process must have survived, and nothing been executed."""
    command = [sys.executable, str(TESTS / "hostile_judge.py"), str(folder), source, str(count), str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert not (folder / "canary").exists()
    report: dict[str, list[str]] = json.loads(ended.stdout)
    assert report["failures"] == []
    return report


@pytest.mark.slow
def test_files_made_to_do_harm(folder: Path):
    report = judge(folder, "hand")
    assert "safetensors: a good one" in report["accepted"]
    assert "pickle: a good one" in report["accepted"]
    assert len(report["refused"]) > 150


@pytest.mark.slow
def test_good_files_with_errors(folder: Path):
    report = judge(folder, "mutated", FAST)
    assert len(report["accepted"]) > FAST // 50
    assert len(report["accepted"]) + len(report["refused"]) == FAST


@pytest.mark.slow
def test_many_good_files_with_errors(folder: Path):
    report = judge(folder, "mutated", THOROUGH, 1)
    assert len(report["accepted"]) + len(report["refused"]) == THOROUGH


@HOLES
@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(10, 0), (350, 1)])
def test_models_with_other_names_shapes_and_dtypes(models: Path, count: int, seed: int):
    """The process imports every loader, which takes long; test_weights.py has what does not fit, one by one."""
    report = judge(models, "models", count, seed)
    assert len(report["accepted"]) > count // 20
    assert len(report["accepted"]) + len(report["refused"]) == count
