"""What is said of a LoRA without reading its weights, and that it is what loading it says."""

import json
from pathlib import Path

import pytest
import torch
from loras import LORAS
from safetensors.torch import load_file, save_file

from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.runtime.lora import read_lora

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
    else:
        tensors["diffusion_model.blocks.0.ffn.0.lora_A.weight"] = torch.ones(4, 256)
    return tensors


@pytest.mark.parametrize("case", ["text encoder", "no prefix", "half", "ranks", "twice"])
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
