"""The caching steps with the weights that people have, and with the flags that say how these are used."""

import os
from pathlib import Path

import pytest
import torch
from cached_bundle import Bundle
from parity import TOKENIZER
from safetensors.torch import save_file

from wangen.generator.cli import main
from wangen.runtime.cache import load
from wangen.runtime.weights.text_encoder import load_text_encoder

pytest_plugins = ("bundle_fixtures",)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_the_cache_of_the_vae_on_the_cpu_gives_the_same_entries_and_tiles_give_their_own(bundle: Bundle):
    bundle.latents()
    before = bundle.files()
    assert bundle.latents("--vae_cache_cpu")["computed"] == 0
    assert bundle.latents("--vae_cache_cpu", "--recache")["computed"] == 4
    assert bundle.files() == before
    assert bundle.latents("--vae_tiling", "--keep_cache")["computed"] == 4
    assert len(bundle.files()) == len(before) + 4
    check = ["check_cache", "--dataset_config", str(bundle.toml), "--vae", str(bundle.models["vae"]), *CPU]
    bundle.text()
    assert main([*check, "--vae_tile", "256"]) == 0
    assert main(check) == 1, "training takes the entries of the last run, which are those of tiles"


CPU = ("--vae_dtype", "float32", "--t5_dtype", "float32")


@pytest.mark.parametrize("tile", ["200", "64", "-64"])
def test_tiles_that_cannot_be_are_refused_before_anything_loads(bundle: Bundle, capsys, tile: str):
    assert main([*bundle.latents_line(), f"--vae_tile={tile}"]) == 2
    assert "multiples of 64 from 128" in capsys.readouterr().err


def test_a_text_encoder_in_8_bits_has_entries_of_its_own(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    bundle.text()
    (bundle.photos / "coffee.txt").write_text("a cup", encoding="utf-8")
    assert bundle.text()["removed"] == 1
    assert "give --keep_cache" not in capsys.readouterr().err
    exact = {name: load(entry)["embedding"] for name, entry in bundle.entries().items()}
    assert bundle.text("--fp8_t5")["computed"] == 4
    assert "removed 6 entries of the weights or the precision before: to keep those" in capsys.readouterr().err
    rounded = {name: load(entry)["embedding"] for name, entry in bundle.entries().items()}
    assert rounded.keys() == exact.keys()
    for name, embedding in rounded.items():
        difference = (embedding - exact[name]).pow(2).mean().sqrt() / exact[name].pow(2).mean().sqrt()
        assert 1e-3 < difference < 0.2
    bundle.latents()
    check = ["check_cache", "--dataset_config", str(bundle.toml), "--t5", str(bundle.models["t5"]), *CPU]
    assert main([*check, "--fp8_t5"]) == 0
    assert main(check) == 1


def test_a_text_encoder_of_comfyui_needs_no_tokenizer_beside_it(bundle: Bundle, tmp_path: Path):
    path = as_comfyui(bundle.models["t5"], tmp_path / "text_encoders" / "umt5_xxl_fp16.safetensors")
    line = ["cache_text", "--dataset_config", str(bundle.toml), "--t5", str(path), "--device", "cpu"]
    assert main(line) == 0
    assert bundle.counts("cache_text")["computed"] == 4
    # The same tokenizer beside it changes nothing.
    (path.parent / "spiece.model").write_bytes((TOKENIZER / "spiece.model").read_bytes())
    assert main(line) == 0
    assert bundle.counts("cache_text")["computed"] == 0


def test_a_carried_tokenizer_that_is_none_is_named(bundle: Bundle, tmp_path: Path, capsys):
    path = as_comfyui(bundle.models["t5"], tmp_path / "t5.safetensors", spiece=b"nothing")
    line = ["cache_text", "--dataset_config", str(bundle.toml), "--t5", str(path), "--device", "cpu"]
    assert main(line) == 1
    shown = capsys.readouterr().err
    assert "the tokenizer inside these weights" in shown
    assert "--tokenizer" in shown
    assert os.fspath(path) in shown


def as_comfyui(t5: Path, path: Path, spiece: bytes | None = None) -> Path:
    """A text encoder as ComfyUI repacks it: Hugging Face names, float16, the tokenizer inside."""
    state = load_text_encoder(t5, dtype=torch.float16).state_dict()
    state = {name: value.contiguous() for name, value in state.items() if name != "encoder.embed_tokens.weight"}
    data = (TOKENIZER / "spiece.model").read_bytes() if spiece is None else spiece
    # The ids of this tokenizer go beyond the tiny vocabulary of the demo's encoder.
    state["shared.weight"] = state["shared.weight"].repeat(20, 1)
    state["spiece_model"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    path.parent.mkdir(exist_ok=True)
    save_file(state, path)
    return path
