"""Items -> the published layout: media, captions, caches, TOML files and scripts, for each target.

Publishing again brings the bundle up to date and touches nothing else: a manifest beside the media remembers what was
written, and only that is ever replaced or removed. Media are hard-linked within one file system and copied otherwise;
captions are always copied. Originals stay as they are.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from wangen.generator import scripts
from wangen.generator.bundle import CACHE, bundle_steps, toml_name
from wangen.generator.dataset import Item, Problem, read_facts, scan
from wangen.generator.errors import WangenError
from wangen.generator.geometry import resampled_frames
from wangen.generator.session import write_text
from wangen.generator.tomls import write_dataset
from wangen.generator.workspace import Target, Workspace, require_writable
from wangen.profiles import Model

MANIFEST = ".wangen-published.json"


@dataclass
class Published:
    """What publishing to one target did.

    Attributes:
        target: where.
        scripts: script names.
        counts: `new`, `same`, `removed` media and captions.
        kept: scripts that the user had edited; the new text lies beside them as `.new`.
    """

    target: Target
    scripts: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"new": 0, "same": 0, "removed": 0})
    kept: list[str] = field(default_factory=list)


def read_source(folder: Path, model: Model) -> list[Item]:
    """The items of a dataset folder, each fit for the model.

    Raises:
        WangenError: anything is wrong with it; the message lists everything at once.
    """
    items, problems = scan(folder)
    problems += short_clips(items, model)
    if problems:
        raise WangenError(
            f"the dataset has {len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was published\n"
            + "\n".join(f"  - {problem}" for problem in problems),
            where=str(folder),
        )
    return items


def short_clips(items: Iterable[Item], model: Model) -> list[Problem]:
    """Clips with fewer frames than the model profile's clip length."""
    found = []
    for item in items:
        frames = resampled_frames(read_facts(item.path), model.fps) if item.media == "video" else model.num_frames
        if frames < model.num_frames:
            fitting = (frames - 1) // 4 * 4 + 1
            cure = f"set num_frames = {fitting} in wangen.toml or take it out"
            found.append(
                Problem(item.path, f"has {frames} frames at {model.fps} fps, {model.num_frames} are needed", cure)
            )
    return found


def publish(workspace: Workspace, target: Target, model: Model, slug: str, items: list[Item]) -> Published:
    """Bring one target's bundle of a dataset up to date.

    Raises:
        WangenError: the target cannot be written, or a name does not fit it.
    """
    result = Published(target)
    require_writable(target.folder)
    datasets = target.roots["datasets"]
    size = resolution_name(model)
    media = _reach(target, target.path(datasets, slug, size))
    for folder in (
        media,
        _reach(target, target.path(datasets, slug, f"{size}_cache")),
        _reach(target, target.path(target.roots["outputs"], slug)),
        _reach(target, target.path(target.roots["logs"])),
    ):
        require_writable(folder)
    _deploy(items, media, result.counts)
    write_text(target.folder / "files" / "tomls" / toml_name(slug, target), dataset_toml(target, model, slug, items))
    _write_scripts(workspace, target, model, slug, result)
    return result


def resolution_name(model: Model) -> str:
    """The name of a resolution's folder: `832x480`, or `512` for a square."""
    width, height = model.resolution
    return str(width) if width == height else f"{width}x{height}"


def dataset_toml(target: Target, model: Model, slug: str, items: Iterable[Item]) -> str:
    """The dataset's TOML for a target: one block for its images, one for its clips, both on one cache."""
    kinds = {item.media for item in items}
    datasets, size = target.roots["datasets"], resolution_name(model)
    media = target.path(datasets, slug, size).replace("\\", "/")
    general = {
        "resolution": list(model.resolution),
        "caption_extension": ".txt",
        "batch_size": 1,
        "enable_bucket": True,
    }
    blocks = []
    for kind in ("image", "video"):
        if kind in kinds:
            clip = {"target_frames": [model.num_frames], "frame_extraction": "head"} if kind == "video" else {}
            blocks.append({f"{kind}_directory": media, "cache_directory": f"{media}_cache", "num_repeats": 1, **clip})
    comment = f"{slug} for {model.title}, written by wangen publish; paths are relative to the folder of the scripts"
    if target.root:
        comment = f"{slug} for {model.title}, written by wangen publish"
    return write_dataset(tuple(blocks), general, comment)


def _reach(target: Target, text: str) -> Path:
    path = target.reach(text)
    if path is None:
        raise WangenError(f"this host cannot see {text}", cure="publish on a machine that does, or leave that root out")
    return path


def _deploy(items: Iterable[Item], folder: Path, counts: dict[str, int]) -> None:
    """Put media and captions into `folder`; remove what an earlier publish wrote and the source no longer has."""
    manifest = folder / MANIFEST
    before = _read_manifest(manifest)
    now: dict[str, list[int]] = {}
    for item in items:
        for source, link in ((item.path, True), (item.caption_path, False)):
            stat = source.stat()
            state = now[source.name] = [stat.st_size, stat.st_mtime_ns]
            destination = folder / source.name
            if before.get(source.name) == state and destination.exists():
                counts["same"] += 1
                continue
            if source.name not in before and destination.exists() and not _same_bytes(source, destination):
                raise WangenError(
                    "a file that wangen did not write is in the way", where=str(destination), cure="move it away"
                )
            _place(source, destination, link=link)
            counts["new"] += 1
    for name in before.keys() - now.keys():
        (folder / name).unlink(missing_ok=True)
        counts["removed"] += 1
    write_text(manifest, json.dumps(now, indent=0, ensure_ascii=False))


def _read_manifest(path: Path) -> Mapping[str, list[int]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return {name: state for name, state in content.items() if Path(name).name == name}


def _same_bytes(one: Path, two: Path) -> bool:
    return one.samefile(two) or (one.stat().st_size == two.stat().st_size and one.read_bytes() == two.read_bytes())


def _place(source: Path, destination: Path, *, link: bool) -> None:
    """Link or copy one file, whole or not at all."""
    temporary = destination.with_name(f".{destination.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        try:
            if not link:
                raise OSError
            os.link(source, temporary)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, temporary)
        temporary.replace(destination)
        temporary.unlink(missing_ok=True)  # renaming a link onto its own file leaves both
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise WangenError(f"cannot publish {source.name}: {error.strerror}", where=str(destination.parent),
                          cure="free space or fix the rights, then publish again") from None  # fmt: skip


def _write_scripts(workspace: Workspace, target: Target, model: Model, slug: str, result: Published) -> None:
    steps = bundle_steps(workspace, target, model, slug)
    for name, chosen in (("train", steps), ("cache", steps[: len(CACHE)])):
        bundle = scripts.Bundle(
            platform=target.platform,
            slug=slug,
            root=target.root,
            venv=target.venv,
            steps=chosen,
            version=version("wangen"),
        )
        for shell in target.platform.shells:
            path = target.folder / f"{name}_{slug}.{shell}"
            outcome = scripts.publish(path, bundle, shell, name)
            result.scripts.append(path.name)
            if outcome == "kept":
                result.kept.append(path.name)
