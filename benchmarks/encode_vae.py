"""The fast encoder of a full-size Wan 2.1 VAE against plain `AutoencoderKLWan.encode`: time, memory, time to the first.

python benchmarks/encode_vae.py [--threads 2] [--runs 3] [--batches 1 4] [--cpu_time] [--folder FOLDER]

Float32 on the CPU, random weights of the published sizes. Times are interleaved in one process and the least counts;
each peak is that of a process of its own above what its imports take. The first latent is timed from the start of its
process. The limits are those that this project set itself. On a busy machine `--threads 1 --cpu_time` gives ratios that
hold: seconds of the processor instead of those on the wall.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from wangen.runtime.fast.vae import load_vae_encoder
from wangen.runtime.safetensors_file import write

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tiny_weights import random_weights, vae_shapes

CASES = {
    "image 256 px": ("video", 1, 256, 0.32),
    "clip of 17 frames, 128 px": ("video", 17, 128, 0.75),
    "condition of 81 frames, 96 px": ("condition", 81, 96, 0.25),
}
FIRST_LATENT = """
import torch
torch.set_num_threads({threads})
from pathlib import Path
from wangen.runtime.fast.vae import load_vae_encoder
load_vae_encoder(Path({path!r}), dtype=torch.float32).encode(torch.zeros(1, 3, 1, 256, 256, dtype=torch.uint8))
"""
Encode = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--cpu_time", action="store_true")
    parser.add_argument("--folder", help="where the weights are written for the time")
    parser.add_argument("--peak", nargs=4, help="PATH WAY CASE BATCH: print one peak of memory")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        path, way, case, batch = options.peak
        print(_peak_mib(Path(path), way, case, int(batch)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "Wan2.1_VAE.safetensors"
        write(path, random_weights(vae_shapes(96), 0, torch.float32), {})
        print(f"{date.today()}, torch {torch.__version__}, {options.threads} threads, least of {options.runs} runs")
        _first_latent(path, options.threads, options.runs)
        _compare(path, options, time.process_time if options.cpu_time else time.perf_counter)


def _first_latent(path: Path, threads: int, runs: int) -> None:
    code, seconds = FIRST_LATENT.format(threads=threads, path=str(path)), []
    for _ in range(runs + 1):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        seconds.append(time.perf_counter() - started)
    print(f"start of the process to its end, one image of 256 px encoded: {min(seconds):.2f} s (limit 2)", flush=True)


def _compare(path: Path, options: argparse.Namespace, clock: Callable[[], float]) -> None:
    ways = {"plain": _plain(path), "fast": _fast(path)}
    print("| what | batch | plain s/item | fast s/item | ratio | limit | plain MiB | fast MiB | difference |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, (kind, _, _, limit) in CASES.items():
        for batch in options.batches:
            pixels, seconds, results = _input(name, batch), {way: [] for way in ways}, {}
            for _ in range(options.runs):
                for way, encoders in ways.items():
                    started = clock()
                    results[way] = encoders[kind](pixels)
                    seconds[way].append(clock() - started)
            plain, fast = (min(seconds[way]) / batch for way in ways)
            peaks = [_peak_of_child(path, way, name, batch, options.threads) for way in ways]
            far = float((results["plain"] - results["fast"]).abs().max())
            times = f"{plain:.2f} | {fast:.2f} | {fast / plain:.3f} | {limit}"
            print(f"| {name} | {batch} | {times} | {peaks[0]} | {peaks[1]} | {far:.1e} |", flush=True)


def _input(case: str, batch: int) -> torch.Tensor:
    """The clip, or the image that a condition begins with."""
    kind, num_frames, side, _ = CASES[case]
    frames = 1 if kind == "condition" else num_frames
    return torch.rand(batch, 3, frames, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1


def _fast(path: Path) -> dict[str, Encode]:
    encoder = load_vae_encoder(path, dtype=torch.float32)
    num_frames = CASES["condition of 81 frames, 96 px"][1]
    return {"video": encoder.encode, "condition": lambda images: encoder.encode_condition(images, num_frames)}


def _plain(path: Path) -> dict[str, Encode]:
    from wangen.runtime.weights.vae import load_vae

    vae = load_vae(path)
    mean, std = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    num_frames = CASES["condition of 81 frames, 96 px"][1]

    @torch.no_grad()
    def encode(video: torch.Tensor) -> torch.Tensor:
        return (vae.encode(video).latent_dist.mode() - mean) / std

    def condition(images: torch.Tensor) -> torch.Tensor:
        grey = images.new_zeros(*images.shape[:2], num_frames - 1, *images.shape[3:])
        return encode(torch.cat([images, grey], dim=2))

    return {"video": encode, "condition": condition}


def _peak_of_child(path: Path, way: str, case: str, batch: int, threads: int) -> int:
    command = [sys.executable, __file__, "--threads", str(threads), "--peak", str(path), way, case, str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _peak_mib(path: Path, way: str, case: str, batch: int) -> int:
    """How far this process grows from before it loads the weights."""
    from wangen.runtime.weights import vae as _imported  # noqa: F401  # its imports are no part of the growth

    Path("/proc/self/clear_refs").write_text("5")
    before = _status_kib("VmRSS")
    encoders = _plain(path) if way == "plain" else _fast(path)
    encoders[CASES[case][0]](_input(case, batch))
    return (_status_kib("VmHWM") - before) // 1024


def _status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


if __name__ == "__main__":
    main()
