"""`wangen export --dit`: whole transformers between the official names and those of diffusers, judged by diffusers."""

import json
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel
from gguf_files import write_gguf
from loras import LORAS
from parity import DIT, DITS, cases, velocity
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_qwen import TinyQwen, make_transformer

from wangen.generator.cli import main
from wangen.runtime import merge as merging
from wangen.runtime import safetensors_file, train
from wangen.runtime.models import qwen_image_edit
from wangen.runtime.models.qwen_image_edit import transformer as qwen
from wangen.runtime.weights.transformer import Timesteps, load_transformer

Tensors = dict[str, torch.Tensor]
MARKER = "__index_timestep_zero__"
WEIGHTS = "diffusion_pytorch_model.safetensors"


def export(dit: Path, out: Path, layout: str, *more: str) -> Path:
    """What the command makes: a file, or a folder."""
    assert main(["export", "--dit", str(dit), "--save_path", str(out), "--layout", layout, *more]) == 0
    return out


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What the command says when it stops."""
    capsys.readouterr()
    assert main(["export", *map(str, words)]) != 0
    said = capsys.readouterr().err
    assert said.count("  do: ") == 1, said
    return said


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return opened.metadata() or {}


def same(found: Mapping[str, torch.Tensor], meant: Mapping[str, torch.Tensor]) -> None:
    """Assert that the names, dtypes and numbers are equal to the bit."""
    assert found.keys() == meant.keys()
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in meant.items())


def loaded(kind: Any, folder: Path, **how: object) -> Any:
    """The transformer that diffusers loads, copied out of the mapped file: unaligned numbers have other products."""
    model = kind.from_pretrained(folder, **how).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def wan_of_diffusers(folder: Path, **how: object) -> Any:
    """The Wan that diffusers loads, with sinusoids of a timestep as exact as ours."""
    model = loaded(WanTransformer3DModel, folder, **how)
    model.condition_embedder.timesteps_proj = Timesteps(model.config.freq_dim)
    return model


# ---- Wan ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DITS if name != "dit_t2v21_e2e"])
def test_diffusers_loads_the_folder_and_computes_the_same_to_the_bit(tmp_path: Path, name: str):
    folder = export(DITS[name], tmp_path / "transformer", "diffusers")
    assert {path.name for path in folder.iterdir()} == {WEIGHTS, "config.json"}
    ours, reread = (load_transformer(path, dtype=torch.float32) for path in (DITS[name], folder))
    theirs = wan_of_diffusers(folder, torch_dtype=torch.float32)
    assert theirs.config["_class_name"] == "WanTransformer3DModel"
    same(theirs.state_dict(), ours.state_dict())
    for case in cases(name):
        meant = velocity(ours, name, case)
        assert torch.equal(velocity(theirs, name, case), meant)
        assert torch.equal(velocity(reread, name, case), meant)
    back = export(folder, tmp_path / "back.safetensors", "original")
    same(load_file(back), load_file(DITS[name]))


def test_first_and_last_frame_keeps_the_positions_of_both_images(tmp_path: Path):
    state = load_file(DITS["dit_i2v21"]) | {"img_emb.emb_pos": torch.randn(1, 514, 1280).bfloat16()}
    save_file(state, tmp_path / "flf2v.safetensors")
    folder = export(tmp_path / "flf2v.safetensors", tmp_path / "transformer", "diffusers")
    theirs = wan_of_diffusers(folder, torch_dtype=torch.bfloat16)
    assert theirs.config["pos_embed_seq_len"] == 514
    found = theirs.condition_embedder.image_embedder.pos_embed
    assert torch.equal(found, state["img_emb.emb_pos"])
    same(load_file(export(folder, tmp_path / "back.safetensors", "original")), state)


def test_what_full_fine_tuning_saves_goes_to_diffusers_and_back_with_what_it_was_trained_on(tiny_run, tmp_path: Path):
    train.run(tiny_run.options(tmp_path / "run", max_train_steps=1, train_mode="full"))
    trained = tmp_path / "run" / "lora.safetensors"
    folder = export(trained, tmp_path / "transformer", "diffusers")
    same(wan_of_diffusers(folder).state_dict(), load_transformer(trained).state_dict())
    back = export(folder, tmp_path / "back.safetensors", "original")
    same(load_file(back), load_file(trained))
    told = metadata_of(trained)
    assert told["wangen.train_mode"] == "full"
    notes = [{"from": "original", "to": "diffusers"}, {"from": "diffusers", "to": "original"}]
    for path, note in zip((folder / WEIGHTS, back), notes, strict=True):
        found = metadata_of(path)
        assert json.loads(found.pop("wangen.converted")) == note
        assert found == told


FORMS: dict[str, Callable[[Path], Path]] = {}
"""Form of a checkpoint -> what writes the fixture in it."""


def form(write: Callable[[Path], Path]) -> Callable[[Path], Path]:
    FORMS[write.__name__] = write
    return write


@form
def with_comfyui_prefix(folder: Path) -> Path:
    state = {f"model.diffusion_model.{name}": value for name, value in load_file(DIT).items()}
    save_file(state, folder / "dit.safetensors")
    return folder / "dit.safetensors"


@form
def as_pth(folder: Path) -> Path:
    torch.save(load_file(DIT), folder / "dit.pth")
    return folder / "dit.pth"


@form
def as_a_folder_of_shards(folder: Path) -> Path:
    load_transformer(DIT).save_pretrained(folder / "pipeline" / "transformer", max_shard_size="2MB")
    (folder / "pipeline" / "model_index.json").write_text('{"transformer": ["diffusers", "WanTransformer3DModel"]}')
    assert len(list((folder / "pipeline" / "transformer").glob("*.safetensors"))) > 1
    return folder / "pipeline"


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_checkpoint_becomes_one_file_in_either_layout(tmp_path: Path, name: str):
    dit = FORMS[name](tmp_path)
    same(load_file(export(dit, tmp_path / "original.safetensors", "original")), load_file(DIT))
    file = export(dit, tmp_path / "diffusers.safetensors", "diffusers")
    same(load_file(file), load_transformer(DIT).state_dict())
    assert not (tmp_path / "config.json").exists()
    same(load_transformer(file).state_dict(), load_transformer(DIT).state_dict())


def test_numbers_are_rounded_once_to_the_dtype(tmp_path: Path):
    state = {name: value.float() * 1.001 for name, value in load_file(DIT).items()}
    save_file(state, tmp_path / "dit.safetensors")
    folder = export(tmp_path / "dit.safetensors", tmp_path / "transformer", "diffusers", "--dtype", "bf16")
    back = export(folder, tmp_path / "back.safetensors", "original")
    same(load_file(back), {name: value.bfloat16() for name, value in state.items()})
    eight = export(folder, tmp_path / "fp8.safetensors", "original", "--dtype", "fp8_scaled")
    found = load_file(eight)
    assert found["blocks.0.self_attn.q.weight"].dtype == torch.float8_e4m3fn
    assert found.keys() - state.keys() > {"scaled_fp8", "blocks.0.self_attn.q.scale_weight"}
    load_transformer(eight)


def in_8_bits(folder: Path) -> tuple[Path, Tensors]:
    """The fixture with one matrix in 8 bits as ComfyUI writes it, and the weights that it stands for."""
    name, scale = "blocks.0.ffn.0", torch.tensor(0.01)
    state = load_file(DIT)
    stored = (state[f"{name}.weight"].float() / scale).to(torch.float8_e4m3fn)
    meant = state | {f"{name}.weight": (stored.float() * scale).bfloat16()}
    state |= {f"{name}.weight": stored, f"{name}.weight_scale": scale}
    told = {"_quantization_metadata": json.dumps({"layers": {name: {"format": "float8_e4m3fn"}}}), "author": "me"}
    safetensors_file.write(folder / "fp8.safetensors", state, told)
    return folder / "fp8.safetensors", meant


def test_8_bit_weights_are_dequantised_where_a_dtype_is_given(tmp_path: Path, capsys):
    dit, meant = in_8_bits(tmp_path)
    before = sorted(tmp_path.iterdir())
    said = refused(capsys, "--dit", dit, "--layout", "diffusers", "--save_path", tmp_path / "transformer")
    assert "blocks.0.ffn.0.weight is quantised" in said
    assert "--dtype bfloat16" in said
    assert sorted(tmp_path.iterdir()) == before
    folder = export(dit, tmp_path / "transformer", "diffusers", "--dtype", "bfloat16")
    back = export(folder, tmp_path / "back.safetensors", "original")
    same(load_file(back), meant)
    assert metadata_of(back).keys() == {"format", "author", "wangen.converted"}, "nothing says 8 bits any more"


def test_plain_numbers_of_gguf_stay_and_its_blocks_need_a_dtype(tmp_path: Path, capsys):
    plain, blocks = tmp_path / "plain.gguf", tmp_path / "blocks.gguf"
    meant = write_gguf(plain, DIT, gguf.GGMLQuantizationType.F32)
    same(load_file(export(plain, tmp_path / "plain.safetensors", "original")), meant)
    meant = write_gguf(blocks, DIT, gguf.GGMLQuantizationType.Q8_0)
    out = tmp_path / "blocks.safetensors"
    assert "is quantised" in refused(capsys, "--dit", blocks, "--layout", "original", "--save_path", out)
    same(load_file(export(blocks, out, "original", "--dtype", "float32")), meant)


def test_a_lora_may_be_merged_on_the_way(tmp_path: Path):
    words = ["--lora_weight", str(LORAS["t2v21"]), "--lora_multiplier", "0.5"]
    folder = export(DIT, tmp_path / "transformer", "diffusers", *words)
    assert main(["export", "--dit", str(DIT), "--save_path", str(tmp_path / "plain.safetensors"), *words]) == 0
    back = export(folder, tmp_path / "back.safetensors", "original")
    same(load_file(back), load_file(tmp_path / "plain.safetensors"))
    assert (
        metadata_of(folder / WEIGHTS)["wangen.merged"] == metadata_of(tmp_path / "plain.safetensors")["wangen.merged"]
    )


@pytest.mark.parametrize("more", [(), ("--lora_weight", str(LORAS["t2v21"]))])
def test_comfyui_that_is_asked_for_is_the_official_names(tmp_path: Path, more: tuple[str, ...]):
    folder = export(DIT, tmp_path / "transformer", "diffusers")
    meant = load_file(export(folder, tmp_path / "original.safetensors", "original", *more))
    same(load_file(export(folder, tmp_path / "comfyui.safetensors", "comfyui", *more)), meant)
    assert "blocks.0.self_attn.q.weight" in meant


def test_no_more_than_one_tensor_is_in_memory(tmp_path: Path, monkeypatch):
    alive: list[weakref.ref[torch.Tensor]] = []
    most, made, real = 0, 0, merging.read_tensor

    def counting(*words: object) -> torch.Tensor:
        nonlocal most, made
        alive[:] = [ref for ref in alive if ref() is not None]
        most, made = max(most, len(alive)), made + 1
        tensor = real(*words)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(merging, "read_tensor", counting)
    export(DIT, tmp_path / "transformer", "diffusers")
    assert made == len(load_file(DIT))
    assert most <= 1


# ---- Qwen-Image --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("clean", [False, True])
def test_a_qwen_image_goes_to_diffusers_and_back_and_stays_a_2511(tiny_qwen: TinyQwen, tmp_path: Path, clean: bool):
    dit = tmp_path / "comfyui" / "dit.safetensors"
    dit.parent.mkdir()
    marker = {f"model.diffusion_model.{MARKER}": torch.zeros(0)} if clean else {}
    save_file(load_file(tiny_qwen.single["dit"]) | marker, dit)
    folder = export(dit, tmp_path / "transformer", "diffusers")
    assert {path.name for path in folder.iterdir()} == {WEIGHTS, "config.json"}
    theirs, meant = loaded(QwenImageTransformer2DModel, folder), make_transformer(zero_cond_t=clean)
    assert theirs.config["zero_cond_t"] is clean
    same(load_file(folder / WEIGHTS), meant.state_dict())
    assert (folder / "config.json").read_text() == meant.to_json_string()
    models = theirs, qwen.load_transformer(dit), qwen.load_transformer(folder)
    draw = torch.Generator().manual_seed(0)
    latents, text = torch.randn(1, 16, 1, 4, 6, generator=draw), torch.randn(5, 256, generator=draw)
    with torch.no_grad():
        outputs = [
            qwen_image_edit.predict_velocity(model, latents, torch.tensor([700.0]), [text], controls=[[latents[0]]])
            for model in models
        ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    bare = {name.removeprefix("model.diffusion_model."): value for name, value in load_file(dit).items()}
    for source, layout in ((folder, "original"), (dit, "original"), (dit, "diffusers"), (folder, "diffusers")):
        same(load_file(export(source, tmp_path / "back.safetensors", layout)), bare)
        assert (MARKER in bare) == clean == qwen.load_transformer(tmp_path / "back.safetensors").config.zero_cond_t


# ---- what is refused, and what is replaced -------------------------------------------------------------------------


def test_what_export_made_is_replaced_and_what_a_killed_one_left_is_finished(tmp_path: Path):
    folder = export(DIT, tmp_path / "transformer", "diffusers")
    first = (folder / WEIGHTS).read_bytes()
    export(DIT, folder, "diffusers", "--dtype", "float32")
    assert (folder / WEIGHTS).read_bytes() != first
    (folder / WEIGHTS).unlink()
    export(DIT, folder, "diffusers")
    assert (folder / WEIGHTS).read_bytes() == first


@pytest.mark.parametrize("there", ["weights", "configuration"])
def test_another_model_in_the_folder_is_replaced_only_when_that_is_said(tmp_path: Path, capsys, there: str):
    folder = tmp_path / "transformer"
    folder.mkdir()
    if there == "weights":
        shutil.copy(DIT, folder / WEIGHTS)
    else:
        (folder / "config.json").write_text('{"mine": true}')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    words = ["--dit", str(DITS["dit_i2v21"]), "--layout", "diffusers", "--save_path", str(folder)]
    said = refused(capsys, *words)
    assert {"weights": "a Wan text-to-video transformer", "configuration": "configuration of another model"}[
        there
    ] in said
    assert "--overwrite" in said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert main(["export", *words, "--overwrite"]) == 0
    wan_of_diffusers(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [(f"{WEIGHTS}.index.json", "an index of shards"), ("model_index.json", "a whole pipeline")],
)
def test_a_folder_in_which_the_new_file_would_not_be_read_is_refused(tmp_path: Path, capsys, name: str, words: str):
    (tmp_path / name).write_text("{}")
    said = refused(capsys, "--dit", DIT, "--layout", "diffusers", "--save_path", tmp_path, "--overwrite")
    assert words in said
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_file_that_is_read_stays(tmp_path: Path, capsys):
    folder = export(DIT, tmp_path / "transformer", "diffusers")
    before = (folder / WEIGHTS).read_bytes()
    said = refused(capsys, "--dit", folder, "--layout", "diffusers", "--save_path", folder, "--overwrite")
    assert "--save_path is the file that is read" in said
    assert (folder / WEIGHTS).read_bytes() == before


@pytest.mark.parametrize("more", [[], ["--dtype", "bfloat16"]])
def test_whole_numbers_are_no_weights_to_add_to(tmp_path: Path, capsys, more: list[str]):
    tensors, name = load_file(DIT), "blocks.0.self_attn.q.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, whole := tmp_path / "whole.safetensors")
    lora, out = LORAS["t2v21"], tmp_path / "out.safetensors"
    said = refused(capsys, "--dit", whole, "--lora_weight", lora, "--save_path", out, *more)
    assert f"{name} is stored as I8, whole numbers whose scale nothing says" in said
    assert not out.exists()


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1000))
    said = refused(capsys, "--dit", DIT, "--layout", "diffusers", "--save_path", tmp_path / "transformer")
    assert "the new file takes 6.3 MB and 1.0 kB are free" in said
    assert not list((tmp_path / "transformer").iterdir())


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path, capsys):
    state = load_file(DIT)
    del state["blocks.1.ffn.2.weight"]
    save_file(state, tmp_path / "dit.safetensors")
    said = refused(
        capsys, "--dit", tmp_path / "dit.safetensors", "--layout", "diffusers", "--save_path", tmp_path / "x"
    )
    assert "1 missing (blocks.1.ffn.net.2.weight)" in said
    assert not (tmp_path / "x").exists()


VACE = {"vace_patch_embedding.weight": torch.ones(256, 96, 1, 2, 2), "vace_blocks.0.before_proj.bias": torch.ones(3)}
LORA = ("--lora_weight", LORAS["t2v21"])


@pytest.mark.parametrize(
    ("out", "words", "told"),
    [
        ("x", (), "--layout original or diffusers"),
        ("x", ("--layout", "kohya"), "one layout, original or diffusers"),
        ("x", ("--layout", "original", "diffusers"), "one layout, original or diffusers"),
        ("x", ("--layout", "kohya", *LORA), "one layout, original or diffusers"),
        ("x", ("--layout", "original"), "must end in .safetensors"),
        ("x.pth", ("--layout", "diffusers"), "or with --layout diffusers a folder"),
        ("x", ("--layout", "diffusers", "--dtype", "fp8_scaled"), "no transformer in 8 bits"),
        ("x", ("--layout", "diffusers", "--lora_multiplier", "2"), "0 --lora_weight and 1 --lora_multiplier"),
    ],
)
def test_flags_that_contradict_each_other_are_said(tmp_path: Path, capsys, out: str, words: tuple, told: str):
    assert told in refused(capsys, "--dit", DIT, "--save_path", tmp_path / out, *words)
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_said_with_what_it_is_for(capsys):
    said = refused(capsys, "--dit", DIT, "--layout", "diffusers")
    assert "export needs --save_path" in said
    assert "merge" not in said
    assert "a LoRA to merge, or --layout original or diffusers" in refused(capsys, "--dit", DIT)


def test_a_lora_and_relatives_of_wan_have_no_such_layout(tmp_path: Path, capsys):
    out = tmp_path / "x.safetensors"
    assert "is for whole transformers" in refused(capsys, *LORA, "--layout", "original", "--save_path", out)
    save_file(load_file(DIT) | VACE, tmp_path / "vace.safetensors")
    said = refused(capsys, "--dit", tmp_path / "vace.safetensors", "--layout", "diffusers", "--save_path", out)
    assert "VACE" in said
    assert not out.exists()
