"""Media and captions -> what the media folder of a bundle shall hold, compared with what it holds; nothing is written.

A file that somebody changed in the bundle stays, and one that wangen did not write is never replaced.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from wangen.generator.dataset import CAPTION, Problem, folded
from wangen.generator.dataset_settings import DatasetSettings
from wangen.generator.errors import WangenError
from wangen.generator.files import same_bytes
from wangen.generator.publish import manifest
from wangen.generator.publish.captions import with_trigger
from wangen.generator.publish.manifest import COARSE_NS, UNKNOWN, FileState, Manifest, Record
from wangen.generator.publish.resize import RECIPE, bake, smaller_size
from wangen.generator.publish.source import Source
from wangen.profiles import Model


class Wanted(NamedTuple):
    """A file that the media folder shall hold.

    Attributes:
        origin: the source.
        text: its content when it is a caption.
        size: (width, height) in pixels when it is a smaller copy.
        made_of: what it is made from, as in the manifest.
        num_bytes: of the source.
        state: of a media file's source.
    """

    origin: Path
    text: bytes | None
    size: tuple[int, int] | None
    made_of: str
    num_bytes: int
    state: FileState | None = None

    @property
    def mtime_ns(self) -> int:
        """Modification time of a media file's source."""
        return self.state.mtime_ns if self.state else UNKNOWN


@dataclass
class FolderPlan:
    """What publishing has to do in one media folder.

    Attributes:
        folder: the media folder.
        wanted: file name -> what it shall be.
        known: the manifest.
        new: names that are not there.
        changed: names whose content is another one.
        kept: names whose content somebody changed in the bundle, so that it stays.
        copied: media whose content is right and whose time is not the manifest's, as after a copy of the bundle.
        gone: names that the dataset has no longer.
        renamed: (old, new) names that differ in letter case or Unicode form only.
        problems: what forbids it.
        placed: new files that are there by now.
    """

    folder: Path
    wanted: dict[str, Wanted]
    known: Manifest
    new: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    placed: list[Path] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.new or self.changed or self.copied or self.gone or self.renamed or self.known.before)

    @property
    def num_same(self) -> int:
        """How many files are as they shall be."""
        return len(self.wanted.keys() - {*self.new, *self.changed, *self.kept})


def make_folder_plan(
    folder: Path, source: Source, model: Model, settings: DatasetSettings, size: tuple[int, int]
) -> FolderPlan:
    """Compare a media folder with what it shall hold; nothing is written.

    Args:
        folder: the media folder as this host sees it.
        source: the dataset.
        model: its bucket step counts for smaller copies.
        settings: trigger word, and whether smaller copies are made.
        size: the folder's resolution as (width, height) in pixels.

    Raises:
        WangenError: a source, the folder or its manifest cannot be read.
    """
    known = manifest.read(folder)
    plan = FolderPlan(folder, _wanted(source, model, settings, size), known)
    listing = _listing(folder)
    own = _own_folders(folder, source)
    # A bundle that is its own source is the user's: what misses its media there waits for them.
    gone = [name for name in known.names() - plan.wanted.keys() if name in listing and not own]
    by_fold = {folded(name): name for name in gone if known.match(folder / name)}
    for name, wanted in plan.wanted.items():
        record, path = known.files.get(name), folder / name
        if own and wanted.origin.parent in own and wanted.origin.name == name:
            continue  # the original itself
        if name in listing:
            done = record and record.made_of == wanted.made_of and record.size != UNKNOWN
            if record and done and name not in known.before:
                _look_again(plan, name, source, wanted, record)
            else:
                _judge(plan, name, source, wanted)
        elif folded(name) in by_fold:
            plan.renamed.append((by_fold[folded(name)], name))
            plan.changed.append(name)
        elif listing and os.path.lexists(path):  # a name that differs in case only, on Windows
            plan.problems.append(_in_the_way(path))
        else:
            plan.new.append(name)
    moved = {old for old, _ in plan.renamed}
    for name in gone:
        if name not in moved:
            ours = known.match(folder / name) or _is_link(folder / name, source)
            (plan.gone if ours else plan.kept).append(name)
    if own and (settings.resize or settings.trigger):
        found = "the source is this bundle's own folder, where --resize and --trigger would change the originals"
        plan.problems.append(Problem(folder, found, "give the folder with the originals as --source"))
    return plan


def _own_folders(folder: Path, source: Source) -> set[Path]:
    """The folders of the source that are the media folder itself."""
    parents = {item.path.parent for item in source.items} | {item.caption_path.parent for item in source.items}
    return {parent for parent in parents if folder.is_dir() and parent.samefile(folder)}


def _look_again(plan: FolderPlan, name: str, source: Source, wanted: Wanted, record: Record) -> None:
    """The manifest says that a file is the wanted one: it is opened only where its size or time says otherwise.

    Its source may be another file of the same size and time as well: names that were swapped, an edit that keeps both.
    """
    path, untouched, known_by_file = plan.folder / name, False, True
    with suppress(OSError):
        stat = path.stat()
        if wanted.state is None:
            untouched = stat.st_mtime_ns + COARSE_NS < plan.known.written_ns
        else:
            # A publish that was interrupted has left no digest.
            untouched = abs(stat.st_mtime_ns - record.mtime_ns) <= COARSE_NS and bool(record.source_digest)
            is_link = wanted.state.node == FileState.of(stat).node
            known_by_file = is_link or record.source_file == wanted.state.file
        if untouched and known_by_file and stat.st_size == record.size:
            return
    if not (known_by_file or _holds(wanted.origin, record.source_digest) or _same_content(wanted, path)):
        _judge(plan, name, source, wanted)
    elif not (plan.known.match(path) or _same_content(wanted, path)):
        plan.kept.append(name)
    elif wanted.text is None:
        plan.copied.append(name)


def _holds(path: Path, digest: str) -> bool:
    """Whether a file has this digest, which may not be known."""
    try:
        return bool(digest) and manifest.media_digest(path) == digest
    except OSError:
        return False


def _judge(plan: FolderPlan, name: str, source: Source, wanted: Wanted) -> None:
    """A file of that name is there, and the manifest does not say that it is the wanted one."""
    path = plan.folder / name
    if name not in plan.known.names():
        if _same_content(wanted, path):
            plan.changed.append(name)
        else:
            plan.problems.append(_in_the_way(path))
    elif plan.known.match(path) or _same_content(wanted, path) or _is_link(path, source):
        plan.changed.append(name)
    else:
        plan.kept.append(name)


def _is_link(path: Path, source: Source) -> bool:
    """Whether a file is another name of one of the originals, so that a change of it is theirs."""
    with suppress(OSError):
        stat = path.stat()
        if stat.st_nlink > 1:
            return FileState.of(stat).node in {state.node for state in source.states.values()}
    return False


def _in_the_way(path: Path) -> Problem:
    return Problem(path, "a file that wangen did not write is in the way", f"move it away from {path.parent}")


def _wanted(source: Source, model: Model, settings: DatasetSettings, size: tuple[int, int]) -> dict[str, Wanted]:
    """What is published, by its name in the bundle; a caption gets the ending that the TOML names."""
    found = {}
    for published, item in source.named:
        facts = source.facts[item.path]
        smaller = None
        if settings.resize and item.media == "image":
            smaller = smaller_size(facts.width, facts.height, size, model.bucket_step)
        state = source.states[item.path]
        made_of = f"{state.num_bytes} {state.mtime_ns}"
        if smaller:
            made_of += f" {RECIPE} {smaller[0]}x{smaller[1]}"
        found[published] = Wanted(item.path, None, smaller, made_of, state.num_bytes, state)
        if not item.captions:  # a control image or a mask
            continue
        text = with_trigger(item.caption, settings.trigger).encode()
        name = item.path.stem + CAPTION
        found[name] = Wanted(item.caption_path, text, None, manifest.caption_record(text), len(text))
    return found


def _listing(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))  # noqa: PTH208 - names, not ten thousand paths
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise WangenError(f"cannot list the folder: {error.strerror}", where=str(folder), cure="fix its rights or "
                          "move away what is in its place") from None  # fmt: skip


def _same_content(wanted: Wanted, path: Path) -> bool:
    try:
        if wanted.text is not None:
            return path.read_bytes() == wanted.text
        if path.samefile(wanted.origin):
            return True  # a link, which may become a smaller copy: the original keeps its own name
        content = bake(wanted.origin, wanted.size) if wanted.size else None
        if content is not None:
            return path.read_bytes() == content
        return path.stat().st_size == wanted.num_bytes and same_bytes(path, wanted.origin)
    except OSError:
        return False
