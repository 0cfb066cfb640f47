"""A dataset folder with its cache, for the tests of the caching steps."""

import json
import shutil
from pathlib import Path
from typing import Any

from helpers import make_image

from wangen.generator.cli import main
from wangen.runtime.cache import Entry, Folder

PHOTOS = ("astronaut", "cat", "coffee")
CLIP = "big-buck-bunny"


class Bundle:
    """A dataset folder with its TOML, and the tiny weights."""

    def __init__(self, folder: Path, models: dict[str, Path]) -> None:
        self.folder = folder
        self.models = models
        self.toml = folder / "set.toml"

    @property
    def photos(self) -> Path:
        return self.folder / "photos"

    def latents_line(self, *more: str) -> list[str]:
        line = ["cache_latents", "--dataset_config", str(self.toml), "--vae", str(self.models["vae"])]
        return [*line, "--vae_dtype", "float32", *more]

    def text_line(self, *more: str) -> list[str]:
        line = ["cache_text", "--dataset_config", str(self.toml), "--t5", str(self.models["t5"])]
        return [*line, "--t5_dtype", "float32", *more]

    def latents(self, *more: str) -> dict[str, Any]:
        assert main(self.latents_line(*more)) == 0
        return self.counts("cache_latents")

    def text(self, *more: str) -> dict[str, Any]:
        assert main(self.text_line(*more)) == 0
        return self.counts("cache_text")

    def check(self, *more: str) -> int:
        return main(["check_cache", "--dataset_config", str(self.toml), *more])

    def counts(self, step: str) -> dict[str, Any]:
        report = json.loads((self.toml.parent / f"{step}.report.json").read_text(encoding="utf-8"))
        counts: dict[str, Any] = report["counts"]
        return counts

    def entries(self, cache: str = "photos_cache") -> dict[str, Entry]:
        folder = Folder(self.folder / cache, deep=True)
        assert not folder.corrupt if folder.all_entries else True
        return {f"{entry.kind} {entry.name}": entry for entry in folder.all_entries}

    def files(self) -> dict[str, bytes]:
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in entry_files(self.folder)}


def entry_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def write_toml(bundle: Bundle, resolution: int = 64, *, clips: bool = True) -> None:
    text = f"[general]\nresolution = [{resolution}, {resolution}]\nenable_bucket = true\n"
    text += f"[[datasets]]\nimage_directory = '{bundle.photos.as_posix()}'\n"
    text += f"cache_directory = '{bundle.folder.as_posix()}/photos_cache'\n"
    if clips:
        text += f"[[datasets]]\nvideo_directory = '{bundle.folder.as_posix()}/clips'\n"
        text += f"cache_directory = '{bundle.folder.as_posix()}/clips_cache'\ntarget_frames = [5]\n"
    bundle.toml.write_text(text, encoding="utf-8")


def make_many(folder: Path, models: dict[str, Path], count: int) -> Bundle:
    """Many tiny pictures of one shape, each with a caption of its own."""
    bundle = Bundle(folder, models)
    for number in range(count):
        make_image(bundle.photos / f"{number:03}.png", (32, 32), seed=number + 1)
        (bundle.photos / f"{number:03}.txt").write_text(f"picture {number} of many", encoding="utf-8")
    write_toml(bundle, 32, clips=False)
    return bundle


def uncached(unbroken: Bundle, folder: Path) -> Bundle:
    shutil.copytree(unbroken.photos, folder / "photos")
    bundle = Bundle(folder, unbroken.models)
    write_toml(bundle, 32, clips=False)
    return bundle
