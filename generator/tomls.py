"""Dataset and workspace TOML files: read strictly, written with forward slashes on every platform.

The dataset schema is musubi-tuner's, so that existing files work. Unknown keys are refused with the nearest known one.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from wangen.generator.errors import UsageError, WangenError

FrameExtraction = Literal["head", "chunk", "slide", "uniform", "full"]
EXTRACTIONS = ("head", "chunk", "slide", "uniform", "full")

_LATER = {
    "image_jsonl_file": "manifests are not in this version: use image_directory with .txt captions",
    "video_jsonl_file": "manifests are not in this version: use video_directory with .txt captions",
    "control_directory": "control images are not in this version",
    "multiple_target": "several targets per item are not in this version",
    "no_resize_control": "control images are not in this version",
    "control_resolution": "control images are not in this version",
    "fp_latent_window_size": "this key belongs to FramePack, not to Wan",
    "fp_1f_clean_indices": "one-frame training is not in this version",
    "fp_1f_target_index": "one-frame training is not in this version",
    "fp_1f_no_post": "one-frame training is not in this version",
}


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """One `[[datasets]]` block: a folder of images or of videos, and the folder of its cache.

    Attributes:
        directory: the media folder.
        media: what is read from it.
        cache_directory: where its cache entries live.
        resolution: bucket area as (width, height) in pixels.
        caption_extension: ending of caption files, with its dot.
        batch_size: items per batch.
        num_repeats: how often an item stands in an epoch.
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
    resolution: tuple[int, int] = (960, 544)
    caption_extension: str = ".txt"
    batch_size: int = 1
    num_repeats: int = 1
    enable_bucket: bool = False
    bucket_no_upscale: bool = False
    target_frames: tuple[int, ...] = (1,)
    frame_extraction: FrameExtraction = "head"
    frame_stride: int = 1
    frame_sample: int = 1
    max_frames: int = 129
    source_fps: float | None = None


_SHARED = {f.name for f in fields(DatasetEntry)} - {"directory", "media", "cache_directory"}
_KEYS = _SHARED | {"image_directory", "video_directory", "cache_directory"}


def load(path: Path) -> dict[str, Any]:
    """A TOML file as plain values.

    Raises:
        WangenError: the file is missing, unreadable or not TOML; the message has the line.
    """
    try:
        return tomllib.loads(path.read_bytes().removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except OSError as error:
        raise WangenError(f"cannot read the TOML file: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError:
        raise UsageError("the TOML file is not UTF-8", where=str(path), cure="save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        cure = (
            r"write paths with / or in single quotes: '\' starts an escape in \"…\"" if "escape" in str(error) else ""
        )
        raise UsageError(f"not valid TOML: {error}", where=str(path), cure=cure) from None


def refuse_unknown(found: Mapping[str, Any], known: set[str], where: str) -> None:
    """Refuse keys outside `known`, with the nearest known one.

    Raises:
        UsageError: naming the first unknown key.
    """
    for key in found:
        if key not in known:
            near = get_close_matches(key, sorted(known), n=1)
            cure = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise UsageError(f"unknown key {key!r}", where=where, cure=_LATER.get(key, cure))


def read_dataset(path: Path) -> tuple[DatasetEntry, ...]:
    """The blocks of a dataset TOML, `[general]` merged in, relative paths resolved.

    A relative media folder is looked for in the working folder first, then in the TOML's own; its cache folder
    follows it.

    Raises:
        WangenError: missing file, unknown key, wrong value, no block.
    """
    values = load(path)
    refuse_unknown(values, {"general", "datasets"}, str(path))
    general = values.get("general", {})
    refuse_unknown(general, _SHARED, f"{path}, [general]")
    blocks = values.get("datasets", [])
    if not isinstance(blocks, list) or not blocks:
        raise UsageError("the dataset TOML has no [[datasets]] block", where=str(path))
    return tuple(_entry(path, number, {**general, **block}) for number, block in enumerate(blocks, 1))


def _entry(path: Path, number: int, block: Mapping[str, Any]) -> DatasetEntry:
    where = f"{path}, [[datasets]] number {number}"
    refuse_unknown(block, _KEYS, where)
    media = [name for name in ("image", "video") if f"{name}_directory" in block]
    if len(media) != 1:
        raise UsageError("a block needs either image_directory or video_directory", where=where)
    directory = Path(_typed(block, f"{media[0]}_directory", str, where))
    base = _base(directory, path)
    cache = Path(_typed(block, "cache_directory", str, where)) if "cache_directory" in block else directory
    values = {key: _value(key, block[key], where) for key in _SHARED if key in block}
    if media[0] == "video" and "target_frames" not in values and values.get("frame_extraction") != "full":
        raise UsageError("a video block needs target_frames", where=where, cure="for example target_frames = [81]")
    return DatasetEntry(
        directory=base / directory,
        media="image" if media[0] == "image" else "video",
        cache_directory=base / cache,
        **values,
    )


def _base(directory: Path, toml: Path) -> Path:
    """The folder that a relative media folder hangs from: the working folder if it exists there, else the TOML's."""
    if directory.is_absolute() or directory.is_dir() or not (toml.parent / directory).is_dir():
        return Path()
    return toml.parent


def _typed(block: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = block[key]
    if not isinstance(value, kind) or not value:
        raise UsageError(f"{key} must be a {kind.__name__}, got {value!r}", where=where)
    return value


def _value(key: str, raw: Any, where: str) -> Any:
    """One value of a block, checked and brought to the field's type."""
    field = next(f for f in fields(DatasetEntry) if f.name == key)
    default = field.default if field.default is not MISSING else None
    if key == "resolution":
        return sizes(key, raw, where)
    if key == "target_frames":
        return frames(key, raw, where)
    if key == "source_fps":
        if isinstance(raw, int | float) and not isinstance(raw, bool) and raw > 0:
            return float(raw)
        raise UsageError(f"source_fps must be a number above 0, got {raw!r}", where=where)
    if key == "frame_extraction" and raw not in EXTRACTIONS:
        raise UsageError(f"frame_extraction has no value {raw!r}", where=where, cure=f"one of {', '.join(EXTRACTIONS)}")
    if key == "caption_extension" and (not isinstance(raw, str) or not raw.startswith(".")):
        raise UsageError(
            f"caption_extension must begin with a dot, got {raw!r}", where=where, cure='for example ".txt"'
        )
    if isinstance(default, bool) != isinstance(raw, bool):
        raise UsageError(f"{key} must be {'true or false' if isinstance(default, bool) else 'a number'}", where=where)
    return _whole_numbers(key, [raw], where)[0] if isinstance(default, int) and not isinstance(default, bool) else raw


def sizes(key: str, raw: Any, where: str) -> tuple[int, int]:
    """A resolution: one number for a square, or [width, height].

    Raises:
        UsageError: it is neither.
    """
    width, height = _whole_numbers(key, [raw, raw] if isinstance(raw, int) else raw, where, length=2)
    return width, height


def frames(key: str, raw: Any, where: str) -> tuple[int, ...]:
    """Clip lengths in frames, sorted, each 4n+1: one number or a list.

    Raises:
        UsageError: one of them is not 4n+1; the message names the nearest below.
    """
    found = sorted(set(_whole_numbers(key, raw if isinstance(raw, list) else [raw], where)))
    wrong = [number for number in found if number % 4 != 1]
    if wrong:
        raise UsageError(f"{key} must be 4n+1 (1, 5, … 81), got {wrong[0]}", where=where,
                         cure=f"write {max(1, (wrong[0] - 1) // 4 * 4 + 1)}")  # fmt: skip
    return tuple(found)


def _whole_numbers(key: str, raw: Any, where: str, length: int | None = None) -> tuple[int, ...]:
    good = isinstance(raw, list) and raw and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in raw)
    if not good or (length and len(raw) != length):
        raise UsageError(f"{key} must be {length or 'a list of'} whole numbers above 0, got {raw!r}", where=where)
    return tuple(raw)


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
