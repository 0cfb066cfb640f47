import os
import pickle
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from parity import CLIP, CLIP_HEADS, DIT, T5, VAE21, VAE22, VECTORS
from safetensors.torch import load_file

from wangen.generator.errors import WangenError
from wangen.runtime import safetensors_file
from wangen.runtime.weights.image_encoder import load_image_encoder
from wangen.runtime.weights.text_encoder import load_text_encoder
from wangen.runtime.weights.transformer import load_transformer
from wangen.runtime.weights.vae import load_vae

LORA = VECTORS / "lora_t2v21" / "lora_musubi.safetensors"


@pytest.mark.parametrize(
    ("load", "path"),
    [
        (load_transformer, DIT),
        (load_vae, VAE21),
        (load_vae, VAE22),
        (load_text_encoder, T5),
        (partial(load_image_encoder, num_heads=CLIP_HEADS), CLIP),
    ],
)
def test_models_are_frozen_whole_and_in_eval_mode(load, path: Path):
    model = load(path)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(
    ("load", "path", "words"),
    [
        (load_vae, DIT, "--dit"),
        (load_text_encoder, VAE21, "--vae"),
        (load_transformer, T5, "--t5"),
        (load_transformer, LORA, "this is a LoRA"),
        (load_vae, VECTORS, "a folder"),
        (load_vae, VECTORS / "none.pth", "no such weight file"),
    ],
)
def test_a_wrong_file_is_named_with_its_own_flag(load, path: Path, words: str):
    with pytest.raises(WangenError) as caught:
        load(path)
    assert words in str(caught.value)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path):
    path, state = tmp_path / "model.safetensors", load_file(DIT)
    changes = {
        "1 missing": {**state, "blocks.1.ffn.2.bias": None},
        "1 unexpected": {**state, "blocks.1.strange.weight": torch.ones(1)},
        "1 of another shape": {**state, "blocks.1.ffn.2.bias": torch.ones(3)},
        "blocks are missing": {name.replace("blocks.1", "blocks.7"): value for name, value in state.items()},
        "not a multiple": {**state, "patch_embedding.weight": torch.ones(100, 16, 1, 2, 2)},
        "linear_1.weight is missing": {**state, "text_embedding.0.weight": None},
        "the same weight": {**state, "diffusion_model.blocks.1.ffn.2.bias": torch.ones(256)},
    }
    for words, tensors in changes.items():
        safetensors_file.write(path, {name: value for name, value in tensors.items() if value is not None}, {})
        with pytest.raises(WangenError, match=words):
            load_transformer(path)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.target),))


def test_a_pickle_with_code_is_refused_and_not_executed(tmp_path: Path):
    made = tmp_path / "made-by-the-pickle"
    with zipfile.ZipFile(tmp_path / "vae.pth", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"encoder.conv1.weight": Bomb(made)}, 2))
    for load in (load_vae, load_text_encoder, load_transformer):
        with pytest.raises(WangenError, match="refused, not executed"):
            load(tmp_path / "vae.pth")
    assert not made.exists()


@pytest.mark.parametrize("path", [DIT, VAE21])
def test_a_file_cut_short_is_refused(tmp_path: Path, path: Path):
    cut = tmp_path / path.name
    cut.write_bytes(path.read_bytes()[:-1000])
    load = load_vae if path == VAE21 else load_transformer
    with pytest.raises(WangenError, match=str(cut.stat().st_size)):
        load(cut)
