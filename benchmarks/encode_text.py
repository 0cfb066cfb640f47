"""Sixteen ordinary captions through the streamed umT5 encoder, against a plain padded loop of transformers: one run.

python benchmarks/encode_text.py [FOLDER] [--full]

Weights of the real sizes, random. The plain loop holds its model in memory and gets each caption padded to 512 tokens
with a mask, as the official code does; its time is without loading, ours is with reading every weight. As 24 blocks
in float32 do not fit into this machine's memory for the plain loop, both sides get NUM_BLOCKS blocks. `--full` also
encodes with a file of all 24 blocks and the whole vocabulary (11.4 GB in FOLDER), for its peak of memory.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import UMT5EncoderModel

    from wangen.runtime.fast.umt5 import PromptEncoder

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import published
from parity import rel_rms
from tiny_weights import write_tokenizer

from wangen.generator.formats.strict_json import parse_json

NUM_BLOCKS = 2
VOCABULARY = 256384
ROUNDS = 3
LENGTHS = (9, 14, 22, 30, 38, 45, 52, 60, 68, 77, 88, 100, 118, 144, 200, 200)
"""Tokens of the captions, mean 79."""
OURS = """
import json, time, torch
from pathlib import Path
torch.set_num_threads(2)
started = time.perf_counter()
from wangen.runtime.fast.umt5 import load_prompt_encoder
encoder = load_prompt_encoder(Path({path!r}), None, dtype=torch.{dtype})
loaded = time.perf_counter()
total = sum(len(embedding) for embedding in encoder.encode({captions!r}))
seconds = time.perf_counter() - loaded
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([total, loaded - started, seconds, peak / 1e6]))
"""


def main() -> None:
    torch.set_num_threads(2)
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    with tempfile.TemporaryDirectory(dir=folders[0] if folders else None) as folder:
        _compare(Path(folder))
        if "--full" in sys.argv:
            _whole(Path(folder))


def captions() -> list[str]:
    """One word is one token, `</s>` is the last."""
    return [" ".join(f"w{(7 * i + k) % 400}" for k in range(length - 1)) for i, length in enumerate(LENGTHS)]


def _compare(folder: Path) -> None:
    """Time both, in turns, in float32 and bfloat16."""
    from wangen.runtime.fast.umt5 import load_prompt_encoder
    from wangen.runtime.weights.text_encoder import load_text_encoder
    from wangen.runtime.weights.tokenizer import load_tokenizer, token_ids

    path = folder / "t5.safetensors"
    vocabulary = write_tokenizer(folder, captions())
    _write(path, published.umt5(vocabulary=vocabulary, num_layers=NUM_BLOCKS))
    rows = token_ids(load_tokenizer(path), captions())
    assert tuple(map(len, rows)) == LENGTHS
    for dtype in (torch.float32, torch.bfloat16):
        _turns(load_text_encoder(path, dtype=dtype), load_prompt_encoder(path, None, dtype=dtype), rows)


def _turns(model: "UMT5EncoderModel", encoder: "PromptEncoder", rows: list[list[int]]) -> None:
    plain, ours = [], []
    for _ in range(ROUNDS):
        ours.append(_timed(lambda: encoder.encode(captions())))
        plain.append(_timed(lambda: [_padded(model, ids) for ids in rows]))
        print(f"  streamed {ours[-1][0]:.1f} s, plain {plain[-1][0]:.1f} s", flush=True)
    slow, fast = min(seconds for seconds, _ in plain), min(seconds for seconds, _ in ours)
    worst = max(rel_rms(a, b) for a, b in zip(ours[-1][1], plain[-1][1], strict=True))
    print(f"{model.dtype}: {NUM_BLOCKS} blocks, {len(rows)} captions: plain {slow:.1f} s, streamed {fast:.1f} s, "
          f"ratio {fast / slow:.3f}; {len(rows) / fast * NUM_BLOCKS / 24:.2f} captions/s with 24 blocks; "
          f"worst difference {worst:.1e} rel-rms", flush=True)  # fmt: skip


@torch.no_grad()
def _padded(model: "UMT5EncoderModel", ids: list[int]) -> torch.Tensor:
    rest = 512 - len(ids)
    mask = torch.tensor([[1] * len(ids) + [0] * rest])
    return (
        model(input_ids=torch.tensor([ids + [0] * rest]), attention_mask=mask).last_hidden_state[0, : len(ids)].clone()
    )


def _timed(work: Callable[[], list[torch.Tensor]]) -> tuple[float, list[torch.Tensor]]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def _whole(folder: Path) -> None:
    """Peak memory and time with all 24 blocks, the whole embedding and a tokenizer of the real size, in processes."""
    path = folder / "whole.safetensors"
    words = captions() + [f"v{number}" for number in range(VOCABULARY)]
    write_tokenizer(folder, words)
    _write(path, published.umt5(vocabulary=VOCABULARY + 1000))
    for dtype in ("float32", "bfloat16"):
        code = OURS.format(path=str(path), dtype=dtype, captions=captions())
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        tokens, start, seconds, peak = json.loads(done.stdout)
        print(f"{dtype}: 24 blocks, {len(LENGTHS)} captions, {tokens} tokens: start {start:.1f} s, "
              f"encode {seconds:.0f} s, peak of the process {peak:.2f} GB, file {path.stat().st_size / 1e9:.1f} GB",
              flush=True)  # fmt: skip


def _write(path: Path, shapes: published.Shapes) -> None:
    """A bfloat16 file of random weights whose activations keep their size; written tensor by tensor."""
    published.write_sparse(path, shapes)
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(length))
        draw = torch.randn(2**22)
        for name, shape in shapes.items():
            if "norm" in name:
                value = 1 + 0.1 * draw
            else:
                value = draw * (1.0 if "embedding" in name else 1 / math.sqrt(shape[-1]))
            data = (value / 4 if name.endswith("attn.q.weight") else value).bfloat16().view(torch.uint8).numpy()
            begin, end = header[name]["data_offsets"]
            file.seek(8 + length + begin)
            for at in range(0, end - begin, data.nbytes):
                file.write(data[: end - begin - at].data)


if __name__ == "__main__":
    main()
