"""What a release writes, kept so that later ones are tested to read it: caches, states, LoRAs, scripts and flags.

Once, with the version that is released, from the repository's root; a folder that is there is never written again:

    python tests/releases.py
"""

import json
import shutil
import sys
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from golden import HOME as PUBLISHED
from golden import texts
from PIL import Image

from wangen.generator.cli import main
from wangen.generator.steps import STEPS
from wangen.generator.table import spellings

HOME = Path(__file__).resolve().parent / "releases"
VECTORS = HOME.parent / "vectors"
WEIGHTS = {
    "dit": VECTORS / "dit_t2v21_e2e" / "model.safetensors",
    "vae": VECTORS / "vae21" / "Wan2.1_VAE.pth",
    "t5": VECTORS / "t5" / "models_t5_umt5-xxl-enc-bf16.pth",
}
"""Checkpoints that never change, so that what is made of them may be compared with what a later version makes."""
STEPS_KEPT, STEPS_IN_ALL = 2, 4
SCRIPTS = ("linux", "windows", "slurm")


def write_toml(folder: Path, *, packed: bool = False) -> Path:
    """The dataset TOML of a copy of a release's folder."""
    toml = folder / "set.toml"
    cache = (folder / ("packed" if packed else "cache")).as_posix()
    toml.write_text(f"[general]\nresolution = [32, 32]\n[[datasets]]\nimage_directory = '{folder.as_posix()}/media'\n"
                    f"cache_directory = '{cache}'\n", encoding="utf-8")  # fmt: skip
    return toml


def train_line(folder: Path, steps: int) -> list[str]:
    """The training of a release, which later versions take up."""
    return ["train", "--task", "t2v-1.3B", "--dataset_config", str(folder / "set.toml"), "--dit", str(WEIGHTS["dit"]),
            "--output_dir", str(folder / "out"), "--output_name", "lora", "--network_dim", "1", "--network_alpha", "1",
            "--max_train_steps", str(steps), "--ema_decay", "0.9", "--mixed_precision", "no", "--device", "cpu",
            "--log_with", "none"]  # fmt: skip


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step that was trained in a folder."""
    lines = (folder / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def run(*words: str) -> None:
    """Run wangen, quietly.

    Raises:
        SystemExit: it ended with another code than 0.
    """
    with redirect_stdout(StringIO()):
        code = main(list(words))
    if code:
        raise SystemExit(f"wangen {' '.join(words)} ended with {code}")


def accepted() -> dict[str, dict[str, list[str]]]:
    """Every flag of every step, other spellings included, and the values that it may have; empty: any of its kind."""
    return {step.command: {name: list(option.choices) for name, option, _constant in spellings(step)} for step in STEPS}


def make(folder: Path) -> None:
    """Write everything into a new folder."""
    media, rng = folder / "media", np.random.default_rng(0)
    media.mkdir(parents=True)
    for name in ("red", "blue"):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(media / f"{name}.png")
        (media / f"{name}.txt").write_text(f"a {name} noise", encoding="utf-8")
    toml = write_toml(folder)
    encode = ["--dataset_config", str(toml), "--device", "cpu"]
    run("cache_latents", *encode, "--vae", str(WEIGHTS["vae"]), "--vae_dtype", "float32")
    run("cache_text", *encode, "--t5", str(WEIGHTS["t5"]), "--t5_dtype", "float32")
    run(*train_line(folder, STEPS_KEPT))
    shutil.copytree(folder / "out", folder / "kept")
    run(*train_line(folder, STEPS_IN_ALL))
    found = losses(folder)
    shutil.rmtree(folder / "out")
    (folder / "kept").rename(folder / "out")
    shutil.copytree(folder / "cache", folder / "packed")
    run("cache", "pack", str(folder / "packed"))
    facts = {"losses": found, "flags": accepted()}
    (folder / "facts.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for note in (toml, folder / "out" / "metrics.jsonl", *folder.rglob("*.report.json"), *folder.rglob(".wangen-*")):
        note.unlink()  # paths and times of this machine
    for platform in SCRIPTS:
        for name, text in texts(PUBLISHED / platform).items():
            place = folder / "scripts" / platform / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text)


def write() -> None:
    """Write the folder of this version.

    Raises:
        SystemExit: it is there.
    """
    place = HOME / version("wangen")
    if place.exists():
        raise SystemExit(f"{place} is there: what a release wrote is never written again")
    with TemporaryDirectory() as folder:
        make(Path(folder) / "made")
        shutil.copytree(Path(folder) / "made", place)


if __name__ == "__main__":
    sys.exit(write())
