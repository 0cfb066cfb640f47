"""A tiny cached dataset and tiny weights in the original formats, made by the product's own steps."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from helpers import make_clip
from PIL import Image
from tiny_weights import write_tiny_wan

from wangen.generator.steps import CacheLatents, CacheText, Train
from wangen.runtime import cache_latents, cache_text

CAPTIONS = {"red": "a red square on green", "blue": "a blue wall", "clip": "a clip of colours that move"}


@dataclass(frozen=True)
class TinyRun:
    """Paths of the weights and of a dataset whose caches are filled."""

    folder: Path
    weights: dict[str, Path]
    dataset_config: Path

    def options(self, output_dir: Path, **changes: Any) -> Train:
        """Training flags that take a second or two."""
        options = Train(
            dataset_config=self.dataset_config,
            dit=self.weights["dit"],
            task="t2v-1.3B",
            output_dir=output_dir,
            output_name="lora",
            network_dim=4,
            network_alpha=4.0,
            learning_rate=1e-3,
            mixed_precision="no",
            max_train_steps=6,
            log_with=("none",),
            device="cpu",
        )
        return replace(options, **changes)


def make_tiny_run(folder: Path) -> TinyRun:
    """Two drawn pictures and a drawn clip, trained on 5 frames of 64x64, with filled caches."""
    media = folder / "media"
    media.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("red", "blue"):
        pixels = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        pixels[8:40, 8:40] = (220, 30, 30) if name == "red" else (20, 40, 220)
        Image.fromarray(pixels).save(media / f"{name}.png")
    make_clip(media / "clip.mp4", num_frames=8, fps=16, size=(64, 64))
    for stem, caption in CAPTIONS.items():
        (media / f"{stem}.txt").write_text(caption, encoding="utf-8")
    return fill_caches(folder, media, num_frames=5)


def fill_caches(folder: Path, media: Path, num_frames: int) -> TinyRun:
    """Make tiny weights and a dataset TOML for a media folder, and run both caching steps."""
    config = folder / "tiny.toml"
    config.write_text(
        f"""
[general]
resolution = [64, 64]
enable_bucket = true
[[datasets]]
image_directory = "{media.as_posix()}"
cache_directory = "{(folder / "cache").as_posix()}"
[[datasets]]
video_directory = "{media.as_posix()}"
cache_directory = "{(folder / "cache").as_posix()}"
target_frames = [{num_frames}]
"""
    )
    captions = [path.read_text(encoding="utf-8") for path in sorted(media.glob("*.txt"))]
    weights = write_tiny_wan(folder / "models", captions)
    cache_latents.run(CacheLatents(dataset_config=config, vae=weights["vae"], vae_dtype="float32", device="cpu"))
    cache_text.run(CacheText(dataset_config=config, t5=weights["t5"], t5_dtype="float32", device="cpu"))
    return TinyRun(folder, weights, config)


def state_folder(options: Train) -> Path:
    """Where a run keeps its states."""
    return options.output_dir / f"{options.output_name}-state"
