"""All that can be known before a GPU starts: files, captions, weights, disk. Lists everything that is wrong at once."""

import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wangen import profiles
from wangen.generator import headers
from wangen.generator.dataset import Item, read_facts, scan
from wangen.generator.errors import WangenError
from wangen.generator.geometry import resampled_frames, windows
from wangen.generator.session import Report
from wangen.generator.steps import Check
from wangen.generator.tokenizer_file import find_tokenizer
from wangen.generator.tomls import DatasetEntry, read_dataset

log = logging.getLogger("wangen")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, as it is printed and reported."""

    where: str
    found: str
    cure: str

    def __str__(self) -> str:
        """`where: fact; cure`."""
        return "; ".join(filter(None, (f"{self.where}: {self.found}", self.cure)))


def run(options: Check) -> Report:
    """Look at everything the other steps will need and list what is wrong.

    Raises:
        WangenError: the dataset TOML itself cannot be read.
    """
    entries = read_dataset(options.dataset_config)
    items: list[Item] = []
    findings = [*_entries(entries, items, profiles.model(options.task).fps), *_weights(options)]
    if options.output_dir:
        findings += _output(options.output_dir, items, entries)
    for finding in findings:
        log.error("  - %s", finding)
    images = sum(item.media == "image" for item in items)
    clips = len(items) - images
    summary = f"{images} images and {clips} clips with captions"
    verdict = f"{len(findings)} problem{'s' if len(findings) != 1 else ''}" if findings else "all good"
    return Report(
        folder=options.output_dir or options.dataset_config.parent,
        summary=f"{verdict}: {summary}",
        inputs={"dataset_config": options.dataset_config},
        counts={"images": images, "clips": clips, "problems": len(findings)},
        result={"problems": [str(finding) for finding in findings]},
        ok=not findings,
    )


def _entries(entries: tuple[DatasetEntry, ...], items: list[Item], fps: int) -> Iterator[Finding]:
    for entry in entries:
        try:
            found, problems = scan(entry.directory, media=entry.media, caption_extension=entry.caption_extension)
        except WangenError as error:
            yield Finding(str(entry.directory), error.found, "publish the dataset again or mend the TOML")
            continue
        items += found
        for problem in problems:
            yield Finding(str(problem.path), problem.found, problem.cure)
        bad = {problem.path for problem in problems}
        yield from _short_clips([item for item in found if item.media == "video" and item.path not in bad], entry, fps)
        yield from _cache_folder(entry)


def _short_clips(clips: list[Item], entry: DatasetEntry, fps: int) -> Iterator[Finding]:
    for item in clips:
        frames = resampled_frames(read_facts(item.path), fps, entry.source_fps)
        if not windows(entry, frames):
            need = min(entry.target_frames)
            yield Finding(str(item.path), f"has {frames} frames at {fps} fps, {need} are needed",
                          "shorten target_frames or take it out")  # fmt: skip


def _cache_folder(entry: DatasetEntry) -> Iterator[Finding]:
    if entry.cache_directory.resolve() == entry.directory.resolve():
        yield Finding(str(entry.cache_directory), "cache and media share one folder", "set cache_directory to another")
    yield from _writable(entry.cache_directory, "the cache folder")


def _writable(folder: Path, name: str) -> Iterator[Finding]:
    """A folder must be writable, or its nearest existing parent when it is still to be made."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        yield Finding(str(folder), f"{name} is a file", "choose a folder")
    elif not os.access(existing, os.W_OK):
        yield Finding(str(folder), f"{name} cannot be written", "fix its rights or choose another")


def _weights(options: Check) -> Iterator[Finding]:
    given = {"vae": options.vae, "t5": options.t5, "dit": options.dit}
    for weights in profiles.model(options.task).weights:
        path = given.get(weights.flag)
        if path is None:
            continue
        if not path.exists():
            names = ", ".join(weights.files[:3])
            yield Finding(str(path), f"--{weights.flag}: no such file",
                          f"put it there (known names: {names}; from {weights.source})")  # fmt: skip
            continue
        try:
            headers.expect(path, weights.kind, weights.flag)
        except WangenError as error:
            yield Finding(error.where or str(path), error.found, error.cure)
    if options.t5 and options.t5.exists():
        yield from _tokenizer(options.t5, options.tokenizer)


def _tokenizer(t5: Path, tokenizer: Path | None) -> Iterator[Finding]:
    try:
        find_tokenizer(tokenizer or t5)
    except WangenError as error:
        yield Finding(error.where, error.found, error.cure)


def _output(folder: Path, items: list[Item], entries: tuple[DatasetEntry, ...]) -> Iterator[Finding]:
    yield from _writable(folder, "the output folder")
    existing = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), folder)
    free = shutil.disk_usage(existing).free
    need = cache_bytes(items, entries)
    if free < need:
        yield Finding(str(folder), f"{free / 1e9:.1f} GB free, the caches alone need about {need / 1e9:.1f} GB",
                      "free space")  # fmt: skip


def cache_bytes(items: list[Item], entries: tuple[DatasetEntry, ...]) -> int:
    """An upper bound of what the cache entries take: float32 latents of 16 channels and 512 text rows."""
    total = 0
    for entry in entries:
        frames = max(entry.target_frames) if entry.media == "video" else 1
        latent = 16 * 4 * ((frames - 1) // 4 + 1) * (entry.resolution[0] // 8) * (entry.resolution[1] // 8)
        total += sum(item.media == entry.media for item in items) * (latent + 512 * 4096 * 2)
    return total
