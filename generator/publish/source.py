"""The source of a dataset as it is published: a folder or a jsonl -> items fit for the model, and all that is wrong.

What is found out about a media file is kept in a memo, so that an unchanged file is not opened again.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from wangen.generator.dataset import (
    CAPTION,
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    BadItemError,
    Item,
    MediaFacts,
    Problem,
    inspect,
    list_folder,
    media_of,
    name_problem,
    same_names,
)
from wangen.generator.errors import WangenError, read_cure
from wangen.generator.files import remove_left, write_text
from wangen.generator.geometry import too_short
from wangen.generator.install import require_library
from wangen.generator.items import unsuited
from wangen.generator.manifests import is_jsonl
from wangen.generator.npz import is_other_archive
from wangen.generator.publish.beside import in_bundle, taken_folders, with_beside
from wangen.generator.publish.captions import (
    CAPTION_SUFFIXES,
    Caption,
    CaptionFiles,
    choose,
    normal,
    read_manifest,
)
from wangen.generator.publish.manifest import COARSE_NS, FileState
from wangen.profiles import Model

Advance = Callable[[str], None]
"""Called with the name of what was done."""

_NUM_NAMES = 5
_JPEGS = (".jfif", ".jpe", ".jif")
_OTHER_KINDS = (
    *_JPEGS, ".tif", ".tiff", ".gif", ".heic", ".heif", ".jxl", ".psd", ".tga", ".dng", ".ts", ".m2ts", ".3gp", ".ogv",
)  # fmt: skip
"""Endings of pictures and videos that are not read."""


@dataclass(frozen=True)
class Source:
    """A dataset to publish.

    Attributes:
        origin: its folder or jsonl.
        items: media with captions, in the order of their paths.
        facts: of each item's media, by path.
        states: of each item's media, by path.
        left_out: what lies there and is no item, a line each.
        shared: media that share one caption file in the bundle, a line each.
        problems: what forbids publishing it.
        beside: control images and masks by their folder of the bundle, as sources of their own without captions.
        names: what the files of the items are called in the bundle; empty where they keep their own names.
    """

    origin: Path
    items: Sequence[Item]
    facts: Mapping[Path, MediaFacts]
    states: Mapping[Path, FileState]
    left_out: Sequence[str] = ()
    shared: Sequence[str] = ()
    problems: Sequence[Problem] = ()
    beside: "Mapping[str, Source]" = field(default_factory=dict)
    names: Sequence[str] = ()

    @property
    def named(self) -> Iterable[tuple[str, Item]]:
        """The items, each with the name of its file in the bundle."""
        return zip(self.names or [item.path.name for item in self.items], self.items, strict=True)


def read_source(
    origin: Path, model: Model, *, memo: Path | None = None, keep_memo: bool = True, advance: Advance = lambda _: None
) -> Source:
    """The items of a dataset, and everything that is wrong with it.

    Args:
        origin: a folder with media and captions, or a jsonl.
        model: its clip length and frame rate.
        memo: file that remembers what was found out about the media; None remembers nothing.
        keep_memo: write what was found out now into it.
        advance: told of each media file that had to be opened.

    Raises:
        WangenError: the folder cannot be listed, or the library that reads clips is not installed.
    """
    origin = origin.absolute()
    lines = is_jsonl(origin) and not origin.is_dir()
    items, problems, left_out = _from_manifest(origin) if lines else _from_folder(origin)
    items, missing, unused = with_beside(origin, items, model)
    problems += missing
    taken = tuple(f"{name}/" for name in taken_folders(items, origin))
    left_out = [*(line for line in left_out if not line.startswith(taken)), *unused]
    known = _Memo(memo)
    files = dict.fromkeys(path for item in items for path in item.companions)
    facts, unreadable = _read_facts([*(item.path for item in items), *files], known, advance)
    if keep_memo:
        known.write()
    items = [item for item in items if all(path in facts for path in (item.path, *item.companions))]
    problems += [*unreadable, *_clashes(items), *short_clips(items, facts, model), *_unsuited(items, model)]
    if not items and not problems:
        others = f"; it has {'; '.join(left_out[:_NUM_NAMES])}" if left_out else ""
        problems.append(Problem(origin, f"holds no image or video files{others}", "put them here"))
    named, clashes = in_bundle(items, origin)
    beside = {}
    for folder, found in named.items():
        shown = [Item(path, media_of(path) or "image", (), path) for _, path in found]
        beside[folder] = Source(origin / folder, shown, facts, known.states, names=[name for name, _ in found])
    problems = sorted([*problems, *clashes], key=str)
    return Source(origin, items, facts, known.states, left_out, _shared(items), problems, beside)


def _unsuited(items: Iterable[Item], model: Model) -> list[Problem]:
    """Items that the model cannot be trained on; that they have no control images is said already."""
    listed = [item for item in items if item.controls or item.media == "video" or model.condition != "controls"]
    return [Problem(item.path, *wrong) for item in listed if (wrong := unsuited(item, model))]


def short_clips(items: Iterable[Item], facts: Mapping[Path, MediaFacts], model: Model) -> list[Problem]:
    """Clips with fewer frames than the model profile's clip length."""
    clips = [item.path for item in items if item.media == "video"]
    short = ((path, too_short(facts[path], model.num_frames, model.fps)) for path in clips)
    return [Problem(path, *words) for path, words in short if words]


def _from_folder(folder: Path) -> tuple[list[Item], list[Problem], list[str]]:
    entries = list_folder(folder, "check the path: --source, or source in wangen.toml")
    # `cat.jpg.` is no image by its ending; Windows and whoever wrote it think that it is.
    named = [path for path in entries if media_of(path) or media_of(Path(path.name.rstrip(". ") or "-"))]
    named = [path for path in named if not is_other_archive(path)]
    problems = [problem for path in named for problem in name_problem(path)]
    captions: dict[Path, list[Caption]] = {path: [] for path in named if media_of(path) and path.is_file()}
    for manifest in (path for path in entries if is_jsonl(path) and not path.is_dir()):
        lines, wrong = read_manifest(manifest)
        problems += wrong
        for path, found in lines.items():
            captions.setdefault(folder / path.name if path.parent == normal(folder) else path, []).extend(found)
    files = CaptionFiles(entries)
    items = []
    companions = _named_by(captions.values())
    bare = False
    for path, found in captions.items():
        try:
            beside = files.of(path) if path.parent == folder else []
            if not (beside or found) and normal(path) in companions:
                continue
            bare = bare or not (beside or found)
            items.append(choose(path, [*beside, *found]))
        except BadItemError as bad:
            problems.append(bad.problem)
    if bare:
        problems += _lost_captions(folder, files.orphans(captions), entries)
    return sorted(items, key=lambda item: item.path), problems, _left_out(entries, files, {*captions, *companions})


def _lost_captions(folder: Path, orphans: Sequence[Path], entries: Sequence[Path]) -> list[Problem]:
    """Where an image has no caption, one without image may be its: the image was renamed, or is of another kind."""
    others = {path.stem: path for path in entries if path.suffix.lower() in _OTHER_KINDS and path.is_file()}
    unread = [others[path.stem] for path in orphans if path.stem in others]
    problems = [Problem(path, "is of a kind that is not read", _readable_as(path)) for path in unread]
    lost = [path.name for path in orphans if path.stem not in others]
    if lost:
        names = ", ".join(lost[:_NUM_NAMES]) + (", …" if len(lost) > _NUM_NAMES else "")
        found = f"holds captions without their image or video: {names}"
        problems.append(Problem(folder, found, "rename the caption with its image"))
    return problems


def _readable_as(path: Path) -> str:
    return "rename it to .jpg" if path.suffix.lower() in _JPEGS else "save it as .png or .mp4"


def _from_manifest(path: Path) -> tuple[list[Item], list[Problem], list[str]]:
    lines, problems = read_manifest(path)
    items = []
    known = {*lines, *_named_by(lines.values())}
    for media, found in lines.items():
        problems += name_problem(media)
        try:
            items.append(choose(media, found))
        except BadItemError as bad:
            problems.append(bad.problem)
    beside = [entry for entry in list_folder(path.parent) if media_of(entry) and normal(entry) not in known]
    left_out = [f"{entry.name} (no line of {path.name} names it)" for entry in beside]
    return sorted(items, key=lambda item: item.path), problems, left_out


def _named_by(lines: Iterable[Iterable[Caption]]) -> set[Path]:
    """The control images and masks that lines of a jsonl name."""
    return {path for captions in lines for caption in captions for path in caption.companions}


def _left_out(entries: Iterable[Path], files: CaptionFiles, items: Iterable[Path]) -> list[str]:
    """What a dataset folder holds that is no item: other files, captions without media, sub-folders; a line each."""
    taken = {normal(path) for path in items}
    orphans = set(files.orphans(items))
    lines = []
    for path in entries:
        if path.is_dir():
            inside = sum(media_of(entry) is not None and normal(entry) not in taken for entry in path.rglob("*"))
            lines += [f"{path.name}/ ({inside} media files; sub-folders are not read)"] if inside else []
        elif path in orphans:
            lines.append(f"{path.name} (a caption without its image or video)")
        elif is_other_archive(path):
            lines.append(f"{path.name} (holds no frames)")
        elif media_of(path) is None and not is_jsonl(path) and path.suffix.lower() not in CAPTION_SUFFIXES:
            lines.append(f"{path.name} (read are: {', '.join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))})")
    return lines


def _clashes(items: Sequence[Item]) -> list[Problem]:
    """Items whose files would become one in the bundle, where all lie in one folder."""
    problems = same_names(item.path for item in items)
    names: dict[str, Item] = {}
    texts: dict[str, Item] = {}
    for item in items:
        other = names.setdefault(item.path.name, item)
        if other is not item:
            found = f"{other.path.parent.name}/ and {item.path.parent.name}/ hold a file of this name"
            problems.append(Problem(item.path, found, "rename one of them: the bundle has one folder"))
        other = texts.setdefault(item.path.stem, item)
        if other.caption != item.caption:
            found = f"shares the caption file {item.path.stem}.txt with {other.path.name}, and their captions differ"
            problems.append(Problem(item.path, found, "rename one of them"))
    return problems


def _shared(items: Iterable[Item]) -> list[str]:
    """Who edits the one caption of two media edits both: they are said, as it may not be meant."""
    stems: dict[str, list[str]] = {}
    for item in items:
        stems.setdefault(item.path.stem, []).append(item.path.name)
    return [f"{' and '.join(names)} share the caption {stem}{CAPTION}" for stem, names in stems.items() if names[1:]]


def _read_facts(paths: Sequence[Path], memo: "_Memo", advance: Advance) -> tuple[dict[Path, MediaFacts], list[Problem]]:
    facts: dict[Path, MediaFacts] = {}
    unknown, problems = [], []
    for path in paths:
        try:
            recalled = memo.recall(path)
        except OSError as error:
            problems.append(Problem(path, f"cannot be read: {error.strerror}", read_cure(error)))
            continue
        if recalled:
            facts[path] = recalled
        else:
            unknown.append(path)
    if any(media_of(path) == "video" for path in unknown):
        require_library("av")

    def look(path: Path) -> MediaFacts | Problem:
        found = inspect(path)
        advance(path.name)
        return found

    with ThreadPoolExecutor() as pool:
        for path, found in zip(unknown, pool.map(look, unknown), strict=True):
            if isinstance(found, Problem):
                problems.append(found)
            else:
                facts[path] = found
                memo.keep(path, found)
    return facts, problems


class _Memo:
    """Facts of media files that were read to their end, by path, size, times and inode.

    It only saves time: it may be deleted at any moment.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._before = _read_memo(path) if path else {}
        self._now: dict[str, list[int | float]] = {}
        self.states: dict[Path, FileState] = {}

    def recall(self, path: Path) -> MediaFacts | None:
        """The facts of a file that did not change since they were kept.

        Raises:
            OSError: it cannot be looked at.
        """
        record = self._before.get(str(path))
        self.states[path] = FileState.of(path.stat())
        if record is None:
            return None
        shown, before, facts = self._shown_by(path), record[:5], record[5:]
        is_linked_anew = shown[4] != before[4]  # which changes the change time, too
        if shown[:3] != before[:3] or not (shown[3] == before[3] or is_linked_anew):
            return None
        self._now[str(path)] = [*shown, *facts]
        width, height, num_frames, duration_s, rate = facts
        return MediaFacts(int(width), int(height), int(num_frames), float(duration_s), rate=float(rate))

    def keep(self, path: Path, facts: MediaFacts) -> None:
        """Remember what was found, unless the file is so young that it may still change without showing it."""
        state = self.states[path]
        if time.time_ns() - state.mtime_ns > COARSE_NS:
            shown = self._shown_by(path)
            size = (facts.width, facts.height)
            self._now[str(path)] = [*shown, *size, facts.num_frames, facts.duration_s, facts.rate]

    def _shown_by(self, path: Path) -> list[int | float]:
        """What shows a change."""
        state = self.states[path]
        return [state.num_bytes, state.mtime_ns, state.node[1], state.changed_ns, state.num_links]

    def write(self) -> None:
        """Write what belongs to this dataset; a disk that refuses costs time later, no more."""
        if self.path and self._now != self._before:
            with suppress(WangenError):
                remove_left(self.path)
                write_text(self.path, json.dumps(self._now, ensure_ascii=False))


def _read_memo(path: Path) -> dict[str, list[int | float]]:
    """What is remembered; records that this module cannot have written are not believed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {
        key: record
        for key, record in content.items()
        if isinstance(record, list) and len(record) == 10 and all(type(value) in (int, float) for value in record)
    }
