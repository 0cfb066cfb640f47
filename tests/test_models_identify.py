"""`wangen models identify`: what a file is, from its header alone."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from published import TRANSFORMERS, fp8_scaled, num_elements, write_sparse, write_sparse_mixed, write_sparse_shards

from wangen import profiles
from wangen.generator.cli import main

VECTORS = Path(__file__).parent / "vectors"
LORA = VECTORS / "lora_t2v21/lora_musubi.safetensors"


def identify(capsys: pytest.CaptureFixture[str], *paths: Path) -> list[dict]:
    assert main(["models", "identify", "--json", *map(str, paths)]) in (0, 1)
    found: list[dict] = json.loads(capsys.readouterr().out)
    return found


def shown(capsys: pytest.CaptureFixture[str], *paths: Path, code: int = 0) -> str:
    assert main(["models", "identify", *map(str, paths)]) == code
    return capsys.readouterr().out


@pytest.mark.parametrize("task", profiles.model_names())
def test_a_transformer_of_full_size(tmp_path, capsys, task):
    path = write_sparse(tmp_path / "a.safetensors", TRANSFORMERS[task])
    (found,) = identify(capsys, path)
    assert task in found["profiles"]
    assert found["kind"] == profiles.model(task).kind_of("dit")
    assert found["num_parameters"] == num_elements(TRANSFORMERS[task])
    assert found["dtypes"] == {"BF16": 2 * found["num_parameters"]}
    layout = "diffusers" if task.startswith("qwen") else "original"
    assert (found["format"], found["layout"], found["flag"]) == ("safetensors", layout, "--dit")
    assert found["num_bytes"] == path.stat().st_size


def test_the_text_for_people(tmp_path, capsys):
    path = write_sparse(tmp_path / "a.safetensors", TRANSFORMERS["t2v-14B"])
    text = shown(capsys, path)
    for words in (
        str(path), "a Wan text-to-video transformer (14B, dim 5120)", "safetensors, original names",
        "14.29 B (14,288,491,584)", "BF16 28.6 GB", "28.6 GB in 1 file", "--dit of t2v-14B, t2v-A14B", "num_layers 40",
    ):  # fmt: skip
        assert words in text


def test_a_quantised_and_a_sharded_one(tmp_path, capsys):
    fp8 = write_sparse_mixed(tmp_path / "b.safetensors", fp8_scaled(TRANSFORMERS["t2v-1.3B"]))
    sharded = write_sparse_shards(tmp_path / "c", TRANSFORMERS["ti2v-5B"], 3)
    one, other = identify(capsys, fp8, sharded)
    assert one["quantisation"] == "fp8_scaled"
    assert one["num_parameters"] == num_elements(TRANSFORMERS["t2v-1.3B"])
    assert len(other["files"]) == 3
    assert other["profiles"] == ["ti2v-5B"]
    text = shown(capsys, fp8, sharded)
    assert "quantised: fp8_scaled" in text
    assert "in 3 files" in text


@pytest.mark.skipif(not Path("/proc/self/io").is_file(), reason="only Linux counts what a process reads")
def test_28_gigabytes_are_not_read(tmp_path, capsys):
    path = write_sparse(tmp_path / "a.safetensors", TRANSFORMERS["t2v-14B"])
    shown(capsys, path)  # what is imported on the way is read once

    def num_read_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = num_read_bytes()
    shown(capsys, path)
    assert path.stat().st_size > 28e9
    assert num_read_bytes() - before < 2e6


def test_neither_torch_nor_numpy_is_needed(tmp_path):
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'diffusers', 'transformers', 'safetensors', 'huggingface_hub'):\n"
        "    sys.modules[name] = None  # an import of it fails\n"
        "from wangen.generator.cli import main\n"
        "sys.exit(main(['models', 'identify', *sys.argv[1:]]) or main(['models', 'list']))\n"
    )
    paths = [VECTORS / "t5/models_t5_umt5-xxl-enc-bf16.pth", VECTORS / "dit_t2v21/model.safetensors", LORA]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "a umT5 text encoder" in done.stdout


def test_a_lora(capsys):
    (found,) = identify(capsys, LORA)
    assert found["kind"] == "lora"
    assert found["layout"] == "kohya"
    (group,) = found["lora"].pop("adapters")
    assert (group["rank"], group["alpha"], sum(group["modules"].values())) == (4, 2.0, 20)
    assert found["lora"] == {
        "kind": "LoRA", "layout": "kohya", "num_modules": 20, "num_blocks": 2, "dim": 256, "image_branch": False,
        "fits": [],
    }  # fmt: skip
    text = shown(capsys, LORA, VECTORS / "lora_i2v21/lora_musubi.safetensors")
    assert "rank 4, alpha 2" in text
    assert "changes 20 modules of a transformer of 2 blocks, 256 wide" in text
    assert "changes 24 modules of a transformer of 2 blocks with the image branch, 128 wide" in text
    assert "ss_base_model_version: wan" in text


@pytest.mark.parametrize(
    ("start", "query", "layout"),
    [
        ("diffusion_model.", "self_attn.q", "comfyui"),
        ("transformer.", "attn1.to_q", "diffusers"),
        ("base_model.model.", "attn1.to_q", "peft"),
    ],
)
def test_the_base_of_a_lora_is_known_by_its_width_and_blocks(tmp_path, capsys, start, query, layout):
    tensors = {
        f"{start}blocks.{number}.{query}.lora_{side}.weight": ("F32", shape)
        for number in range(40)
        for side, shape in (("A", (32, 5120)), ("B", (5120, 32)))
    }
    (found,) = identify(capsys, write_sparse_mixed(tmp_path / "a.safetensors", tensors))
    assert found["layout"] == layout
    assert found["lora"]["adapters"] == [{"rank": 32, "alpha": None, "modules": {"blocks.*.attn1.to_q": 40}}]
    assert {"t2v-14B", "t2v-A14B", "i2v-14B", "i2v-A14B"} <= {*found["lora"]["fits"]}
    assert {"t2v-1.3B", "ti2v-5B"}.isdisjoint(found["lora"]["fits"])


@pytest.mark.parametrize(
    ("dtype", "data"), [("F32", struct.pack("<f", 8)), ("BF16", b"\x00\x41"), ("F16", b"\x00\x48")]
)
def test_the_alpha_of_a_lora_in_every_dtype(tmp_path, capsys, dtype, data):
    header = {
        "lora_unet_blocks_0_ffn_0.alpha": {"dtype": dtype, "shape": [], "data_offsets": [0, len(data)]},
        "lora_unet_blocks_0_ffn_0.lora_down.weight": {
            "dtype": "F32", "shape": [2, 4], "data_offsets": [len(data), len(data) + 32],
        },
    }  # fmt: skip
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data + b"\0" * 32)
    (found,) = identify(capsys, path)
    assert [group["alpha"] for group in found["lora"]["adapters"]] == [8.0]


def test_both_commands_say_the_same_of_a_lora(tmp_path, capsys):
    """Of a file with a key that makes it more than a LoRA, too."""
    tensors = {
        "diffusion_model.blocks.0.self_attn.q.lora_A.weight": ("F32", (4, 5120)),
        "diffusion_model.blocks.0.self_attn.q.lora_B.weight": ("F32", (5120, 4)),
        "diffusion_model.blocks.0.norm3.diff_b": ("F32", (5120,)),
    }
    path = write_sparse_mixed(tmp_path / "a.safetensors", tensors)
    for file in (LORA, path):
        (found,) = identify(capsys, file)
        assert main(["export", "--metadata", "--lora_weight", str(file)]) == 0
        assert json.loads(capsys.readouterr().out)["lora"] == found["lora"]
        assert found["lora"]["layout"] == found["layout"]
    assert found["lora"]["unfit"].endswith("such as diffusion_model.blocks.0.norm3.diff_b")
    assert "this is a LoRA with differences of whole weights or biases beside it" in shown(capsys, path)


def test_a_bad_file_is_said_and_the_others_are_shown(tmp_path, capsys):
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((VECTORS / "dit_t2v21/model.safetensors").read_bytes()[:-5])
    page = tmp_path / "page.safetensors"
    page.write_text("<!DOCTYPE html><html></html>")
    text = shown(capsys, cut, page, tmp_path / "none", LORA, code=1)
    assert "the file is cut short" in text
    assert "a web page" in text
    assert "no such weight file" in text
    assert "a LoRA" in text
    broken, *_, lora = identify(capsys, cut, page, LORA)
    assert "cut short" in broken["error"]["found"]
    assert lora["kind"] == "lora"


def test_every_model_of_a_pipeline(tmp_path, capsys):
    (tmp_path / "model_index.json").write_text("{}")
    for name, source in (("transformer", "dit_t2v21/model.safetensors"), ("vae", "vae21/Wan2.1_VAE.pth")):
        (tmp_path / name).mkdir()
        target = f"diffusion_pytorch_model{Path(source).suffix}"
        shutil.copy(VECTORS / source, tmp_path / name / target)
    found = identify(capsys, tmp_path)
    assert [(each["path"], each["kind"]) for each in found] == [
        (str(tmp_path / "transformer"), "wan-transformer-t2v"), (str(tmp_path / "vae"), "wan-vae-2.1"),
    ]  # fmt: skip


def test_an_unknown_file_shows_some_of_its_names(tmp_path, capsys):
    path = write_sparse(tmp_path / "a.safetensors", {"some.layer.weight": (3, 4)})
    assert "some.layer.weight" in shown(capsys, path)


def test_metadata_are_printed_without_what_would_steer_a_terminal(tmp_path, capsys):
    tensors = {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    metadata = {"modelspec.title": "a\x1b[31m\nb" + "c" * 300, "modelspec.author": "me", "other": "not shown"}
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    said = shown(capsys, path)
    assert "\x1b" not in said
    assert "modelspec.author: me" in said
    assert "not shown" not in said
    assert max(map(len, said.splitlines())) < 150
    (found,) = identify(capsys, path)
    assert found["metadata"] == metadata


@pytest.mark.skipif(os.name == "nt", reason="such names are a matter of Linux")
def test_a_name_that_is_no_text(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.safetensors")
    shutil.copy(LORA, path)
    for words in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "wangen.runtime", "models", "identify", *words, path],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name == "nt", reason="such names are a matter of Linux")
def test_a_name_is_printed_on_one_line_and_steers_no_terminal(tmp_path, capsys):
    path = tmp_path / "a\x1b[31m\nb.safetensors"
    shutil.copy(LORA, path)
    assert r"a\x1b[31m\nb.safetensors" in shown(capsys, path)
    assert main(["models", "identify", f"{path}x"]) == 1
    out = capsys.readouterr().out
    assert r"where: " in out
    assert "\x1b" not in out


def test_a_model_beside_others_hides_none_of_them(tmp_path, capsys):
    write_sparse(tmp_path / "diffusion_pytorch_model.safetensors", TRANSFORMERS["t2v-1.3B"])
    assert len(identify(capsys, tmp_path)) == 1
    write_sparse(tmp_path / "more/wan2.1_t2v_14B_bf16.safetensors", TRANSFORMERS["t2v-14B"])
    shutil.copy(LORA, tmp_path / "mine.safetensors")
    assert sorted(found["kind"] for found in identify(capsys, tmp_path)) == ["lora", *["wan-transformer-t2v"] * 2]


def test_of_a_folder_of_many_models_each_is_shown_once(tmp_path, capsys):
    write_sparse_shards(tmp_path / "models/dit", TRANSFORMERS["ti2v-5B"], 3)
    for source, place in ((LORA, "loras/a/b.safetensors"), (VECTORS / "vae21/Wan2.1_VAE.pth", "vae/vae.pth")):
        (tmp_path / "models" / place).parent.mkdir(parents=True)
        shutil.copy(source, tmp_path / "models" / place)
    (tmp_path / "models/vae/put_vae_here").touch()
    found = identify(capsys, tmp_path / "models")
    assert [each["kind"] for each in found] == ["wan-transformer-ti2v", "lora", "wan-vae-2.1"]
    assert len(identify(capsys, *sorted((tmp_path / "models/dit").iterdir()))) == 1
    (tmp_path / "empty").mkdir()
    assert "a folder without weights" in shown(capsys, tmp_path / "empty", code=1)


def test_a_file_that_is_called_as_an_option_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(LORA, tmp_path / "-i2v.safetensors")
    assert main(["models", "identify", "-i2v.safetensors"]) == 2
    assert "put -- before" in capsys.readouterr().err
    assert main(["models", "identify", "--", "-i2v.safetensors"]) == 0


def test_what_takes_a_file_is_never_left_open(tmp_path, capsys):
    tiny = shown(capsys, VECTORS / "dit_t2v21/model.safetensors")
    assert "fits        --dit; no known task has these sizes\n" in tiny
    other = write_sparse(tmp_path / "a.safetensors", {"some.layer.weight": (3, 4)})
    assert "fits        nothing in wangen takes it\n" in shown(capsys, other)
