"""What is said of a LoRA without reading its weights, and that it is what loading it says."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loras import LORAS
from safetensors.torch import load_file, save_file

from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.generator.steps import Train
from wangen.runtime.lora import read_lora
from wangen.runtime.training.metadata import metadata

STEM = "lora_unet_blocks_0_ffn_0"


def damaged(case: str) -> dict[str, torch.Tensor]:
    tensors = load_file(LORAS["t2v21"])
    if case == "text encoder":
        tensors["lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"] = torch.ones(4, 4)
    elif case == "no prefix":
        tensors = {key.removeprefix("lora_unet_"): value for key, value in tensors.items()}
    elif case == "half":
        del tensors[f"{STEM}.lora_up.weight"]
    elif case == "ranks":
        tensors[f"{STEM}.lora_up.weight"] = torch.ones(384, 3)
    elif case == "int8":
        tensors[f"{STEM}.lora_up.weight"] = torch.ones(384, 4, dtype=torch.int8)
    else:
        tensors["diffusion_model.blocks.0.ffn.0.lora_A.weight"] = torch.ones(4, 256)
    return tensors


@pytest.mark.parametrize("case", ["text encoder", "no prefix", "half", "ranks", "int8", "twice"])
def test_a_file_that_cannot_be_loaded_is_not_said_to_fit(tmp_path: Path, capsys, case: str):
    file = tmp_path / "a.safetensors"
    save_file(damaged(case), file)
    with pytest.raises(WangenError) as error:
        read_lora(file)
    assert main(["models", "identify", str(file)]) == 0
    shown = capsys.readouterr().out
    assert error.value.found in shown or case == "no prefix"
    assert "fits        --" not in shown
    assert main(["models", "identify", "--json", str(file)]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["flag"] == ""
    if found["kind"] == "lora":
        assert found["lora"]["unfit"] == error.value.found


def test_one_that_can_be_loaded_fits(capsys):
    assert main(["models", "identify", str(LORAS["t2v21"])]) == 0
    assert "fits        --network_weights or --lora_weight" in capsys.readouterr().out


def test_a_lora_of_qwen_image_is_described_as_such(tmp_path, capsys):
    layers = ("attn.to_q", "attn.add_k_proj", "img_mlp.net.2")
    modules = [f"transformer_blocks.{number}.{layer}" for number in (0, 59) for layer in layers]
    widths = {"img_mlp.net.2": (3072, 12288)}
    tensors = {}
    for module in modules:
        rows, columns = widths.get(module.split(".", 2)[2], (3072, 3072))
        tensors[f"diffusion_model.{module}.lora_A.weight"] = torch.zeros(2, columns)
        tensors[f"diffusion_model.{module}.lora_B.weight"] = torch.zeros(rows, 2)
    save_file(tensors, tmp_path / "edit.safetensors")
    assert main(["models", "identify", str(tmp_path / "edit.safetensors")]) == 0
    shown = capsys.readouterr().out
    for words in ("a LoRA for Qwen-Image", "rank 2", "changes 6 modules of a transformer of 2 blocks, 3072 wide",
                  "base: qwen-image, qwen-image-edit, qwen-image-edit-plus"):  # fmt: skip
        assert words in shown


def test_diffusers_older_names_are_read(tmp_path: Path):
    plain = {key: value for key, value in load_file(LORAS["t2v21"]).items() if not key.endswith(".alpha")}
    older = {key.replace(".lora_down.", ".lora.down.").replace(".lora_up.", ".lora.up."): value
             for key, value in plain.items()}  # fmt: skip
    for name, tensors in (("plain", plain), ("older", older)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    found, wanted = (read_lora(tmp_path / f"{name}.safetensors") for name in ("older", "plain"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[module].up, wanted[module].up) for module in wanted)


def drawn(repeats: int) -> Any:
    return SimpleNamespace(sample=SimpleNamespace(entry=SimpleNamespace(num_repeats=repeats)))


def test_a_header_counts_the_steps_of_its_expert_and_of_the_run():
    options = Train(output_dir=Path("o"), output_name="n", task="t2v-A14B", network_args=("rank_dropout=0.1",),
                    network_module="loha")  # fmt: skip
    plan = SimpleNamespace(options=options, fingerprint={"seed": "42"}, steps_per_epoch=3, batches_per_epoch=6,
                           experts=(), samples=[drawn(1), drawn(3)], trained_before=[], told={})  # fmt: skip
    told = metadata(plan, "low_noise", step=4, run_step=7, judged_at="abc")  # type: ignore[arg-type]
    wanted = {"ss_steps": "4", "wangen.run_steps": "7", "ss_epoch": "2", "wangen.steps_per_epoch": "3",
              "ss_num_batches_per_epoch": "6", "ss_num_train_items": "4", "wangen.expert": "low_noise",
              "wangen.judged_at": "abc", "ss_network_module": "networks.loha",
              "ss_network_args": '{"rank_dropout": "0.1"}'}  # fmt: skip
    assert told | wanted == told
    plan.options = replace(options, ema_decay=0.99, optimizer_type="Adafactor", optimizer_args=("relative_step=True",))
    means = metadata(plan, "low_noise", step=4, run_step=7, averaged=True)  # type: ignore[arg-type]
    assert (means["wangen.averaged"], "wangen.averaged" in told) == ("0.99", False)
    assert (told["ss_lr_scheduler"], told["ss_learning_rate"]) == ("constant", "0.0001")
    assert (means["ss_lr_scheduler"], means["ss_learning_rate"]) == ("adafactor", "None"), "it sets its rate itself"
    plan.options = replace(options, no_metadata=True)
    short = metadata(plan, "low_noise", step=4, run_step=7)  # type: ignore[arg-type]
    assert short["wangen.expert"] == "low_noise", "programs need to know whose it is"
    assert "ss_steps" not in short
    for task, words in (("qwen-image-edit", "qwen_image_edit"), ("qwen-image", "qwen_image"), ("t2v-1.3B", "wan")):
        plan.options = replace(options, task=task)
        assert metadata(plan, "", step=1, run_step=1)["ss_base_model_version"] == words  # type: ignore[arg-type]
