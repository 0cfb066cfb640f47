"""A dataset with masks, a regularisation set and batches of two, and runs on it that are cut off and go on."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_clip
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_weights import write_tiny_wan

from wangen import profiles
from wangen.generator.steps import CacheLatents, CacheText, Train
from wangen.runtime import cache_latents, cache_text, train
from wangen.runtime.models import family
from wangen.runtime.training import loop
from wangen.runtime.training.saving import save_state
from wangen.runtime.training.throughput import Throughput

VECTORS = Path(__file__).parent / "vectors"
Changes = dict[str, Any]
CAPTIONS = {"red": "a red square", "blue": "a blue wall", "pale": "a pale wall", "clip": "colours that move"}
MEASURED = {"step", "epoch", "expert", "loss", "grad_norm", "lr", "validation", "loss_by_timestep"}
"""Of a line of `metrics.jsonl`: what is no time."""

EXPERTS: Changes = {"task": "t2v-A14B", "high_noise_share": 0.4, "expert_turn_steps": 2}
TRUTH: Changes = {"validation_items": 1, "validation_timesteps": 2, "validate_every_n_steps": 3, "keep_best": True}


class PowerCutError(Exception):
    """Ends a run at once; nothing in the product knows it."""


@dataclass(frozen=True)
class Cases:
    """Weights and a dataset whose caches are filled; tests must not change them."""

    folder: Path
    weights: dict[str, Path]

    def config(self, name: str, text: str) -> Path:
        """A dataset TOML over the same caches."""
        path = self.folder / f"{name}.toml"
        path.write_text(text.replace("@", self.folder.as_posix()), encoding="utf-8")
        return path

    def options(self, output_dir: Path, **changes: Any) -> Train:
        """Flags of a run of a moment."""
        given: Changes = {
            "dataset_config": self.folder / "rich.toml", "dit": self.weights["dit"], "task": "t2v-1.3B",
            "output_dir": output_dir, "output_name": "lora", "network_dim": 4, "network_alpha": 4.0,
            "learning_rate": 1e-3, "mixed_precision": "no", "max_train_steps": 5, "log_with": ("none",),
            "device": "cpu", "max_data_loader_n_workers": 1,
        }  # fmt: skip
        given |= changes
        if given["task"] == "t2v-A14B":
            given.setdefault("dit_high_noise", self.weights["high"])
        return Train(**given)


RICH = """
[general]
resolution = [64, 64]
[[datasets]]
image_directory = "@/media"
cache_directory = "@/cache"
mask_directory = "@/masks"
batch_size = 2
[[datasets]]
image_directory = "@/others"
cache_directory = "@/cache"
is_reg = true
num_repeats = 2
[[datasets]]
video_directory = "@/media"
cache_directory = "@/cache"
target_frames = [5]
"""


TI2V = """
[general]
resolution = [64, 64]
[[datasets]]
video_directory = "@/media"
cache_directory = "@/cache"
target_frames = [1, 9]
batch_size = 2
"""


def make_cases(folder: Path) -> Cases:
    """Three pictures with masks, a fourth as a regularisation set, and a clip; weights of two experts."""
    media, masks, others = (folder / name for name in ("media", "masks", "others"))
    for made in (media, masks, others):
        made.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number, name in enumerate(("red", "blue", "pale", "other")):
        place = others if name == "other" else media
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(place / f"{name}.png")
        mask = np.full((64, 64), 64 * number, dtype=np.uint8)
        mask[:32] = 255
        if place == media:
            Image.fromarray(mask).save(masks / f"{name}.png")
    make_clip(media / "clip.mp4", num_frames=8, fps=16, size=(64, 64))
    for stem, caption in CAPTIONS.items():
        (media / f"{stem}.txt").write_text(caption, encoding="utf-8")
    (others / "other.txt").write_text("something else", encoding="utf-8")
    weights = write_tiny_wan(folder / "models", [*CAPTIONS.values(), "something else"])
    high = {name: (0.9 * value.float()).to(value.dtype) for name, value in load_file(weights["dit"]).items()}
    save_file(high, folder / "high.safetensors")
    cases = Cases(folder, {**weights, "high": folder / "high.safetensors"})
    config = cases.config("rich", RICH)
    cache_latents.run(CacheLatents(dataset_config=config, vae=weights["vae"], vae_dtype="float32", device="cpu"))
    cache_text.run(CacheText(dataset_config=config, t5=weights["t5"], t5_dtype="float32", device="cpu"))
    return cases


class _Prompts:
    """Embeddings as wide as the transformer of the vectors takes them: the tiny umT5 is narrower."""

    def encode(self, prompts: list[str], _on_block: object) -> list[torch.Tensor]:
        return [torch.randn(3 + len(text) % 5, 4096, generator=torch.Generator().manual_seed(1)) for text in prompts]


def wide_prompts(patch: pytest.MonkeyPatch) -> None:
    """Let `cache_text` make embeddings for the TI2V transformer of the vectors."""
    patch.setattr(family(profiles.model("ti2v-5B")), "load_prompt_encoder", lambda *_words, **_names: _Prompts())


def make_ti2v(folder: Path) -> Cases:
    """Two clips of 9 frames and a picture for the model whose first frames are given clean: latents (48, 3, 4, 4)."""
    media = folder / "media"
    media.mkdir(parents=True)
    for seed, name in enumerate(("one", "two")):
        make_clip(media / f"{name}.mp4", num_frames=9, fps=24, size=(64, 64), seed=seed)
        (media / f"{name}.txt").write_text(name, encoding="utf-8")
    cases = Cases(folder, {"dit": VECTORS / "dit_ti2v5b" / "model.safetensors"})
    config = cases.config("rich", TI2V)
    vae, t5 = VECTORS / "vae22" / "Wan2.2_VAE.pth", VECTORS / "t5" / "models_t5_umt5-xxl-enc-bf16.pth"
    step = {"dataset_config": config, "task": "ti2v-5B", "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        wide_prompts(patch)
        cache_latents.run(CacheLatents(vae=vae, vae_dtype="float32", **step))
        cache_text.run(CacheText(t5=t5, t5_dtype="float32", **step))
    return cases


def contents(folder: Path) -> dict[str, bytes]:
    """Every trained file of an output folder."""
    found = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert found, folder
    return found


def measured(folder: Path) -> list[Changes]:
    """The lines of `metrics.jsonl` without what was timed."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if name in MEASURED} for line in lines]


def at_step(patch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Do something before the optimizer step that follows so many others."""
    real, done = loop.optimizer_step, []

    def watched(*words: Any, **names: Any) -> Any:
        if len(done) == step:
            act()
        done.append(1)
        return real(*words, **names)

    patch.setattr(loop, "optimizer_step", watched)


def cut_off(options: Train, step: int) -> None:
    """Run so many steps, then end without a chance to save; states lie from every second step."""

    def cut() -> None:
        raise PowerCutError

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, cut)
        with pytest.raises(PowerCutError):
            train.run(options)


def note_saves(patch: pytest.MonkeyPatch, module: ModuleType) -> list[bool]:
    """For each state that a module saves from now on whether the steps' time was paused then; it grows."""
    paused, pauses, saved_in = Throughput.paused, list[Throughput](), list[bool]()

    @contextlib.contextmanager
    def noted_pause(self: Throughput) -> Iterator[None]:
        with paused(self):
            pauses.append(self)
            yield
            pauses.pop()

    def noted_save(*given: Any, **named: Any) -> None:
        saved_in.append(bool(pauses))
        save_state(*given, **named)

    patch.setattr(Throughput, "paused", noted_pause)
    patch.setattr(module, "save_state", noted_save)
    return saved_in
