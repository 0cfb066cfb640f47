import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import DIT, VAE21
from safetensors.torch import load_file, save_file
from tiny_weights import TinySizes, transformer_shapes

from wangen.generator.errors import WangenError
from wangen.generator.headers import read_header
from wangen.runtime.weights import reading
from wangen.runtime.weights.reading import read_tensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("path", [DIT, VAE21])
def test_every_tensor_is_what_the_library_reads(path: Path):
    wanted = load_file(path) if path == DIT else torch.load(path, weights_only=True)
    found = read_header(path).tensors
    assert found.keys() == wanted.keys()
    assert all(torch.equal(read_tensor(info), wanted[name]) for name, info in found.items())


@pytest.mark.parametrize("form", ["safetensors", "pth"])
@pytest.mark.parametrize("buffer_bytes", [64, 2**24])
def test_every_dtype_is_read_and_converted_through_any_buffer(
    tmp_path: Path, monkeypatch, form: str, buffer_bytes: int
):
    monkeypatch.setattr(reading, "BUFFER_BYTES", buffer_bytes)
    numbers = torch.randn(7, 33, generator=torch.Generator().manual_seed(1))
    tensors = {str(dtype): numbers.to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "ids": torch.arange(5),
        "yes": torch.ones(2) > 0,
    }
    path = tmp_path / f"model.{form}"
    save_file(tensors, path) if form == "safetensors" else torch.save(tensors, path)
    for name, info in read_header(path).tensors.items():
        assert torch.equal(read_tensor(info).float(), tensors[name].float())
        assert read_tensor(info).dtype == tensors[name].dtype
        assert torch.equal(read_tensor(info, torch.bfloat16), tensors[name].to(torch.bfloat16))
        assert read_tensor(info, device="meta").shape == tensors[name].shape


def test_views_into_shared_storages_are_read_as_they_are_seen(tmp_path: Path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"whole": base, "turned": base.T, "part": base[1:3, 2:5], "every_other": base[::2], "scalar": base[3, 5]}
    torch.save(tensors, tmp_path / "model.pth")
    for name, info in read_header(tmp_path / "model.pth").tensors.items():
        assert torch.equal(read_tensor(info), tensors[name])
        assert read_tensor(info).is_contiguous()


def test_a_file_that_shrinks_after_its_header_was_read_is_named(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    info = read_header(path).tensors["a"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WangenError, match="ends 100 bytes early") as caught:
        read_tensor(info)
    assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(WangenError, match="cannot be read"):
        read_tensor(info)


def test_a_form_without_numbers_is_refused():
    info = read_header(DIT).tensors["head.head.bias"]
    with pytest.raises(WangenError, match="F8_E8M0"):
        read_tensor(replace(info, dtype="F8_E8M0"))


MEASURE = """
import sys, torch
from pathlib import Path
from wangen.runtime.weights.transformer import load_transformer
def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
before = kilobytes("VmRSS")
model = load_transformer(Path(sys.argv[1]), dtype=getattr(torch, sys.argv[2]) if sys.argv[2] else None)
print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.fixture(scope="module")
def two_gigabytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model of 2 GB in bfloat16, as .safetensors, .pth, and in 8 bits."""
    folder = tmp_path_factory.mktemp("big")
    sizes = TinySizes(dim=2048, ffn_dim=8192, num_layers=14, text_dim=4096)
    block = torch.randint(-(2**14), 2**14, (2**20,), dtype=torch.int16).view(torch.bfloat16)  # no NaN among them
    shapes = transformer_shapes(sizes)
    state = {
        name: block.repeat(math.prod(v) // 2**20 + 1)[: math.prod(v)].reshape(v).clone() for name, v in shapes.items()
    }
    save_file(state, folder / "model.safetensors")
    torch.save(state, folder / "model.pth")
    small = {name: v.to(torch.float8_e4m3fn) if v.ndim == 2 and "blocks" in name else v for name, v in state.items()}
    save_file(small, folder / "fp8.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("model.safetensors", ""), ("model.safetensors", "float16"), ("model.pth", ""), ("model.pth", "float16"),
     ("fp8.safetensors", "bfloat16")],
)  # fmt: skip
def test_loading_takes_no_more_memory_than_the_file_is_long(two_gigabytes: Path, name: str, dtype: str):
    path = two_gigabytes / name
    grown = int(subprocess.run([sys.executable, "-c", MEASURE, str(path), dtype], capture_output=True, text=True,
                               check=True).stdout)  # fmt: skip
    size = path.stat().st_size
    assert size * 0.9 < grown < size * 1.15
