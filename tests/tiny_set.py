"""A dataset of four pictures and a clip, so small that both caching steps take a moment."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from cached_bundle import Bundle
from helpers import make_clip, make_image, read_tree

from wangen.generator.cli import main

CACHES = ("photos_cache", "clips_cache")


def make_set(folder: Path, weights: dict[str, Path]) -> Bundle:
    """Four pictures, and a clip of which one frame and five are used; two items have one caption."""
    bundle = Bundle(folder, weights)
    for number in range(4):
        picture(bundle, number)
    make_clip(folder / "clips" / "walk.mp4", num_frames=5, fps=16, size=(32, 32), seed=9)
    make_clip(folder / "clip_controls" / "walk.mp4", num_frames=5, fps=16, size=(32, 32), seed=8)
    (folder / "clips" / "walk.txt").write_text("picture 1", encoding="utf-8")
    return write_tiny_toml(bundle)


def picture(bundle: Bundle, number: int, caption: str = "") -> None:
    make_image(bundle.photos / f"{number}.png", (32, 32), seed=number + 1)
    (bundle.photos / f"{number}.txt").write_text(caption or f"picture {number}", encoding="utf-8")


def write_tiny_toml(bundle: Bundle, *, controls: bool = False, batch_size: int = 3) -> Bundle:
    folder = bundle.folder.as_posix()
    text = f"[general]\nresolution = [32, 32]\nbatch_size = {batch_size}\n"
    text += f"[[datasets]]\nimage_directory = '{folder}/photos'\ncache_directory = '{folder}/photos_cache'\n"
    text += f"[[datasets]]\nvideo_directory = '{folder}/clips'\ncache_directory = '{folder}/clips_cache'\n"
    text += "target_frames = [1, 5]\n"
    text += f"control_directory = '{folder}/clip_controls'\n" if controls else ""
    bundle.toml.write_text(text, encoding="utf-8")
    return bundle


def copy(bundle: Bundle, to: Path) -> Bundle:
    shutil.copytree(bundle.folder, to)
    made = Bundle(to, bundle.models)
    text = bundle.toml.read_text(encoding="utf-8").replace(bundle.folder.as_posix(), to.as_posix())
    made.toml.write_text(text, encoding="utf-8")
    return made


def kept(bundle: Bundle) -> dict[str, bytes]:
    """All that is in the cache folders, but the index and the memo, which hold times."""
    found = {
        f"{cache}/{name}": data
        for cache in CACHES
        for name, data in (read_tree(bundle.folder / cache) if (bundle.folder / cache).is_dir() else {}).items()
    }
    return {name: data for name, data in found.items() if not name.endswith(("index.jsonl", "sources.jsonl"))}


def leftovers(bundle: Bundle) -> list[str]:
    names = [path.name for path in bundle.folder.rglob(".*")]
    return [name for name in names if name.endswith(".tmp") or name.startswith(".claim")]


def lines_of(bundle: Bundle, flags: Sequence[str]) -> list[list[str]]:
    return [bundle.latents_line("--num_workers", "1", *flags), bundle.text_line()]


def run_all(lines: Sequence[list[str]]) -> Callable[[], int]:
    return lambda: max(main(line) for line in lines)
