"""Bytes and single numbers of weight files, read without torch."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wangen.generator.errors import WangenError
from wangen.generator.formats.raw import read_raw, read_scalar
from wangen.generator.headers import read_header

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)


@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE])
def test_a_number_is_what_torch_reads(tmp_path: Path, dtype: torch.dtype):
    numbers = [torch.tensor(number, dtype=dtype) for number in (0, 1, -2, 16, 100, 3.0)]
    if dtype.itemsize == 1 and dtype.is_floating_point:
        numbers = list(torch.arange(256, dtype=torch.uint8).view(dtype))  # each there is
    save_file({f"{index:03}": number.clone() for index, number in enumerate(numbers)}, tmp_path / "a.safetensors")
    infos = read_header(tmp_path / "a.safetensors").tensors
    for index, number in enumerate(numbers):
        found, wanted = read_scalar(infos[f"{index:03}"]), float(number)
        assert found == wanted or (math.isnan(found) and math.isnan(wanted)), index


@pytest.mark.parametrize("tensor", [torch.ones(2), torch.ones(0), torch.tensor(True), torch.tensor(1 + 1j)])
def test_what_is_no_single_number_is_refused(tmp_path: Path, tensor: torch.Tensor):
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    with pytest.raises(WangenError, match="where one number is due"):
        read_scalar(read_header(tmp_path / "a.safetensors").tensors["a"])


def test_a_file_that_was_cut_or_removed_since_is_named(tmp_path: Path):
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(4, dtype=torch.uint8)}, file)
    info = read_header(file).tensors["a"]
    assert read_raw(info) == bytes(range(4))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WangenError, match="cut short") as error:
        read_raw(info)
    assert error.value.where == str(file)
    file.unlink()
    with pytest.raises(WangenError, match="cannot be read"):
        read_raw(info)
