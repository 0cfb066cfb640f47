"""Merging holds a tensor, not a model."""

import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loras import LORAS
from parity import DITS
from safetensors.torch import save_file

from wangen.generator.errors import WangenError
from wangen.generator.headers import read_header
from wangen.runtime import merge as merging
from wangen.runtime import safetensors_file
from wangen.runtime.lora import LoraWeight, read_lora
from wangen.runtime.merge import Source
from wangen.runtime.safetensors_file import Later


def test_no_more_than_one_tensor_is_made_at_a_time(tmp_path: Path, monkeypatch):
    """Every tensor of the file is let go before the next one is read."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    real = merging.read_weight

    def counting(*words: object) -> torch.Tensor:
        nonlocal most
        alive[:] = [ref for ref in alive if ref() is not None]
        most = max(most, len(alive))
        made = real(*words)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(merging, "read_weight", counting)
    source = Source(Path("a.safetensors"), "0" * 64, read_lora(LORAS["t2v21"]), 1.0)
    merging.merge(DITS["dit_t2v21"], [source], tmp_path / "merged.safetensors", "float32")
    assert len(alive) == 1, "the counting works"
    assert most <= 1


def write_large(path: Path, num_bytes: int) -> None:
    """A checkpoint in the original names with random bfloat16 weights, written without holding it."""
    dim, ffn = 2048, 8192
    shapes = {"patch_embedding.weight": (dim, 16, 1, 2, 2), "head.head.weight": (64, dim),
              "text_embedding.0.weight": (dim, 4096), "time_embedding.0.weight": (dim, 256)}  # fmt: skip
    block = {f"{part}.{one}.weight": (dim, dim) for part in ("self_attn", "cross_attn") for one in "qkvo"}
    block |= {"ffn.0.weight": (ffn, dim), "ffn.2.weight": (dim, ffn)}
    per_block = 2 * sum(a * b for a, b in block.values())
    for number in range(max(1, num_bytes // per_block)):
        shapes |= {f"blocks.{number}.{name}": shape for name, shape in block.items()}
    tensors = {
        name: Later(torch.bfloat16, shape, lambda shape=shape: torch.randn(shape, dtype=torch.bfloat16) * 0.02)
        for name, shape in shapes.items()
    }
    safetensors_file.write(path, tensors, {"format": "pt"})


MEASURE = """
import sys
from pathlib import Path
import torch, wangen.runtime.export, wangen.runtime.merge
from wangen.generator.cli import main
torch.randn(64, 64) @ torch.randn(64, 64)

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

Path("/proc/self/clear_refs").write_text("5")  # the peak so far, which importing made, is forgotten
before = status("VmRSS")
code = main(sys.argv[1:])
print("GREW", status("VmHWM") - before)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("dtype", [None, "float8_e4m3fn", "fp8_scaled"])
def test_merging_a_gigabyte_takes_the_memory_of_a_few_tensors(tmp_path: Path, dtype: str | None):
    write_large(tmp_path / "dit.safetensors", 10**9)
    size = (tmp_path / "dit.safetensors").stat().st_size
    assert size > 0.9e9
    lora = {}
    for name, info in read_header(tmp_path / "dit.safetensors").tensors.items():
        if name.startswith("blocks."):
            out, into = info.shape
            lora[name.removesuffix(".weight")] = (torch.randn(out, 16), torch.randn(16, into))
    tensors = {f"diffusion_model.{name}.lora_A.weight": down for name, (_, down) in lora.items()}
    tensors |= {f"diffusion_model.{name}.lora_B.weight": up for name, (up, _) in lora.items()}
    save_file(tensors, tmp_path / "lora.safetensors")
    words = ["export", "--dit", tmp_path / "dit.safetensors", "--lora_weight", tmp_path / "lora.safetensors",
             "--save_path", tmp_path / "merged.safetensors", *(["--dtype", dtype] if dtype else [])]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", MEASURE, *map(str, words)], capture_output=True, text=True, check=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    grew = int(re.search(r"GREW (\d+)", done.stdout)[1])
    largest = 2048 * 8192 * 4
    print(f"{dtype}: file {size / 2**20:.0f} MiB, peak grew by {grew / 2**20:.0f} MiB, "  # noqa: T201
          f"largest tensor in float32 {largest / 2**20:.0f} MiB")  # fmt: skip
    lora_bytes = (tmp_path / "lora.safetensors").stat().st_size
    assert grew < 3 * largest + 2 * lora_bytes


@pytest.mark.parametrize("strength", [1e39, -1e39])
def test_a_strength_that_no_number_holds_is_refused_whichever_way_it_goes(strength: float):
    lora = {"blocks.0.attn1.to_q": LoraWeight(torch.ones(1, 2), torch.ones(2, 1), 1.0)}
    contents = SimpleNamespace(weights={"blocks.0.self_attn.q.weight": SimpleNamespace(shape=(2, 2), dtype="F32")})
    with pytest.raises(WangenError, match="is too large"):
        merging._changes(contents, [Source(Path("a"), "", lora, strength)])  # type: ignore[arg-type]
