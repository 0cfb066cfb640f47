"""`wangen export` and `wangen models identify` of DoRA, LoHa and LoKr: what is written computes what was read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from wangen.generator.cli import main
from wangen.generator.header_keys import DORA_NORM
from wangen.runtime import safetensors_file
from wangen.runtime.adapter_layers import change_of
from wangen.runtime.adapters import Adapter, AdapterWeight, read_adapter
from wangen.runtime.training.adapter_files import name_adapter

MODULES = {f"blocks.{number}.{name}": sizes for number in range(2) for name, sizes in (
    ("attn1.to_q", (12, 8)), ("attn2.to_out.0", (8, 12)), ("ffn.net.0.proj", (24, 8)),
)}  # fmt: skip
LAYOUTS = ("comfyui", "kohya", "diffusers")
KINDS = ("loha", "lokr", "lokr of whole matrices", "dora")
RANK = 2


def adapter_of(kind: str, scale: float = 0.5) -> Adapter:
    """A random adapter of one kind over three layers of two blocks."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    made = {}
    for module, (outputs, inputs) in MODULES.items():
        if kind == "loha":
            parts = {f"hada_w{n}_{side}": drawn(*((outputs, RANK) if side == "a" else (RANK, inputs)))
                     for n in (1, 2) for side in "ab"}  # fmt: skip
        elif kind == "dora":
            parts = {"down": drawn(RANK, inputs), "up": drawn(outputs, RANK)}
        elif kind == "lokr":
            parts = {"lokr_w1": drawn(2, 2), "lokr_w2_a": drawn(outputs // 2, RANK),
                     "lokr_w2_b": drawn(RANK, inputs // 2)}  # fmt: skip
        else:
            parts = {"lokr_w1": drawn(2, 2), "lokr_w2": drawn(outputs // 2, inputs // 2)}
        magnitude = drawn(outputs).abs() if kind == "dora" else None
        made[module] = AdapterWeight("lora" if kind == "dora" else kind[:4], parts, scale, magnitude)
    return made


def write(path: Path, adapter: Adapter, layout: Any, **metadata: str) -> Path:
    safetensors_file.write(path, name_adapter(adapter, layout, torch.float32), {"format": "pt", **metadata})
    return path


def export(path: Path, target: Path, *words: str) -> int:
    return main(["export", "--lora_weight", str(path), "--save_path", str(target), *words])


def same(first: Adapter, second: Adapter) -> bool:
    """Whether two adapters change the same layers by the same numbers."""
    assert first.keys() == second.keys() == MODULES.keys()
    return all(
        torch.allclose(change_of(first[name]).float(), change_of(second[name]).float(), rtol=1e-5, atol=1e-6)
        and (first[name].magnitude is None) == (second[name].magnitude is None)
        and (first[name].magnitude is None or torch.equal(first[name].magnitude, second[name].magnitude))
        for name in MODULES
    )


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_every_pair_of_layouts_keeps_the_change(tmp_path, kind, source, target):
    path = write(tmp_path / "a.safetensors", adapter_of(kind), source)
    assert same(read_adapter(path), adapter_of(kind))
    assert export(path, tmp_path / "b.safetensors", "--layout", target) == 0
    assert same(read_adapter(tmp_path / "b.safetensors"), adapter_of(kind))
    assert {key.partition("blocks")[0] for key in load_file(tmp_path / "b.safetensors")} == {
        {"comfyui": "diffusion_model.", "kohya": "lora_unet_", "diffusers": "transformer."}[target]
    }


@pytest.mark.parametrize(("source", "target"), [
    ("comfyui", "kohya"), ("kohya", "comfyui"), ("comfyui", "diffusers"), ("diffusers", "diffusers"),
])  # fmt: skip
def test_a_dora_of_another_trainer_keeps_change_and_magnitudes(tmp_path, source, target):
    path = write(tmp_path / "a.safetensors", adapter_of("dora"), source)
    assert export(path, tmp_path / "b.safetensors", "--layout", target) == 0
    assert same(read_adapter(tmp_path / "b.safetensors"), adapter_of("dora"))


def test_a_dora_over_the_base_stays_one(tmp_path):
    path = write(tmp_path / "a.safetensors", adapter_of("dora"), "comfyui", **{DORA_NORM: "base"})
    assert export(path, tmp_path / "b.safetensors", "--layout", "kohya") == 0
    assert all(weight.over_base for weight in read_adapter(tmp_path / "b.safetensors").values())


@pytest.mark.parametrize(("source", "target", "marked"), [
    ("diffusers", "comfyui", False), ("diffusers", "kohya", False), ("comfyui", "diffusers", True),
])  # fmt: skip
def test_magnitudes_that_need_the_base_are_refused(tmp_path, capsys, source, target, marked):
    metadata = {DORA_NORM: "base"} if marked else {}
    path = write(tmp_path / "a.safetensors", adapter_of("dora"), source, **metadata)
    assert export(path, tmp_path / "b.safetensors", "--layout", target) == 2
    assert "need the weights of its base" in capsys.readouterr().err
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize("words", [["--layout", "peft"], ["--dtype", "float8_e4m3fn"]])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_for_plain_loras_is_refused(tmp_path, capsys, kind, words):
    path = write(tmp_path / "a.safetensors", adapter_of(kind), "comfyui")
    assert export(path, tmp_path / "b.safetensors", *words) == 2
    assert "is for plain LoRAs" in capsys.readouterr().err


def test_of_several_precisions_none_is_rounded(tmp_path):
    tensors = name_adapter(adapter_of("loha"), "kohya", torch.float32)
    first = next(name for name in tensors if not name.endswith("alpha"))
    tensors[first] = tensors[first].bfloat16()
    save_file(tensors, tmp_path / "a.safetensors")
    assert export(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--layout", "kohya") == 0
    made = load_file(tmp_path / "b.safetensors")
    assert all(torch.equal(made[name], value.float()) for name, value in tensors.items())


def test_the_precision_is_kept_or_the_one_asked_for_and_the_metadata_stay(tmp_path):
    tensors = name_adapter(adapter_of("loha"), "kohya", torch.bfloat16)
    save_file(tensors, tmp_path / "a.safetensors", {"modelspec.title": "cats", "sshs_model_hash": "00"})
    for words, dtype in ([], torch.bfloat16), (["--dtype", "float16"], torch.float16):
        assert export(tmp_path / "a.safetensors", tmp_path / "b.safetensors", *words) == 0
        made = load_file(tmp_path / "b.safetensors")
        assert {value.dtype for key, value in made.items() if not key.endswith("alpha")} == {dtype}
    words = json.loads((tmp_path / "export.report.json").read_text())
    assert words["counts"] == {"modules": len(MODULES), "ranks": [RANK]}
    header = safetensors_header(tmp_path / "b.safetensors")
    assert header["modelspec.title"] == "cats"
    assert "sshs_model_hash" not in header


def safetensors_header(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        return opened.metadata()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_identify_calls_them_what_they_are(tmp_path, capsys, kind, layout):
    path = write(tmp_path / "a.safetensors", adapter_of(kind), layout)
    assert main(["models", "identify", "--json", str(path)]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    name = {"loha": "LoHa", "lokr": "LoKr", "dora": "DoRA"}[kind[:4]]
    assert found["words"] == f"a {name}"
    assert found["flag"] == "--network_weights or --lora_weight"
    lora = found["lora"]
    assert (lora["kind"], lora["num_modules"], lora["num_blocks"], lora["dim"]) == (name, len(MODULES), 2, 8)
    assert found["layout"] == layout
    assert {group["rank"] for group in lora["adapters"]} == {None if "whole" in kind else RANK}
    assert "unfit" not in lora
    assert main(["models", "identify", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"{name}        only a plain LoRA can be merged" in shown.replace("can be trained from, sampled with and "
                                                                            "converted; ", "")  # fmt: skip
    assert main(["export", "--metadata", "--lora_weight", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["lora"] == lora


@pytest.mark.parametrize(("change", "words"), [
    ({"diffusion_model.blocks.0.self_attn.q.hada_w1_a": None}, "blocks.0.attn1.to_q: only"),
    ({"diffusion_model.blocks.0.self_attn.q.hada_w1_a": torch.ones(12, 3)}, "do not fit each other"),
    ({"diffusion_model.blocks.0.self_attn.q.hada_t1": torch.ones(2, 2, 1, 1)}, "1 of 31 keys is not understood"),
    ({"diffusion_model.blocks.0.self_attn.q.dora_scale": torch.ones(12, 1)}, "magnitudes of a DoRA"),
])  # fmt: skip
def test_one_that_cannot_be_loaded_is_not_said_to_fit(tmp_path, capsys, change, words):
    tensors = name_adapter(adapter_of("loha"), "comfyui", torch.float32) | change
    save_file({key: value for key, value in tensors.items() if value is not None}, tmp_path / "a.safetensors")
    assert main(["models", "identify", str(tmp_path / "a.safetensors")]) == 0
    shown = capsys.readouterr().out
    assert "cannot be used: " in shown
    assert words in shown
    assert "nothing in wangen takes it" in shown
    assert export(tmp_path / "a.safetensors", tmp_path / "b.safetensors") == 1


def test_merging_takes_plain_loras_alone(tmp_path, capsys):
    path = write(tmp_path / "a.safetensors", adapter_of("loha"), "comfyui")
    assert export(path, tmp_path / "b.safetensors", "--dit", str(path)) == 1
    told = capsys.readouterr().err
    assert "this is a LoHa, and only plain LoRAs can be merged into a checkpoint" in told
    assert "give a LoRA for Wan" not in told, "in every other step it is one"


def test_only_an_adapter_of_the_same_kind_is_replaced(tmp_path, capsys):
    target = write(tmp_path / "b.safetensors", adapter_of("loha"), "kohya")
    before = target.read_bytes()
    assert export(write(tmp_path / "a.safetensors", adapter_of("lokr"), "comfyui"), target) == 2
    assert target.read_bytes() == before
    assert "a LoHa" in capsys.readouterr().err
    assert export(write(tmp_path / "a.safetensors", adapter_of("loha"), "comfyui"), target) == 0
    assert target.read_bytes() != before
