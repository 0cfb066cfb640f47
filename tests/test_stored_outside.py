"""Weights that a file stores in few bits where it seldom does: outside the blocks, and not row by row."""

from pathlib import Path

import fast_dit
import pytest
import test_qwen_fast
import torch
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from parity import DIT, rel_rms
from safetensors.torch import load_file, save_file
from tiny_qwen import make_transformer

from wangen.generator.errors import WangenError
from wangen.generator.formats.pth import read_pth
from wangen.generator.formats.raw import read_raw
from wangen.runtime.models.qwen_image_edit.transformer import load_transformer as load_qwen
from wangen.runtime.weights.quantized import QuantizedLinear, read_coded, read_weight
from wangen.runtime.weights.reading import read_bytes
from wangen.runtime.weights.transformer import load_transformer

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def wan_matrices() -> list[str]:
    return [name for name, value in load_file(DIT).items() if value.ndim == 2 and not name.startswith("blocks.")]


def written(folder: Path, state: dict[str, torch.Tensor], names: list[str]) -> tuple[Path, Path]:
    """A model with these matrices in 8-bit floats, and one of the same values."""
    few, same = folder / "few.safetensors", folder / "same.safetensors"
    stored = {name: state[name].to(torch.float8_e4m3fn) for name in names}
    save_file(state | stored, few)
    save_file(state | {name: value.to(state[name].dtype) for name, value in stored.items()}, same)
    return few, same


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("names", [*([name] for name in wan_matrices()), wan_matrices()], ids=len)
def test_wans_outer_layers_in_few_bits_are_what_they_stand_for(tmp_path: Path, names: list[str], dtype: torch.dtype):
    few, same = (load_transformer(path, dtype=dtype) for path in written(tmp_path, load_file(DIT), names))
    assert sum(isinstance(module, QuantizedLinear) for module in few.modules()) == len(names)
    inputs = fast_dit.inputs_of("dit_t2v21")
    with torch.no_grad():
        found, wanted = (inputs(fast_dit.fast(model)) for model in (few, same))
    assert rel_rms(found, wanted) < BOUNDS[dtype]


QWEN = ["img_in", "txt_in", "time_text_embed.timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_2",
        "norm_out.linear", "proj_out"]  # fmt: skip


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("names", [*([name] for name in QWEN), QWEN], ids=len)
def test_qwens_outer_layers_in_few_bits_are_what_they_stand_for(tmp_path: Path, names: list[str], dtype: torch.dtype):
    state = {name: value.contiguous() for name, value in make_transformer().state_dict().items()}
    files = written(tmp_path, state, [f"{name}.weight" for name in names])
    few, same = (load_qwen(path, dtype=dtype) for path in files)
    assert sum(isinstance(module, QuantizedLinear) for module in few.modules()) == len(names)
    inputs = test_qwen_fast.inputs_of("mixed")
    with torch.no_grad():
        found, wanted = (inputs(test_qwen_fast.fast(model, dtype=dtype)) for model in (few, same))
    assert rel_rms(found, wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32])
def test_matrices_of_a_pth_that_lie_column_by_column_are_read_row_by_row(tmp_path: Path, dtype: torch.dtype):
    base = torch.arange(-24, 24.0).reshape(6, 8)
    views = {"transposed": base.t(), "every other": base[:, ::2], "turned": base.reshape(2, 3, 8).permute(2, 0, 1)}
    views = {name: torch.empty_like(view, dtype=dtype).copy_(view) for name, view in views.items()}  # keeps the strides
    views["every other"] = base.to(dtype)[:, ::2]
    torch.save(views, tmp_path / "a.pth")
    for name, info in read_pth(tmp_path / "a.pth").tensors.items():
        wanted = views[name].contiguous()
        assert info.place is not None
        assert info.place.strides == views[name].stride()
        assert torch.equal(read_weight(info, None, torch.float32), wanted.float()), name
        numbers = wanted.view(-1).view(torch.uint8)
        assert torch.equal(read_bytes(info), numbers)
        assert read_raw(info) == bytes(numbers.tolist())
        if wanted.element_size() == 1 and wanted.ndim == 2:
            stored, coding = read_coded(info, "cpu")
            assert torch.equal(coding.decode(stored, None, torch.float32), wanted.float())


def test_the_parts_of_a_gguf_are_one_model(tmp_path: Path):
    """Read alone, the first part is a model of fewer blocks."""
    state = load_file(DIT)
    for number, own in enumerate((False, True), start=1):
        part = {name: value for name, value in state.items() if ("blocks.1." in name) is own}
        save_file(part, tmp_path / "part.safetensors")
        write_gguf(tmp_path / f"x-0000{number}-of-00002.gguf", tmp_path / "part.safetensors", GGMLQuantizationType.Q8_0)
    (tmp_path / "part.safetensors").unlink()
    write_gguf(tmp_path / "whole.gguf", DIT, GGMLQuantizationType.Q8_0)
    whole = load_transformer(tmp_path / "whole.gguf", dtype=torch.float32).state_dict()
    (tmp_path / "whole.gguf").unlink()
    for path in (*sorted(tmp_path.iterdir()), tmp_path):
        found = load_transformer(path, dtype=torch.float32).state_dict()
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], value) for name, value in whole.items())
    (tmp_path / "x-00002-of-00002.gguf").unlink()
    for path in (tmp_path, tmp_path / "x-00001-of-00002.gguf"):
        with pytest.raises(WangenError, match=r"1 of 2 shards missing: x-00002-of-00002\.gguf"):
            load_transformer(path)


@pytest.mark.parametrize("ending", ["bin", "pth", "pt"])
def test_one_of_several_pickles_is_not_taken_for_the_whole(tmp_path: Path, ending: str):
    path = tmp_path / f"x-00001-of-00002.{ending}"
    torch.save(load_file(DIT), path)
    with pytest.raises(WangenError, match=rf"several \.{ending} files") as refused:
        load_transformer(path)
    assert "safetensors" in refused.value.cure
    whole = path.rename(tmp_path / f"x-00001-of-00001.{ending}")
    assert torch.equal(load_transformer(whole).scale_shift_table, load_transformer(DIT).scale_shift_table)


SQUARE = "blocks.0.self_attn.q"


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"scale_weight": (1, 256)}, "a scale of shape"),
        ({"scale_weight": (1,), "weight_scale": (1,)}, f"mean the same scale of {SQUARE}.weight"),
    ],
)
def test_scales_of_which_it_is_open_what_they_mean_are_refused(tmp_path: Path, scales, words: str):
    state, path = load_file(DIT), tmp_path / "x.safetensors"
    width = state[f"{SQUARE}.weight"].shape[1]
    more = {
        f"{SQUARE}.{end}": torch.ones([width if size > 1 else size for size in shape]) for end, shape in scales.items()
    }
    save_file(state | {f"{SQUARE}.weight": state[f"{SQUARE}.weight"].to(torch.float8_e4m3fn)} | more, path)
    with pytest.raises(WangenError, match=words) as refused:
        load_transformer(path, dtype=torch.float32)
    assert refused.value.where == str(path)
    assert refused.value.cure


@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_weights_that_are_not_finite_are_named_with_their_file_when_they_are_quantised(tmp_path: Path, mode):
    state, path = load_file(DIT), tmp_path / "x.safetensors"
    state["blocks.1.ffn.2.weight"][3, 5] = torch.nan
    save_file(state, path)
    with pytest.raises(WangenError, match=r"blocks\.1\.ffn\.2\.weight: weights .* are NaN or infinite") as refused:
        load_transformer(path, quantize=mode)
    assert refused.value.where == str(path)
