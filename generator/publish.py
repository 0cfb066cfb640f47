"""Items -> the published layout: media, captions, caches, TOML files and scripts, for each target.

Publishing again brings the bundle up to date and touches nothing else: a manifest beside the media remembers what was
written, and only that is ever replaced or removed. Media are hard-linked within one file system and copied otherwise;
captions are always copied. Originals stay as they are.
"""

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from wangen.generator import scripts
from wangen.generator.bundle import CACHE, bundle_steps, toml_name
from wangen.generator.dataset import Item, Problem, media_of, read_facts, scan
from wangen.generator.errors import WangenError
from wangen.generator.files import remove, replace, write_text
from wangen.generator.geometry import too_short
from wangen.generator.paths import toml_path
from wangen.generator.steps import Step
from wangen.generator.tomls import same_text, signed, unedited, write_dataset
from wangen.generator.workspace import Target, Workspace, require_writable
from wangen.profiles import Model

MANIFEST = ".wangen-published.json"
CAPTION = ".txt"

State = list[int]
"""Size and modification time (ns) of a source when it was published; zeros while its file is being written."""


class _Source(NamedTuple):
    """A file to publish."""

    path: Path
    link: bool
    state: State


@dataclass
class Published:
    """What publishing to one target did.

    Attributes:
        target: where.
        scripts: script names.
        counts: `new`, `same`, `removed` media and captions.
        kept: scripts and TOML files that the user had edited, relative to the target's folder; the new text lies
            beside them as `.new`.
        knobs: script -> knob -> (the user's value that stays, the published one).
    """

    target: Target
    scripts: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"new": 0, "same": 0, "removed": 0})
    kept: list[str] = field(default_factory=list)
    knobs: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)


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
    clips = [item.path for item in items if item.media == "video"]
    short = ((path, too_short(read_facts(path), model.num_frames, model.fps)) for path in clips)
    return [Problem(path, *words) for path, words in short if words]


def publish(workspace: Workspace, target: Target, model: Model, slug: str, items: list[Item]) -> Published:
    """Bring one target's bundle of a dataset up to date.

    Raises:
        WangenError: the target cannot be written, a name does not fit it, or a file of the user is in the way.
    """
    result = Published(target)
    made = _scripts(target, slug, bundle_steps(workspace, target, model, slug))
    for path, bundle, name in made:  # what a shell cannot carry is refused before anything is written
        scripts.render(bundle, path.suffix[1:], name)
    datasets = target.roots["datasets"]
    size = resolution_name(model)
    media = _reach(target, target.path(datasets, slug, size))
    for folder in (
        target.folder,
        media,
        _reach(target, target.path(datasets, slug, f"{size}_cache")),
        _reach(target, target.path(target.roots["outputs"], slug)),
        _reach(target, target.path(target.roots["logs"])),
    ):
        require_writable(folder)
    _deploy(items, media, result.counts)
    _write_toml(f"files/tomls/{toml_name(slug, target)}", dataset_toml(target, model, slug, items), result)
    _write_scripts(made, result)
    return result


def resolution_name(model: Model) -> str:
    """The name of a resolution's folder: `832x480`, or `512` for a square."""
    width, height = model.resolution
    return str(width) if width == height else f"{width}x{height}"


def dataset_toml(target: Target, model: Model, slug: str, items: Iterable[Item]) -> str:
    """The dataset's TOML for a target: one block for its images, one for its clips, both on one cache."""
    kinds = {item.media for item in items}
    datasets, size = target.roots["datasets"], resolution_name(model)
    media = toml_path(target.path(datasets, slug, size), target.machine)
    general = {
        "resolution": list(model.resolution),
        "caption_extension": CAPTION,
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
    return signed(write_dataset(tuple(blocks), general, comment))


def _write_toml(name: str, text: str, result: Published) -> None:
    """Write the dataset's TOML; one that the user edited stays, and the new text goes beside it as `.new`."""
    path = result.target.folder / name
    try:
        old = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise WangenError(f"cannot be read: {error.strerror}", where=str(path), cure="fix its rights") from None
    if not old or unedited(old) or same_text(old, text):
        _write_changed(path, text)
        return
    _write_changed(path.with_name(f"{path.name}.new"), text)
    result.kept.append(name)


def _reach(target: Target, text: str) -> Path:
    path = target.reach(text)
    if path is None:
        raise WangenError(f"this host cannot see {text}", cure="publish on a machine that does, or leave that root out")
    return path


def _deploy(items: Iterable[Item], folder: Path, counts: dict[str, int]) -> None:
    """Put media and captions into `folder`; remove what an earlier publish wrote and the source no longer has.

    The manifest names every file before it is written, so that an interrupted publish leaves nothing unknown.
    """
    manifest = folder / MANIFEST
    before = _read_manifest(manifest)
    sources = _sources(items)
    todo = [
        name for name, source in sources.items() if before.get(name) != source.state or not (folder / name).exists()
    ]
    for name in todo:
        destination = folder / name
        if name not in before and destination.exists() and not _same_bytes(sources[name].path, destination):
            raise WangenError(
                "a file that wangen did not write is in the way", where=str(destination), cure="move it away"
            )
    gone = before.keys() - sources.keys()
    counts |= {"new": len(todo), "same": len(sources) - len(todo), "removed": len(gone)}
    if todo or gone:
        _write_manifest(manifest, before | {name: [0, 0] for name in todo})
    for name in gone:  # first, because `Cat.jpg` and `cat.jpg` are one file on Windows and macOS
        _remove(folder / name)
    for name in todo:
        _place(sources[name], folder / name)
    _write_manifest(manifest, {name: source.state for name, source in sources.items()})


def _sources(items: Iterable[Item]) -> dict[str, _Source]:
    """What is published, by its name in the bundle; a caption gets the ending that the TOML names."""
    found = {}
    for item in items:
        caption = item.path.with_suffix(CAPTION).name
        for name, path, link in ((item.path.name, item.path, True), (caption, item.caption_path, False)):
            try:
                stat = path.stat()
            except OSError as error:
                raise WangenError(f"cannot be read: {error.strerror}", where=str(path)) from None
            found[name] = _Source(path, link, [stat.st_size, stat.st_mtime_ns])
    return found


def _read_manifest(path: Path) -> dict[str, State]:
    """What an earlier publish wrote; entries that it cannot have written are not believed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    except OSError as error:
        raise WangenError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if not isinstance(content, dict):
        return {}
    return {
        name: state
        for name, state in content.items()
        if Path(name).name == name and (media_of(Path(name)) or name.endswith(CAPTION)) and isinstance(state, list)
    }


def _write_manifest(path: Path, states: dict[str, State]) -> None:
    _write_changed(path, json.dumps(states, indent=0, sort_keys=True))


def _write_changed(path: Path, text: str) -> None:
    """Write a text file unless it holds that text already."""
    try:
        if path.read_bytes() == text.encode("utf-8"):
            return
    except OSError:
        pass  # missing or unreadable: writing says what is wrong
    write_text(path, text)


def _remove(path: Path) -> None:
    try:
        remove(path)
    except OSError as error:
        raise WangenError(
            f"cannot remove what the dataset no longer has: {error.strerror}", where=str(path), cure="remove it by hand"
        ) from None


def _same_bytes(one: Path, two: Path) -> bool:
    try:
        return one.samefile(two) or (one.stat().st_size == two.stat().st_size and one.read_bytes() == two.read_bytes())
    except OSError:
        return False


def _place(source: _Source, destination: Path) -> None:
    """Link or copy one file, whole or not at all; the manifest that follows makes its name durable."""
    origin = source.path.resolve()
    if destination.exists() and not destination.is_symlink() and origin == destination.resolve():
        return  # the bundle itself is the source
    temporary = destination.with_name(f".wangen-{os.getpid()}.tmp")  # short, because names may be as long as allowed
    try:
        remove(temporary)
        if not source.link or not _linked(origin, temporary):
            _copy(origin, temporary)
        replace(temporary, destination)
        remove(temporary)  # renaming a link onto its own file leaves both
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise WangenError(f"cannot publish {source.path.name}: {error.strerror}", where=str(destination.parent),
                          cure="free space or fix the rights, then publish again") from None  # fmt: skip


def _copy(origin: Path, copy: Path) -> None:
    """Copy a file's bytes so that they survive a power cut."""
    shutil.copyfile(origin, copy)
    with copy.open("rb+") as file:
        os.fsync(file.fileno())


def _linked(origin: Path, link: Path) -> bool:
    """Make a hard link; False on another file system, or on one without links."""
    try:
        os.link(origin, link)
    except OSError:
        return False
    return True


def _scripts(target: Target, slug: str, steps: tuple[Step, ...]) -> list[tuple[Path, scripts.Bundle, str]]:
    """Each script's path, what it runs, and the first word of its name."""
    found = []
    for name, chosen in (("train", steps), ("cache", steps[: len(CACHE)])):
        bundle = scripts.Bundle(
            platform=target.platform,
            slug=slug,
            root=target.root,
            venv=target.venv,
            steps=chosen,
            version=version("wangen"),
        )
        found += [(target.folder / f"{name}_{slug}.{shell}", bundle, name) for shell in target.platform.shells]
    return found


def _write_scripts(made: Iterable[tuple[Path, scripts.Bundle, str]], result: Published) -> None:
    for path, bundle, name in made:
        try:
            outcome = scripts.publish(path, bundle, path.suffix[1:], name)
        except OSError as error:
            raise WangenError(f"cannot write the script: {error.strerror}", where=str(path),
                              cure="free space or fix the rights, then publish again") from None  # fmt: skip
        result.scripts.append(path.name)
        if outcome == "kept":
            result.kept.append(path.name)
        elif changed := scripts.changed_knobs(path.read_bytes()):
            result.knobs[path.name] = changed
