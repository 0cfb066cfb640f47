"""What stands beside a LoRA's tensors: alphas by patterns as peft means them, and what makes one LoRA another."""

import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from loras import LORAS, convert
from peft import LoraConfig, get_peft_model
from PIL import Image

from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.generator.headers import identity
from wangen.generator.lora_config import lora_identity
from wangen.generator.steps import Generate
from wangen.runtime import generate, train
from wangen.runtime.lora import read_lora

T2V = LORAS["t2v21"]


class Official(torch.nn.Module):
    """Some layers of two blocks, with the names that the official model gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "self_attn": torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in "qkvo"}),
                    "cross_attn": torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in "qkvo"}),
                    "ffn": torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)),
                }
            )
            for _ in range(2)
        )


def peft_folder(folder: Path, model: torch.nn.Module, **changes) -> torch.nn.Module:
    """Save an adapter with peft's own functions; returns the adapted model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        targets = ["self_attn.q", "self_attn.o", "cross_attn.q", "ffn.0"]
        config = LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False, **changes)
        adapted = get_peft_model(model, config)
        adapted.save_pretrained(folder)
    return adapted


@pytest.mark.parametrize(
    "patterns",
    [
        {"self_attn.q": 16},
        {"blocks.0.self_attn.q": 16, "ffn.0": 2},
        {"^blocks.1.ffn.0": 16, "ffn.0": 8, r"blocks\.0\.cross_attn\.q": 1},
        {"q": 32, "o$": 8},
    ],
)
@pytest.mark.parametrize("stabilized", [False, True])
def test_patterns_in_the_official_names_mean_what_peft_makes_of_them(tmp_path: Path, patterns: dict, stabilized: bool):
    adapted = peft_folder(tmp_path, Official(), alpha_pattern=patterns, use_rslora=stabilized)
    lora = read_lora(tmp_path)
    new = {"self_attn.q": "attn1.to_q", "self_attn.o": "attn1.to_out.0", "cross_attn.q": "attn2.to_q",
           "ffn.0": "ffn.net.0.proj"}  # fmt: skip
    assert len(lora) == 2 * len(new)
    for number in range(2):
        for old, name in new.items():
            scale = adapted.get_submodule(f"base_model.model.blocks.{number}.{old}").scaling["default"]
            assert math.isclose(lora[f"blocks.{number}.{name}"].scale, scale), (number, old)


@pytest.mark.parametrize("pattern", ["self_attn.x", "^to_q", "blocks.7.attn1.to_q", "diffusion_model.blocks.7.ffn.0"])
def test_a_pattern_that_no_module_has_is_refused(tmp_path: Path, capsys, pattern: str):
    convert(T2V, tmp_path / "adapter", "--layout", "peft")
    change_config(tmp_path / "adapter", alpha_pattern={"attn1.to_q": 2, pattern: 16})
    with pytest.raises(WangenError, match="no module of this LoRA") as error:
        read_lora(tmp_path / "adapter")
    assert repr(pattern.removeprefix("diffusion_model.")) in error.value.found
    assert main(["export", "--metadata", "--lora_weight", str(tmp_path / "adapter")]) == 1
    assert pattern.removeprefix("diffusion_model.") in capsys.readouterr().err


def test_patterns_with_the_prefix_of_a_repacked_model_are_understood(tmp_path: Path):
    convert(T2V, tmp_path / "adapter", "--layout", "peft")
    change_config(tmp_path / "adapter", alpha_pattern={r"^diffusion_model\.blocks\.0\.self_attn\.q$": 16})
    lora = read_lora(tmp_path / "adapter")
    assert {name for name, weight in lora.items() if weight.alpha == 16} == {"blocks.0.attn1.to_q"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_qalora", True), ("use_bdlora", {"target_modules_bd_a": ["q"]}), ("alora_invocation_tokens", [1]),
     ("arrow_config", {"router_temperature": 1.0}), ("layer_replication", [[0, 2]])],
)  # fmt: skip
def test_variants_that_are_more_than_two_factors_are_refused(tmp_path: Path, field: str, value: object):
    convert(T2V, tmp_path / "adapter", "--layout", "peft")
    change_config(tmp_path / "adapter", **{field: value})
    with pytest.raises(WangenError, match=field):
        read_lora(tmp_path / "adapter")


@pytest.mark.parametrize(("began", "refused"), [("pissa", True), ("pissa_niter_4", True), ("OLoRA", True),
                                                ("gaussian", False), (True, False)])  # fmt: skip
def test_a_lora_that_began_with_a_part_of_the_base_is_refused(tmp_path: Path, began: object, refused: bool):
    """peft takes that part from the base when it loads it; by itself the file is another change."""
    convert(T2V, tmp_path / "adapter", "--layout", "peft")
    change_config(tmp_path / "adapter", init_lora_weights=began)
    if not refused:
        assert read_lora(tmp_path / "adapter")
        return
    with pytest.raises(WangenError, match="init_lora_weights") as error:
        read_lora(tmp_path / "adapter")
    assert "path_initial_model_for_weight_conversion" in error.value.cure


def test_the_identity_of_a_peft_folder_changes_with_its_configuration(tmp_path: Path):
    convert(T2V, tmp_path / "adapter", "--layout", "peft")
    shutil.copytree(tmp_path / "adapter", tmp_path / "copy")
    before = lora_identity(tmp_path / "adapter")
    assert lora_identity(tmp_path / "copy") == lora_identity(tmp_path / "copy/adapter_model.safetensors") == before
    change_config(tmp_path / "adapter", lora_alpha=40)
    assert lora_identity(tmp_path / "adapter") != before


def test_a_plain_file_keeps_its_identity_whatever_lies_beside_it(tmp_path: Path):
    file = Path(shutil.copy(T2V, tmp_path / "cats.safetensors"))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert lora_identity(file) == identity(file)


def test_a_folder_with_files_of_peft_and_diffusers_is_read_and_identified_as_the_one_of_peft(tmp_path: Path):
    convert(T2V, tmp_path / "adapter", "--layout", "peft")
    before = lora_identity(tmp_path / "adapter")
    convert(T2V, tmp_path / "adapter/pytorch_lora_weights.safetensors", "--layout", "diffusers")
    assert lora_identity(tmp_path / "adapter") == before
    assert len(read_lora(tmp_path / "adapter")) == 20


def test_a_training_that_starts_from_a_changed_configuration_is_another_one(tiny_run, tmp_path: Path):
    train.run(tiny_run.options(tmp_path / "first", max_train_steps=2))
    convert(tmp_path / "first/lora.safetensors", tmp_path / "adapter", "--layout", "peft")
    convert(tmp_path / "adapter", tmp_path / "adapter/pytorch_lora_weights.safetensors", "--layout", "diffusers")
    options = tiny_run.options(tmp_path / "second", network_weights=tmp_path / "adapter", max_train_steps=2)
    train.run(options)
    assert train.run(options).result["done_before"]
    change_config(tmp_path / "adapter", lora_alpha=40)
    with pytest.raises(WangenError, match="network_weights: another file"):
        train.run(options)


def test_a_picture_tells_which_configuration_its_lora_had(tiny_run, tmp_path: Path):
    train.run(tiny_run.options(tmp_path, max_train_steps=2))
    folder = tmp_path / "adapter"
    convert(tmp_path / "lora.safetensors", folder, "--layout", "peft")
    convert(folder, folder / "pytorch_lora_weights.safetensors", "--layout", "diffusers")
    told = []
    for alpha in (4, 400):
        change_config(folder, lora_alpha=alpha)
        options = Generate(**tiny_run.weights, task="t2v-1.3B", prompt="a", video_size=(64, 64), video_length=1,
                           infer_steps=1, guidance_scale=1.0, save_path=tmp_path / f"{alpha}.png", device="cpu",
                           lora_weight=(folder,))  # fmt: skip
        generate.run(options)
        with Image.open(options.save_path) as image:
            told.append(json.loads(image.text["wangen"])["loras"])
        assert told[-1] == [lora_identity(folder)]
    assert told[0] != told[1]


def test_a_lora_that_is_not_there_ends_sampling_before_a_model_loads(tiny_run, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(generate, "make_scenes", lambda *_: pytest.fail("the text encoder was loaded"))
    options = Generate(**tiny_run.weights, task="t2v-1.3B", prompt="a", video_size=(64, 64), video_length=1,
                       save_path=tmp_path / "a.png", device="cpu", lora_weight=(tmp_path / "none",))  # fmt: skip
    with pytest.raises(WangenError, match="no such weight file"):
        generate.run(options)


def change_config(folder: Path, **fields) -> None:
    """Change some fields of an adapter's configuration."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **fields}), encoding="utf-8")
