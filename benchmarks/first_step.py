"""How long `wangen train` takes from the start of its process to the end of the first step, and what it is spent on.

python benchmarks/first_step.py [FOLDER] [--runs 5]

The model has 38 million parameters (8 blocks of 512, texts 4096 wide), the dataset one cached picture of 256x256. Each
run is a process of its own, with what a user gets by default (TensorBoard and Python's compiled files too); seconds are
from the moment the system started it, and processor seconds are its own, which other work on the machine disturbs less.
FOLDER keeps the weights and the cache for the next time.
"""

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

TRAIN = "wangen.runtime.train"
LOOP = "wangen.runtime.training.loop"
STAGES = {
    "refuse": (TRAIN, "flags judged"),
    "make_plan": (TRAIN, "cache read, plan made"),
    "_prepare": (TRAIN, "model, adapter, optimizer"),
    "optimizer_step": (LOOP, "first step"),
}
"""Functions after which the clock is read, of which module they are, and what is done by then."""


def make_inputs(folder: Path) -> None:
    """Weights in the original formats, and a cached picture with its caption."""
    import numpy as np
    from PIL import Image

    from wangen.generator.steps import CacheLatents, CacheText
    from wangen.runtime import cache_latents, cache_text

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from tiny_weights import TinySizes, write_tiny_wan

    caption = " ".join(["a falcon over the hills in the morning"] * 5)
    media = folder / "media"
    media.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(media / "noise.png")
    (media / "noise.txt").write_text(caption, encoding="utf-8")
    sizes = TinySizes(dim=512, ffn_dim=2048, num_layers=8, text_dim=4096, text_ffn_dim=64, text_layers=1)
    weights = write_tiny_wan(folder / "models", [caption], sizes=sizes)
    config = folder / "set.toml"
    config.write_text(
        f'[general]\nresolution = [256, 256]\n[[datasets]]\nimage_directory = "{media.as_posix()}"\n'
        f'cache_directory = "{(folder / "cache").as_posix()}"\n'
    )
    cache_latents.run(CacheLatents(dataset_config=config, vae=weights["vae"], vae_dtype="float32", device="cpu"))
    cache_text.run(CacheText(dataset_config=config, t5=weights["t5"], t5_dtype="float32", device="cpu"))


def line_of(folder: Path) -> list[str]:
    """The command line of a run that begins anew and is stopped after its first step."""
    shutil.rmtree(folder / "output", ignore_errors=True)
    return [
        "train", "--dataset_config", str(folder / "set.toml"), "--task", "t2v-1.3B", "--device", "cpu",
        "--dit", str(folder / "models" / "wan2.1_t2v_1.3B_bf16.safetensors"), "--output_dir", str(folder / "output"),
        "--output_name", "first", "--network_dim", "16", "--network_alpha", "16", "--mixed_precision", "no",
        "--checkpointing", "none", "--max_train_steps", "1",
    ]  # fmt: skip


def child(folder: Path) -> None:
    """Run the command as it is typed, note the clocks at its stages, and end when the first step is done."""
    marks: list[tuple[str, float, float]] = []
    began = float(os.environ["BEGAN"])

    def mark(name: str) -> None:
        marks.append((name, time.time() - began, time.process_time()))

    def marked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function)
        def inner(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            mark(STAGES[name][1])
            if name == "optimizer_step":
                print(json.dumps(marks), flush=True)
                os._exit(0)
            return result

        return inner

    def importing(name: str) -> ModuleType:
        """`import_module`, with clocks around the parts of the training step."""
        if name == TRAIN:
            mark("command line")
            importlib.import_module("torch")
            mark("import torch")
        module = importlib.import_module(name)
        if name == TRAIN:
            mark("import the rest")
            for stage, (home, _) in STAGES.items():
                setattr(sys.modules[home], stage, marked(getattr(sys.modules[home], stage), stage))
        return module

    mark("interpreter")
    from wangen.generator import entry, session

    session.import_module = importing  # type: ignore[assignment,attr-defined]
    sys.argv = ["wangen", *line_of(folder)]
    entry.entry()


def one_run(folder: Path) -> list[tuple[str, float, float]]:
    """The stages of a run: name, seconds and processor seconds since its start."""
    line = [sys.executable, __file__, str(folder), "--child"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["BEGAN"] = str(time.time())
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    answers = [text for text in done.stdout.splitlines() if text.startswith("[[")]
    if not answers:
        raise SystemExit(done.stdout + done.stderr)
    return [(name, seconds, busy) for name, seconds, busy in json.loads(answers[-1])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary) / "first"
        if not (folder / "cache").is_dir():
            make_inputs(folder)
        runs = [one_run(folder) for _ in range(options.runs)]
    totals = sorted(run[-1][1] for run in runs)
    print(f"first step after {totals[0]:.2f} s (minimum), {statistics.median(totals):.2f} s (median)\n")
    print("| until | s | processor s | of it here |\n|---|---|---|---|")
    before = 0.0
    for number, (name, _, _) in enumerate(runs[0]):
        seconds, busy = min(run[number][1] for run in runs), min(run[number][2] for run in runs)
        print(f"| {name} | {seconds:.2f} | {busy:.2f} | {busy - before:.2f} |")
        before = busy


if __name__ == "__main__":
    main()
