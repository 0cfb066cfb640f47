"""An edit dataset of drawn pictures with control images, its caches filled by the steps' own code."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiny_qwen import TinyQwen, picture

from wangen.generator.steps import CacheLatents, CacheText, CheckCache, Train
from wangen.runtime import cache_latents, cache_text

CAPTIONS = {"house": "make the sky  green", "lake": "take the boat out", "hill": "make the sky  green"}
"""Two edits have one prompt, and control images of their own."""
SIZES = {"house": (96, 64), "lake": (64, 64), "hill": (96, 64)}


@dataclass(frozen=True)
class EditSet:
    """A dataset of three edits, and the tiny models."""

    folder: Path
    tiny: TinyQwen
    task: str

    @property
    def toml(self) -> Path:
        return self.folder / "set.toml"

    def latents(self, **changes: Any) -> dict[str, Any]:
        step = CacheLatents(dataset_config=self.toml, task=self.task, vae=self.tiny.single["vae"], vae_dtype="float32",
                            device="cpu")  # fmt: skip
        return dict(cache_latents.run(replace(step, **changes)).counts)

    def texts(self, **changes: Any) -> dict[str, Any]:
        step = CacheText(dataset_config=self.toml, task=self.task, t5=self.tiny.single["t5"], t5_dtype="float32",
                         device="cpu")  # fmt: skip
        return dict(cache_text.run(replace(step, **changes)).counts)

    def fill(self) -> "EditSet":
        self.latents()
        self.texts()
        return self

    @property
    def check(self) -> CheckCache:
        return CheckCache(dataset_config=self.toml, task=self.task)

    def train(self, output_dir: Path, **changes: Any) -> Train:
        options = Train(
            dataset_config=self.toml, dit=self.tiny.single["dit"], task=self.task, output_dir=output_dir,
            output_name="edit", network_dim=4, network_alpha=4.0, learning_rate=1e-3, mixed_precision="no",
            max_train_steps=6, timestep_sampling="qwen_shift", log_with=("none",), device="cpu",
        )  # fmt: skip
        return replace(options, **changes)


def make_edit_set(folder: Path, tiny: TinyQwen, task: str = "qwen-image-edit", **settings: Any) -> EditSet:
    """Three edits: targets, prompts, control images and a mask for one; of Edit-Plus one has two control images."""
    for name in ("targets", "controls"):
        (folder / name).mkdir(parents=True)
    for seed, (stem, caption) in enumerate(CAPTIONS.items()):
        picture(SIZES[stem], seed).save(folder / "targets" / f"{stem}.png")
        (folder / "targets" / f"{stem}.txt").write_text(caption, encoding="utf-8")
        width, height = SIZES[stem]
        picture((2 * width, 2 * height), 10 + seed).save(folder / "controls" / f"{stem}.png")
    if task == "qwen-image-edit-plus":
        (folder / "controls" / "lake.png").rename(folder / "controls" / "lake_0.png")
        picture((40, 80), 20).save(folder / "controls" / "lake_1.png")
    values = {"resolution": [64, 64], "enable_bucket": True, "batch_size": 1, **settings}
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
    paths = {"image_directory": "targets", "cache_directory": "cache"}
    if task != "qwen-image":
        paths["control_directory"] = "controls"
    lines += ["[[datasets]]", *(f"{key} = '{(folder / name).as_posix()}'" for key, name in paths.items())]
    made = EditSet(folder, tiny, task)
    made.toml.write_text("[general]\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return made
