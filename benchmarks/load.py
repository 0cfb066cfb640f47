"""How long a 2 GB transformer takes to load, against plain reading with the safetensors library: interleaved, one run.

python benchmarks/load.py [FOLDER]

The library maps its file, so that its tensors are touched here: reading that is put off is not reading. Each run is a
process of its own, so that its peak of memory is its own.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tiny_weights import TinySizes, transformer_shapes

LIBRARY = """
from safetensors.torch import load_file
state = load_file(PATH)
state = {name: value.to(DTYPE) if DTYPE else value.clone() for name, value in state.items()}
"""
OURS = """
from pathlib import Path
from wangen.runtime.weights.transformer import load_transformer
model = load_transformer(Path(PATH), dtype=DTYPE)
"""
DIFFUSERS = """
import diffusers
model = diffusers.WanTransformer3DModel.from_pretrained(FOLDER, torch_dtype=DTYPE or torch.bfloat16)
for parameter in model.parameters():
    parameter.data = parameter.data.clone()
"""
MEASURE = """
import json, resource, time, torch
import diffusers, transformers, wangen.runtime.weights, safetensors.torch
def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
open("/proc/self/clear_refs", "w").write("5")
before, started = kilobytes("VmRSS"), time.perf_counter()
{body}
seconds = time.perf_counter() - started
print(json.dumps([seconds, (kilobytes("VmHWM") - before) / 1e6]))
"""


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        _compare(Path(folder))


def _compare(folder: Path) -> None:
    path = folder / "model.safetensors"
    state = _weights()
    save_file(state, path)
    torch.save(state, folder / "model.pth")
    del state
    _as_diffusers(path, folder / "diffusers")
    runs = {
        "safetensors library": (LIBRARY, path, "None"),
        "wangen, .safetensors": (OURS, path, "None"),
        "wangen, .pth": (OURS, folder / "model.pth", "None"),
        "diffusers' own folder": (DIFFUSERS, folder / "diffusers", "None"),
        "safetensors library, to fp16": (LIBRARY, path, "torch.float16"),
        "wangen, to fp16": (OURS, path, "torch.float16"),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(5):
        for name, (body, file, dtype) in runs.items():
            body = body.replace("PATH", repr(str(file))).replace("FOLDER", repr(str(file))).replace("DTYPE", dtype)
            code = MEASURE.format(body=body)
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            found[name].append(tuple(json.loads(done.stdout.splitlines()[-1])))
    size = path.stat().st_size / 1e9
    bare = min(seconds for seconds, _ in found["safetensors library"])
    print(f"{size:.2f} GB in bfloat16; time (minimum and median of 5) and growth of the process")
    for name, values in found.items():
        low, middle = min(v[0] for v in values), statistics.median(v[0] for v in values)
        peak = max(v[1] for v in values)
        print(f"{name:30} {low:5.2f} s {middle:5.2f} s  {low / bare:5.2f} x  {peak:5.2f} GB ({peak / size:.2f} x file)")


def _weights() -> dict[str, torch.Tensor]:
    """One billion weights in bfloat16; a block of a mebibyte over and over, for speed."""
    block = torch.randint(-(2**14), 2**14, (2**20,), dtype=torch.int16).view(torch.bfloat16)
    shapes = transformer_shapes(TinySizes(dim=2048, ffn_dim=8192, num_layers=14, text_dim=4096))
    return {
        name: block.repeat(math.prod(v) // 2**20 + 1)[: math.prod(v)].reshape(v).clone() for name, v in shapes.items()
    }


def _as_diffusers(path: Path, folder: Path) -> None:
    from wangen.runtime.weights.transformer import load_transformer

    load_transformer(path).save_pretrained(folder)


if __name__ == "__main__":
    main()
