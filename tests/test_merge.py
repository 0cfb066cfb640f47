"""LoRAs merged into checkpoints of every form that people have."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import write_gguf
from loras import LORAS, apply_lora, every_module, model_of, output, wanted
from parity import DITS, VECTORS, max_abs
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wangen.generator.errors import UsageError, WangenError
from wangen.runtime import safetensors_file
from wangen.runtime.lora import Lora, LoraWeight, read_lora
from wangen.runtime.merge import Source, merge
from wangen.runtime.weights.transformer import load_transformer

T2V, I2V = DITS["dit_t2v21"], DITS["dit_i2v21"]


def source(lora: Lora, multiplier: float = 1.0) -> Source:
    return Source(Path("a.safetensors"), "0" * 64, lora, multiplier)


def merged(dit: Path, out: Path, lora: Lora, multiplier: float = 1.0, dtype: str | None = None) -> dict:
    merge(dit, [source(lora, multiplier)], out, dtype)
    return load_file(out)


def exact(weight: torch.Tensor, part: LoraWeight, multiplier: float = 1.0) -> torch.Tensor:
    """The official sum in float64."""
    change = part.up.double().flatten(1) @ part.down.double().flatten(1)
    return weight.double() + multiplier * part.scale * change.reshape(weight.shape)


@pytest.mark.parametrize(("name", "case"), [("t2v21", 0), ("t2v21", 1), ("i2v21", 0)])
@pytest.mark.parametrize("multiplier", [1.0, 0.6])
def test_a_merged_checkpoint_gives_the_official_output(tmp_path: Path, name: str, case: int, multiplier: float):
    dit, lora = DITS[f"dit_{name}"], read_lora(LORAS[name])
    done = merge(dit, [source(lora, multiplier)], tmp_path / "merged.safetensors", "float32")
    assert (done.num_changed, done.left_out) == (len(lora), ([],))
    model = model_of(name, tmp_path / "merged.safetensors")
    found = output(model, name, case)
    assert max_abs(found, wanted(name, case, multiplier)) < 2e-4
    applied = model_of(name)
    apply_lora(applied, lora, multiplier, name="same")
    assert max_abs(found, output(applied, name, case)) < 2e-5
    assert max_abs(output(model_of(name), name, case), wanted(name, case, 0)) < 2e-4, "the old file is as it was"


@pytest.mark.parametrize("name", LORAS)
def test_modules_outside_the_blocks_and_the_patch_embedding_are_merged_as_they_are_applied(tmp_path: Path, name: str):
    lora = every_module(name, scales=(1.0, 0.5))
    done = merge(DITS[f"dit_{name}"], [source(lora, 0.5)], tmp_path / "merged.safetensors", "float32")
    assert done.num_changed == len(lora)
    applied = model_of(name)
    apply_lora(applied, lora, 0.5, name="same")
    found = output(model_of(name, tmp_path / "merged.safetensors"), name, 0)
    assert max_abs(found, output(applied, name, 0)) < 2e-5
    assert max_abs(found, wanted(name, 0, 0)) > 1e-2


def test_the_sum_is_made_in_float32_and_rounded_once(tmp_path: Path):
    lora = read_lora(LORAS["t2v21"])
    out = merged(T2V, tmp_path / "merged.safetensors", lora, 0.6)
    old = load_file(T2V)
    assert out.keys() == old.keys()
    assert {value.dtype for value in out.values()} == {torch.bfloat16}
    for name, weight in (("self_attn.q", "attn1.to_q"), ("ffn.2", "ffn.net.2")):
        sum_ = exact(old[f"blocks.1.{name}.weight"], lora[f"blocks.1.{weight}"], 0.6)
        half_step = torch.maximum(sum_.abs() * 2**-8, torch.tensor(1e-30))
        assert bool(((out[f"blocks.1.{name}.weight"].double() - sum_).abs() <= half_step * 1.001).all())
    untouched = [key for key in old if not re.search(r"(_attn\.[qkvo]|ffn\.[02])\.weight", key)]
    assert len(untouched) > 20
    assert all(torch.equal(out[key], old[key]) for key in untouched)


@pytest.mark.parametrize("style", ["", "scaled"])
def test_a_lora_at_strength_zero_changes_no_byte_and_is_not_counted(tmp_path: Path, style: str):
    dit = fp8_file(tmp_path, style)[0] if style else T2V
    lora = read_lora(LORAS["t2v21"])
    one = {"blocks.0.attn1.to_q": lora["blocks.0.attn1.to_q"]}
    done = merge(dit, [source(lora, 0.0), source(one)], tmp_path / "merged.safetensors", None)
    old, new = load_file(dit), load_file(tmp_path / "merged.safetensors")
    changed = {
        name
        for name, value in old.items()
        if not torch.equal(value.view(torch.uint8).flatten(), new[name].view(torch.uint8).flatten())
    }
    assert done.num_changed == 1
    assert {name.rsplit(".", 1)[0] for name in changed} == {"blocks.0.self_attn.q"}


def test_a_checkpoint_that_is_damaged_is_said_with_its_file(tmp_path: Path):
    tensors = load_file(T2V)
    tensors["blocks.0.self_attn.q.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "dit.safetensors")
    with pytest.raises(WangenError, match=r"blocks\.0\.self_attn\.q\.weight holds NaN or infinity") as error:
        merged(tmp_path / "dit.safetensors", tmp_path / "merged.safetensors", read_lora(LORAS["t2v21"]))
    assert error.value.where == str(tmp_path / "dit.safetensors")


def test_several_loras_are_added_before_the_one_rounding(tmp_path: Path):
    lora = read_lora(LORAS["t2v21"])
    merge(T2V, [source(lora, 0.35), source(lora, 0.25)], tmp_path / "two.safetensors", None)
    merge(T2V, [source(lora, 0.6)], tmp_path / "one.safetensors", None)
    one, two = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    steps = [max_abs(one[name], two[name]) / float(one[name].float().abs().max()) for name in one]
    assert max(steps) <= 2**-8  # bfloat16's own step, where float32's last digit tipped the rounding
    assert sum(step > 0 for step in steps) < len(steps) / 2


FORMS: dict[str, Callable[[Path], tuple[Path, str]]] = {}
"""Form of a checkpoint -> what writes the fixture in it; returns the path to give and the prefix of its names."""


def form(write: Callable[[Path], tuple[Path, str]]) -> Callable[[Path], tuple[Path, str]]:
    FORMS[write.__name__] = write
    return write


@form
def with_comfyui_prefix(folder: Path) -> tuple[Path, str]:
    tensors = {f"model.diffusion_model.{name}": value for name, value in load_file(T2V).items()}
    save_file(tensors, folder / "dit.safetensors", {"format": "pt", "modelspec.title": "Wan"})
    return folder / "dit.safetensors", "model.diffusion_model."


@form
def as_pth(folder: Path) -> tuple[Path, str]:
    torch.save(load_file(T2V), folder / "dit.pth")
    return folder / "dit.pth", ""


@form
def as_pth_of_transposed_tensors(folder: Path) -> tuple[Path, str]:
    tensors = {name: value.t().contiguous().t() if value.ndim == 2 else value for name, value in load_file(T2V).items()}
    torch.save(tensors, folder / "dit.pth")
    return folder / "dit.pth", ""


@form
def in_shards(folder: Path) -> tuple[Path, str]:
    tensors = load_file(T2V)
    names = sorted(tensors)
    for number in (1, 2):
        part = {name: tensors[name] for name in names[number - 1 :: 2]}
        save_file(part, folder / f"dit-0000{number}-of-00002.safetensors", {"format": "pt"})
    return folder / "dit-00002-of-00002.safetensors", ""


@form
def in_float32(folder: Path) -> tuple[Path, str]:
    save_file({name: value.float() for name, value in load_file(T2V).items()}, folder / "dit.safetensors")
    return folder / "dit.safetensors", ""


@form
def as_gguf_of_plain_numbers(folder: Path) -> tuple[Path, str]:
    write_gguf(folder / "dit.gguf", T2V, gguf.GGMLQuantizationType.F32, lambda *_: False)
    return folder / "dit.gguf", ""


@pytest.mark.parametrize("name", FORMS)
def test_a_checkpoint_of_any_form_is_merged_under_its_own_names(tmp_path: Path, name: str):
    dit, prefix = FORMS[name](tmp_path)
    lora, out = read_lora(LORAS["t2v21"]), tmp_path / "merged.safetensors"
    tensors = merged(dit, out, lora)
    plain = merged(T2V, tmp_path / "plain.safetensors", lora)
    assert set(tensors) == {prefix + key for key in plain}
    for key, value in plain.items():
        assert value.shape == tensors[prefix + key].shape
        if name == "in_float32":
            assert tensors[key].dtype == torch.float32
            assert max_abs(tensors[key].bfloat16(), value) <= 2**-8 * float(value.float().abs().max())
        else:
            assert torch.equal(tensors[prefix + key], value), key
    assert max_abs(output(model_of("t2v21", out), "t2v21", 0), wanted("t2v21", 0, 1.0)) < 0.1
    with safe_open(out, "pt") as opened:
        kept = {"modelspec.title": "Wan"} if prefix else {}
        note = {"wangen.merged": json.dumps([{"lora": "0" * 64, "multiplier": 1.0}])}
        assert opened.metadata() == {"format": "pt", **kept, **note}


def test_a_diffusers_folder_becomes_one_file_in_diffusers_names(tmp_path: Path):
    model = load_transformer(I2V, dtype=torch.float32)
    model.save_pretrained(tmp_path / "folder", max_shard_size="2MB")
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) > 1
    lora = read_lora(LORAS["i2v21"])
    tensors = merged(tmp_path / "folder", tmp_path / "merged.safetensors", lora)
    assert tensors.keys() == model.state_dict().keys()
    loaded = model_of("i2v21", tmp_path / "merged.safetensors")
    assert max_abs(output(loaded, "i2v21", 0), wanted("i2v21", 0, 1.0)) < 2e-4


def fp8_file(folder: Path, style: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """The fixture with the matrices of its blocks in 8 bits, and the weights that it stands for."""
    tensors, meant = {}, {}
    for name, value in load_file(T2V).items():
        stem = name.removesuffix(".weight")
        tensors[name] = meant[name] = value
        if not name.startswith("blocks.") or value.ndim != 2:
            continue
        if style == "plain":
            tensors[name] = value.to(torch.float8_e4m3fn)
            meant[name] = tensors[name].float()
            continue
        rows, dtype = style == "rows", torch.float8_e5m2 if style == "e5m2" else torch.float8_e4m3fn
        largest = value.float().abs().amax(1, keepdim=True) if rows else value.float().abs().amax()
        scale = largest / torch.finfo(dtype).max
        tensors[name] = (value.float() / scale).to(dtype)
        meant[name] = tensors[name].float() * scale
        if style == "comfy_quant":
            tensors[f"{stem}.weight_scale"] = scale
            words = b'{"format": "float8_e4m3fn"}'
            tensors[f"{stem}.comfy_quant"] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        else:
            tensors[f"{stem}.scale_weight"] = scale if rows else scale.reshape(1)
            tensors[f"{stem}.scale_input"] = torch.full((1,), 0.5)
    if style in ("scaled", "e5m2", "rows"):
        tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e5m2 if style == "e5m2" else torch.float8_e4m3fn)
    safetensors_file.write(folder / f"{style}.safetensors", tensors, {})
    return folder / f"{style}.safetensors", meant


@pytest.mark.parametrize("style", ["scaled", "e5m2", "comfy_quant"])
def test_an_fp8_scaled_file_stays_one_with_new_scales(tmp_path: Path, style: str):
    dit, meant = fp8_file(tmp_path, style)
    lora = {name: part for name, part in read_lora(LORAS["t2v21"]).items() if ".attn1." in name}
    old, new = load_file(dit), merged(dit, tmp_path / "merged.safetensors", lora)
    assert {name: (value.dtype, value.shape) for name, value in new.items()} == {
        name: (value.dtype, value.shape) for name, value in old.items()
    }
    end = "weight_scale" if style == "comfy_quant" else "scale_weight"
    largest, half_step = (57344, 2**-3) if style == "e5m2" else (448, 2**-4)
    for name, part in (("self_attn.o", "attn1.to_out.0"), ("self_attn.q", "attn1.to_q")):
        weight, scale = new[f"blocks.0.{name}.weight"].float(), new[f"blocks.0.{name}.{end}"]
        sum_ = exact(meant[f"blocks.0.{name}.weight"], lora[f"blocks.0.{part}"])
        assert float(weight.abs().max()) == largest
        assert not torch.equal(scale, old[f"blocks.0.{name}.{end}"])
        allowed = torch.maximum(sum_.abs() * half_step, scale * 2**-10) * 1.01
        assert bool(((weight * scale - sum_).abs() <= allowed).all())
    touched = re.compile(rf"blocks\.\d\.self_attn\.[qkvo]\.(weight|{end})")
    assert all(torch.equal(new[name].float(), old[name].float()) for name in old if not touched.fullmatch(name))


@pytest.mark.slow
@pytest.mark.parametrize("style", ["plain", "scaled", "e5m2", "comfy_quant", "rows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "fp8_scaled"])
def test_an_8_bit_file_is_dequantised_first(tmp_path: Path, style: str, dtype: str):
    dit, meant = fp8_file(tmp_path, style)
    safetensors_file.write(tmp_path / "meant.safetensors", {k: v.float() for k, v in meant.items()}, {})
    lora = read_lora(LORAS["t2v21"])
    out = merged(dit, tmp_path / "merged.safetensors", lora, dtype=dtype)
    want = merged(tmp_path / "meant.safetensors", tmp_path / "same.safetensors", lora, dtype=dtype)
    assert out.keys() == want.keys()
    for name, value in want.items():
        matrix = name.startswith("blocks.") and value.ndim == 2
        if matrix or dtype in ("float32", "bfloat16", "float16"):
            assert value.dtype == out[name].dtype
            assert torch.equal(out[name].float(), value.float()), name
    assert (dtype == "fp8_scaled") == ("scaled_fp8" in out)
    load_transformer(tmp_path / "merged.safetensors", dtype=torch.float32)


@pytest.mark.parametrize("style", ["plain", "scaled", "rows"])
def test_a_lora_applied_to_an_8_bit_model_is_the_merged_one(tmp_path: Path, style: str):
    dit, _ = fp8_file(tmp_path, style)
    lora = read_lora(LORAS["t2v21"])
    merged(dit, tmp_path / "merged.safetensors", lora, 0.6, "float32")
    model = model_of("t2v21", dit)
    apply_lora(model, lora, 0.6, name="same")
    assert (
        max_abs(output(model, "t2v21", 0), output(model_of("t2v21", tmp_path / "merged.safetensors"), "t2v21", 0))
        < 2e-5
    )


def test_an_fp8_file_without_scales_stays_one(tmp_path: Path):
    dit, _ = fp8_file(tmp_path, "plain")
    new, old = merged(dit, tmp_path / "merged.safetensors", read_lora(LORAS["t2v21"])), load_file(dit)
    assert {name: value.dtype for name, value in new.items()} == {name: value.dtype for name, value in old.items()}


def test_a_file_with_a_scale_per_row_asks_for_a_dtype(tmp_path: Path):
    dit, _ = fp8_file(tmp_path, "rows")
    with pytest.raises(UsageError, match="more than one scale") as error:
        merged(dit, tmp_path / "merged.safetensors", read_lora(LORAS["t2v21"]))
    assert "--dtype bfloat16" in error.value.cure


@pytest.mark.parametrize("case", ["whole numbers", "two scales"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_8_bit_weights_of_other_forms_are_refused_as_loading_does(tmp_path: Path, case: str, dtype: str | None):
    dit, _ = fp8_file(tmp_path, "scaled")
    tensors = load_file(dit)
    if case == "two scales":
        tensors["blocks.0.ffn.0.weight_scale_2"] = torch.ones(1)
    else:
        tensors["blocks.0.ffn.0.weight"] = torch.ones_like(tensors["blocks.0.ffn.0.weight"], dtype=torch.int8)
    save_file(tensors, dit)
    with pytest.raises(WangenError):
        load_transformer(dit)
    with pytest.raises(WangenError, match=r"blocks\.0\.ffn\.0|NVFP4"):
        merged(dit, tmp_path / "merged.safetensors", read_lora(LORAS["t2v21"]), dtype=dtype)
    assert not (tmp_path / "merged.safetensors").exists()


def test_fp8_scaled_is_comfyuis_form_and_close(tmp_path: Path):
    lora, out = read_lora(LORAS["t2v21"]), tmp_path / "merged.safetensors"
    dit, prefix = with_comfyui_prefix(tmp_path)
    tensors = merged(dit, out, lora, dtype="fp8_scaled")
    marker = tensors[f"{prefix}scaled_fp8"]
    assert (marker.dtype, tuple(marker.shape)) == (torch.float8_e4m3fn, (2,))
    matrices = [name for name, value in tensors.items() if value.dtype == torch.float8_e4m3fn and value.ndim == 2]
    assert len(matrices) == 20
    scales = {name for name in tensors if name.endswith(".scale_weight")}
    assert scales == {name.removesuffix(".weight") + ".scale_weight" for name in matrices}
    assert {(tensors[name].dtype, tensors[name].shape) for name in scales} == {(torch.float32, ())}
    assert {value.dtype for name, value in tensors.items() if name not in matrices and name not in scales} == {
        torch.bfloat16, torch.float8_e4m3fn}  # fmt: skip
    plain = merged(dit, tmp_path / "plain.safetensors", lora, dtype="float8_e4m3fn")
    truth = wanted("t2v21", 0, 1.0)
    errors = [
        float((output(model_of("t2v21", path), "t2v21", 0) - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt())
        for path in (out, tmp_path / "plain.safetensors")
    ]
    assert plain.keys() == tensors.keys() - scales - {f"{prefix}scaled_fp8"}
    assert errors[0] < 0.1
    assert errors[0] <= errors[1] * 1.5


def test_gguf_blocks_are_dequantised(tmp_path: Path):
    meant = write_gguf(tmp_path / "dit.gguf", T2V, gguf.GGMLQuantizationType.Q8_0,
                       lambda name, value: name.startswith("blocks.") and value.dim() == 2)  # fmt: skip
    save_file(meant, tmp_path / "meant.safetensors")
    lora = read_lora(LORAS["t2v21"])
    for dtype, same in ((None, "bfloat16"), ("float32", "float32"), ("fp8_scaled", "fp8_scaled")):
        out = merged(tmp_path / "dit.gguf", tmp_path / "out.safetensors", lora, dtype=dtype)
        want = merged(tmp_path / "meant.safetensors", tmp_path / "want.safetensors", lora, dtype=same)
        assert out.keys() == want.keys()
        assert all(torch.equal(out[name].float(), want[name].float()) for name in want)


def test_relatives_of_the_transformers_keep_their_own_tensors(tmp_path: Path):
    extra = {
        "vace_patch_embedding.weight": torch.ones(256, 96, 1, 2, 2),
        "vace_blocks.0.before_proj.bias": torch.ones(3),
    }
    save_file({**load_file(T2V), **extra}, tmp_path / "vace.safetensors")
    tensors = merged(tmp_path / "vace.safetensors", tmp_path / "merged.safetensors", read_lora(LORAS["t2v21"]))
    plain = merged(T2V, tmp_path / "plain.safetensors", read_lora(LORAS["t2v21"]))
    assert tensors.keys() == plain.keys() | extra.keys()
    assert all(torch.equal(tensors[name], value) for name, value in (plain | extra).items())


def test_modules_that_the_checkpoint_lacks_are_named(tmp_path: Path):
    lora = {
        **read_lora(LORAS["t2v21"]),
        "blocks.0.attn2.add_k_proj": LoraWeight(torch.ones(2, 256), torch.ones(256, 2), 2),
    }
    done = merge(T2V, [source(lora)], tmp_path / "merged.safetensors", None)
    assert done.left_out == (["blocks.0.attn2.add_k_proj"],)
    assert done.num_changed == 20


@pytest.mark.parametrize("case", ["nothing", "one of two", "size", "dit", "disk", "itself", "strength", "range"])
def test_what_cannot_be_merged_is_said_before_anything_is_written(tmp_path: Path, monkeypatch, case: str):
    lora = read_lora(LORAS["t2v21"])
    dit, sources, dtype, words = T2V, [source(lora)], None, ""
    out = tmp_path / "merged.safetensors"
    if case in ("nothing", "one of two"):
        other = source({"blocks.99.attn1.to_q": LoraWeight(torch.ones(2, 256), torch.ones(256, 2), 2.0)})
        sources = [*(sources if case == "one of two" else []), other]
        words = r"nothing in this LoRA matches.*blocks\.99"
    elif case == "size":
        sources, words = [source(read_lora(LORAS["i2v21"]))], "for a model of another size: .*128x128.*256x256"
    elif case == "dit":
        dit, words = VECTORS / "vae21" / "Wan2.1_VAE.pth", "this is a Wan 2.1 VAE; --dit takes a Wan transformer"
    elif case == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1000))
        words = r"the new file takes \d+\.\d MB and 1\.0 kB are free"
    elif case == "itself":
        dit = out = Path(shutil.copy(T2V, tmp_path))
        words = "--save_path is the file that is read"
    elif case == "strength":
        sources, words = [source(lora, 1e39)], r"strength 1e\+39 times alpha / rank of blocks\.0.* is too large"
    else:
        wide = {"blocks.0.attn1.to_q": LoraWeight(torch.full((1, 256), 300.0), torch.full((256, 1), 300.0), 1.0)}
        sources, dtype, words = [source(wide)], "float16", "numbers that float16 cannot hold"
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(WangenError, match=words):
        merge(dit, sources, out, dtype)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
