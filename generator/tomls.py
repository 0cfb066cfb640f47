"""Dataset and workspace TOML files: read strictly, written with forward slashes on every platform.

The dataset schema is musubi-tuner's, so that existing files work. Unknown keys are refused with the nearest known one.
"""

import itertools
import logging
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from wangen.generator import manifests
from wangen.generator.dataset import CAPTION
from wangen.generator.errors import UsageError, WangenError, did_you_mean
from wangen.generator.files import read_file
from wangen.generator.manifests import Clips, is_manifest, refuse_other_names
from wangen.generator.resolutions import parse_resolution, resolution_name
from wangen.generator.toml_values import MAX_SIDE, WHITE, FrameExtraction, longest_clip, read_value

log = logging.getLogger("wangen")

CLIP_SIZE, CLIP_FRAMES = (832, 480), 81
"""What Wan 2.1 is made for, in pixels and frames: of a manifest that says no sizes or lengths."""

_SWITCHES = {
    "skip_corrupted_cache": "leave it out: training names damaged entries, and caching encodes them again",
    "multiple_target": "several targets per item are not in this version",
    **dict.fromkeys(("fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post"),
                    "one-frame training is not in this version"),
    **{f"{model}no_resize_control": "leave it out: control images are cut as their target is, or control_resolution "
       "gives them an area of their own" for model in ("", "flux_kontext_", "qwen_image_edit_")},
}  # fmt: skip
"""Keys of musubi-tuner that ask for nothing where they are false -> what to do here."""
_ANSWERS = {
    **_SWITCHES,
    "fp_latent_window_size": "this key belongs to FramePack, not to Wan",
    "qwen_image_edit_control_resolution": "write control_resolution",
}


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """One `[[datasets]]` block: images or videos of a folder or a manifest, and the folder of its cache.

    Attributes:
        directory: the media folder; with a manifest the folder that the manifest lies in.
        media: what is read from it.
        cache_directory: where its cache entries live.
        manifest: the jsonl file that names the media and their captions, instead of a folder of them.
        mixed: its lines may be images and clips; those of the other media are another block's.
        control_directory: control images or videos, by the stems of the media; a manifest names its own.
        mask_directory: masks, by the stems of the media; a manifest names its own.
        control_resolution: area of control images as (width, height) in pixels; None cuts them as their target.
        resolution: bucket area as (width, height) in pixels.
        caption_extension: ending of caption files, with its dot.
        multiple_captions: every line of a caption that is not empty is a caption of its own.
        background_color: what lies behind transparent pictures, as `#rrggbb`.
        batch_size: items per batch.
        num_repeats: how often an item stands in an epoch.
        is_reg: a regularisation set: its loss counts `--prior_loss_weight`.
        enable_bucket: keep each item's aspect ratio; off: everything is cropped to `resolution`.
        bucket_no_upscale: never enlarge an item.
        target_frames: clip lengths in frames, 4n+1.
        frame_extraction: which windows of a video become items.
        frame_stride: step between windows of `slide`, in frames.
        frame_sample: number of windows of `uniform`.
        max_frames: longest clip of `full`, in frames.
        source_fps: frames per second of the videos, when the container's own times are wrong.
    """

    directory: Path
    media: Literal["image", "video"]
    cache_directory: Path
    manifest: Path | None = None
    mixed: bool = False
    control_directory: Path | None = None
    mask_directory: Path | None = None
    control_resolution: tuple[int, int] | None = None
    resolution: tuple[int, int] = (960, 544)
    caption_extension: str = CAPTION
    multiple_captions: bool = False
    background_color: str = WHITE
    batch_size: int = 1
    num_repeats: int = 1
    is_reg: bool = False
    enable_bucket: bool = False
    bucket_no_upscale: bool = False
    target_frames: tuple[int, ...] = (1,)
    frame_extraction: FrameExtraction = "head"
    frame_stride: int = 1
    frame_sample: int = 1
    max_frames: int = 129
    source_fps: float | None = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that the block names: of the media, of its cache, of control media and masks."""
        return tuple(filter(None, (self.directory, self.cache_directory, self.control_directory, self.mask_directory)))


VIDEO_KEYS = {"target_frames", "frame_extraction", "frame_stride", "frame_sample", "max_frames", "source_fps"}
MEDIA_KEYS = ("image_directory", "video_directory", "image_jsonl_file", "video_jsonl_file")
"""What a block of musubi-tuner's is made of: it has one of them."""
MANIFEST = "manifest"
"""The same in ours: a jsonl of images, clips or both, that says their sizes and lengths."""
SOURCES = (*MEDIA_KEYS, MANIFEST)
_BESIDE = ("control_directory", "mask_directory")
_OWN = {*SOURCES, "cache_directory", *_BESIDE}
_SHARED = {f.name for f in fields(DatasetEntry)} - {"directory", "media", "mixed"} - _OWN
_DEFAULTS = {f.name: f.default for f in fields(DatasetEntry)}
KEYS = _SHARED | _OWN
"""Every key of a block; `[general]` may hold all but the paths."""
_PATH_LINE = re.compile(r"""^\s*([\w.-]+)\s*=\s*"([^"]*\\[^"]*)"[^"]*$""")


def load(path: Path, cure: str = "check the path") -> dict[str, Any]:
    """A TOML file as plain values.

    Args:
        path: of the file.
        cure: where it cannot be read.

    Raises:
        WangenError: the file is missing, unreadable or not TOML; the message has the line.
    """
    text = ""
    try:
        text = read_file(path).removeprefix(b"\xef\xbb\xbf").decode("utf-8")
        return tomllib.loads(text)
    except OSError as error:
        raise WangenError(f"cannot read the TOML file: {error.strerror}", where=str(path), cure=cure) from None
    except UnicodeDecodeError:
        raise UsageError("the TOML file is not UTF-8", where=str(path), cure="save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"not valid TOML: {error}", where=str(path), cure=_cure(text, str(error))) from None
    except (RecursionError, ValueError) as error:  # also a number of thousands of digits
        reason = "brackets within brackets without end" if isinstance(error, RecursionError) else error
        raise UsageError(f"not valid TOML: {reason}", where=str(path), cure="mend the file") from None


def _cure(text: str, error: str) -> str:
    r"""What to write instead of `"C:\AI"`, the one mistake that everybody makes, and of JSON.

    >>> _cure('a = 1\nroot = "C:\\Users\\me"', "Invalid hex value (at line 2, column 12)")
    "write root = 'C:/Users/me': a backslash in double quotes starts an escape"
    """
    if text.lstrip().startswith("{"):
        return "it is JSON: write TOML, as [general] and [[datasets]] with a line key = value for each"
    number = re.search(r"at line (\d+)", error)
    lines = text.split("\n")
    found = (
        _PATH_LINE.match(lines[int(number[1]) - 1].rstrip("\r")) if number and int(number[1]) <= len(lines) else None
    )
    if not found:
        return "mend it there"
    path = found[2].replace("\\", "/")
    return f"write {found[1]} = '{path}': a backslash in double quotes starts an escape"


def asks_for_nothing(key: str, value: object) -> bool:
    """Whether this is a switch of musubi-tuner's that is off, as it is by itself."""
    return value is False and key in _SWITCHES


def refuse_unknown(found: Mapping[str, Any], known: set[str], where: str) -> None:
    """Refuse keys outside `known`, with the nearest known one.

    Raises:
        UsageError: naming the first unknown key.
    """
    for key, value in found.items():
        if key not in known and not asks_for_nothing(key, value):
            cure = did_you_mean(key, known, f"known keys: {', '.join(sorted(known))}")
            raise UsageError(f"unknown key {key!r}", where=where, cure=_ANSWERS.get(key, cure))


def read_dataset(path: Path, resolution: str = "all", *, tell: bool = True) -> tuple[DatasetEntry, ...]:
    """The blocks of a dataset TOML, `[general]` merged in, relative paths resolved; or those of a manifest by itself.

    A relative media folder or manifest is looked for in the working folder first, then in the TOML's own, and the log
    says where it was found; relative folders of the cache, of control media and of masks follow it.

    Args:
        path: the TOML, or a manifest.
        resolution: which blocks to take: `all`, or resolutions with commas between them (`256,832x480`); of a
            manifest, whose clips have a size of their own, any.
        tell: log where relative paths start.

    Raises:
        WangenError: missing file, unknown key, wrong value, no block, no block of a resolution that is asked for.
    """
    if is_manifest(path):
        return _at(resolution, _of_manifest(path, manifest_cache(path), {}), path)
    refuse_other_names(path)
    return select(_read_blocks(path, tell=tell), resolution, str(path))


def select(entries: tuple[DatasetEntry, ...], resolution: str, where: str) -> tuple[DatasetEntry, ...]:
    """The blocks of these resolutions: `all`, or names with commas between them.

    Raises:
        UsageError: a name is none, or no block has that resolution.
    """
    if resolution == "all":
        return entries
    wanted = [parse_resolution(name) for name in resolution.split(",")]
    known = dict.fromkeys(entry.resolution for entry in entries)
    for size in wanted:
        if size not in known:
            raise UsageError(
                f"no [[datasets]] block has the resolution {resolution_name(size)}",
                where=where,
                cure=f"it has {', '.join(map(resolution_name, known))}; publish with --resolution for another",
            )
    return tuple(entry for entry in entries if entry.resolution in wanted)


def _read_blocks(path: Path, *, tell: bool) -> tuple[DatasetEntry, ...]:
    values = load(path, "check the path; if publish wrote it, publish again")
    refuse_unknown(values, {"general", "datasets"}, str(path))
    general = values.get("general", {})
    blocks = values.get("datasets", [])
    if isinstance(blocks, dict) or not isinstance(general, dict):
        raise UsageError("[general] is one table and [[datasets]] a list of tables", where=str(path),
                         cure="write [[datasets]] in two pairs of brackets above each block")  # fmt: skip
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, dict) for block in blocks):
        raise UsageError("the dataset TOML has no [[datasets]] block", where=str(path),
                         cure="write [[datasets]] and below it the folder of the media")  # fmt: skip
    for key in general:
        if key in _OWN:
            raise UsageError(f"{key} stands in [general]", where=str(path), cure="write it into each [[datasets]]")
    refuse_unknown(general, _SHARED, f"{path}, [general]")
    entries = [_entries(path, number, general, block) for number, block in enumerate(blocks, 1)]
    for start in dict.fromkeys(_start(found[0], path, block) for found, block in zip(entries, blocks, strict=True)):
        if start and tell:
            log.info("  %s", start)
    return _one_spelling(itertools.chain.from_iterable(entries))


def _one_spelling(entries: Iterable[DatasetEntry]) -> tuple[DatasetEntry, ...]:
    """The entries with each cache folder as the first that names it spells it; others may have `..` or a link."""
    spelled = dict[Path, Path]()
    return tuple(
        replace(entry, cache_directory=spelled.setdefault(Path(os.path.realpath(cache)), cache))
        for entry in entries for cache in [entry.cache_directory]
    )  # fmt: skip


def _start(entry: DatasetEntry, toml: Path, block: Mapping[str, Any]) -> str:
    """Where a block's relative media folder or manifest was found, in words; empty for an absolute one."""
    text = str(next(block[key] for key in SOURCES if key in block))
    found = entry.manifest or entry.directory
    if Path(text).is_absolute():
        return ""
    if not found.exists():
        return f"{text}: not in the working folder {Path.cwd()}, and not in the TOML's own {toml.absolute().parent}"
    if found == Path(text):
        return f"relative paths of {toml.name} start at the working folder {Path.cwd()}"
    return f"relative paths of {toml.name} start at its own folder {toml.absolute().parent}"


def _entries(path: Path, number: int, general: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[DatasetEntry, ...]:
    """What a block says: one entry, or of a manifest with images and clips one for each."""
    where = f"{path}, [[datasets]] number {number}"
    block = {**general, **own}
    refuse_unknown(block, KEYS, where)
    named = [key for key in SOURCES if key in block]
    if len(named) != 1:
        found = f"a block names {' and '.join(named)}" if named else "a block names no media"
        raise UsageError(found, where=where, cure=f"write one of {', '.join(SOURCES)} into each block")
    _refuse_misplaced(own, named[0], where)
    is_video, lines = named[0].startswith("video"), named[0].endswith("jsonl_file")
    media = Path(_path(block, named[0], where))
    if lines and "cache_directory" not in own:
        raise UsageError(f"{named[0]} needs cache_directory", where=where, cure='for example cache_directory = "cache"')
    usual = manifest_cache(media) if named[0] == MANIFEST else media
    cache = Path(_path(block, "cache_directory", where)) if "cache_directory" in block else usual
    beside = {key: Path(_path(block, key, where)) for key in _BESIDE if key in block}
    if media in beside.values():
        raise UsageError(f"control media and masks share the media folder {media}", where=where,
                         cure="keep them in folders of their own")  # fmt: skip
    values = {key: read_value(key, block[key], _DEFAULTS[key], where) for key in _SHARED if key in block}
    if is_video and "target_frames" not in values and values.get("frame_extraction") != "full":
        raise UsageError("a video block needs target_frames", where=where, cure="for example target_frames = [81]")
    base = _base(cache if media.is_absolute() else media, path)
    for key, folder in beside.items():
        values[key] = (_base(folder, path) if media.is_absolute() else base) / folder
    if named[0] == MANIFEST:
        return _of_manifest(base / media, base / cache, values)
    return (DatasetEntry(
        directory=(base / media).parent if lines else base / media,
        media="video" if is_video else "image",
        cache_directory=base / cache,
        manifest=base / media if lines else None,
        **values,
    ),)  # fmt: skip


def manifest_cache(manifest: Path) -> Path:
    """Where the cache of a manifest lies unless a TOML says otherwise: beside it."""
    return manifest.with_name(f"{manifest.stem}_cache")


def _of_manifest(manifest: Path, cache: Path, values: Mapping[str, Any]) -> tuple[DatasetEntry, ...]:
    """A manifest's images and clips as a block each; what `values` does not say, its lines do.

    The resolution is the most frequent size; with clips of one length that is what is cut from each, else each keeps
    its own up to the longest, or to `CLIP_FRAMES` where a line says none and none is longer.

    Raises:
        WangenError: it cannot be read.
    """
    found: list[DatasetEntry] = []
    described = manifests.describe_manifest(manifest) or {"image": Clips(Counter(), Counter(), 0)}
    for media, clips in described.items():
        sizes = [size for size in clips.sizes if max(size) <= MAX_SIDE]
        size = max(sizes, key=lambda size: (clips.sizes[size], size), default=CLIP_SIZE)
        said: dict[str, Any] = {} if "resolution" in values else {"resolution": size, "enable_bucket": True}
        if media == "video" and "target_frames" not in values and values.get("frame_extraction") != "full":
            longest, all_said = max(clips.frames, default=CLIP_FRAMES), clips.frames.total() == clips.number
            if "frame_extraction" in values or (len(clips.frames) == 1 and all_said):
                said |= {"target_frames": (longest_clip(longest),)}
            else:
                most = longest if all_said else max(longest, CLIP_FRAMES)
                said |= {"frame_extraction": "full", "max_frames": longest_clip(most)}
        found.append(DatasetEntry(directory=manifest.parent, media=media, cache_directory=cache, manifest=manifest,
                                  mixed=True, **said | dict(values)))  # fmt: skip
    return tuple(found)


def _at(resolution: str, entries: tuple[DatasetEntry, ...], manifest: Path) -> tuple[DatasetEntry, ...]:
    """A manifest's blocks at these resolutions, those of another size each with a cache folder of its own."""
    if resolution == "all":
        return entries
    sizes = dict.fromkeys(parse_resolution(name, "--resolution") for name in resolution.split(","))
    other = {size: manifest.with_name(f"{manifest.stem}_{resolution_name(size)}_cache") for size in sizes}
    return tuple(
        entry if entry.resolution == size
        else replace(entry, resolution=size, enable_bucket=True, cache_directory=other[size])
        for size in sizes for entry in entries
    )  # fmt: skip


def _refuse_misplaced(own: Mapping[str, Any], source: str, where: str) -> None:
    """Refuse what a block of this source has no use for.

    Raises:
        UsageError: settings of videos for images, or folders of control media or masks beside a manifest.
    """
    lines = source.endswith("jsonl_file") or source == MANIFEST
    if source.startswith("image") and VIDEO_KEYS & own.keys():
        raise UsageError(f"{min(VIDEO_KEYS & own.keys())} belongs to video blocks, this one has {source}",
                         where=where, cure=f"take it out, or use {source.replace('image', 'video')}")  # fmt: skip
    if lines and (beside := sorted(own.keys() & set(_BESIDE))):
        line_key = beside[0].replace("directory", "path")
        raise UsageError(f"{beside[0]} belongs to folders of media, this block has {source}", where=where,
                         cure=f"write {line_key} into the lines of the manifest")  # fmt: skip


def _base(named: Path, toml: Path) -> Path:
    """The folder that relative paths hang from: the working folder unless only the TOML's own has `named`."""
    if named.is_absolute() or named.exists() or not (toml.parent / named).exists():
        return Path()
    return toml.parent


def _path(block: Mapping[str, Any], key: str, where: str) -> str:
    value = block[key]
    if not isinstance(value, str) or not value:
        raise UsageError(f"{key} must be a path in quotes, got {value!r}", where=where)
    if any(ord(character) < 32 for character in value):
        raise UsageError(f"{key} holds a control character: {value!r}", where=where,
                         cure=r"write \ in single quotes, or /: in double quotes \t and \n are no letters")  # fmt: skip
    return value


def write_dataset(entries: tuple[Mapping[str, Any], ...], general: Mapping[str, Any], comment: str) -> str:
    """The text of a dataset TOML; paths must already be in the form the target reads (forward slashes)."""
    import tomlkit

    document = tomlkit.document()
    for line in comment.splitlines():
        document.add(tomlkit.comment(line))
    document.add("general", tomlkit.item(dict(general)))
    blocks = tomlkit.aot()
    for entry in entries:
        table = tomlkit.table()
        table.update(entry)
        blocks.append(table)
    document.add("datasets", blocks)
    return tomlkit.dumps(document)
