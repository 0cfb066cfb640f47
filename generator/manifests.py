"""A jsonl manifest -> items: one JSON object a line, for each image or clip.

    {"image_path": "cats/tom.png", "caption": "a cat", "control_path": "lines/tom.png", "mask_path": "masks/tom.png"}
    {"video_path": "walk.mp4", "caption": ["a walk", "somebody walks"]}

Several control images are `control_path_0`, `control_path_1` and so on; other keys are ignored. A relative path starts
at the manifest's own folder, and where nothing lies there at the working folder. Blank lines and a byte order mark are
fine. Each line is an item of its own: a picture that two lines name is trained on with both captions.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wangen.generator.dataset import Item, Media, Problem, media_of, name_fault, split_captions
from wangen.generator.errors import WangenError

_CONTROL = re.compile(r"control_path(?:_([0-9]{1,4}))?")


def read_manifest(path: Path, media: Media, *, multiple_captions: bool = False) -> tuple[list[Item], list[Problem]]:
    """The items of a manifest in the order of its lines, and everything that is wrong with it, by line.

    Args:
        path: the jsonl file.
        media: what its lines hold: `image_path` or `video_path`.
        multiple_captions: every line of a caption is a caption of its own.

    Raises:
        WangenError: the file cannot be read, or is no text in UTF-8.
    """
    text = _text(path)
    if text.lstrip().startswith("["):
        return [], [Problem(path, "is one JSON list", "write one object a line, without brackets and commas around")]
    items: list[Item] = []
    numbers: list[int] = []
    problems = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            items.append(_item(_object(line), media, path, multiple=multiple_captions))
            numbers.append(number)
        except _LineError as bad:
            problems.append(Problem(path, f"line {number}: {bad.found}", bad.cure))
    if not items and not problems:
        problems.append(Problem(path, "holds no lines", f'write {{"{media}_path": "…", "caption": "…"}} for each item'))
    return items, problems + _uneven(items, numbers, path)


class _LineError(Exception):
    """What is wrong with a line, on its way out."""

    def __init__(self, found: str, cure: str = "mend this line") -> None:
        self.found, self.cure = found, cure


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise WangenError(
            f"cannot read the manifest: {error.strerror}", where=str(path), cure="check the path in the dataset's TOML"
        ) from None
    except UnicodeDecodeError:
        raise WangenError("the manifest is not UTF-8", where=str(path), cure="save it as UTF-8") from None


def _object(line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _LineError(f"is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise _LineError("is no JSON object", 'write {"…": "…"}')
    return values


def _item(values: Mapping[str, Any], media: Media, manifest: Path, *, multiple: bool) -> Item:
    key = f"{media}_path"
    other = "image" if media == "video" else "video"
    if key not in values:
        cure = f"use {other}_jsonl_file" if f"{other}_path" in values else f'write "{key}": "…"'
        raise _LineError(f"has no {key}", cure)
    path = _file(values, key, {media}, manifest)
    if fault := name_fault(path.name):
        raise _LineError(f"{path.name}: {fault}", "rename it")
    kinds: set[Media] = {"image"} if media == "image" else {"image", "video"}
    controls = sorted((int(match[1] or -1), name) for name in values if (match := _CONTROL.fullmatch(name)))
    return Item(
        path,
        media,
        _captions(values, multiple=multiple),
        manifest,
        tuple(_file(values, name, kinds, manifest) for _, name in controls),
        _file(values, "mask_path", kinds, manifest) if "mask_path" in values else None,
    )


def _captions(values: Mapping[str, Any], *, multiple: bool) -> tuple[str, ...]:
    raw = values.get("caption")
    texts: list[Any] = raw if isinstance(raw, list) else [raw]
    if "caption" not in values or not texts:
        raise _LineError("has no caption", 'write "caption": "…", or a list of them')
    if not all(isinstance(text, str) for text in texts):
        raise _LineError(f"caption must be a text or a list of texts, got {json.dumps(raw)[:40]}")
    if not all(text.strip() for text in texts):
        raise _LineError("its caption is empty", "describe the picture in a sentence")
    return tuple(caption for text in texts for caption in split_captions(text.strip(), multiple=multiple))


def _file(values: Mapping[str, Any], key: str, kinds: set[Media], manifest: Path) -> Path:
    """The file that a line names, which is there and is of one of these kinds by its ending."""
    text = values[key]
    if not isinstance(text, str) or not text:
        raise _LineError(f"{key} must be a path, got {json.dumps(text)[:40]}")
    # A manifest that was written on Windows: elsewhere its backslashes would be part of a name.
    for name in (text, text.replace("\\", "/")):
        for start in (manifest.parent, Path()):
            path = start / name
            if os.path.isfile(path):  # noqa: PTH113 (three times as fast as Path's, for 100,000 lines)
                if media_of(path) not in kinds:
                    raise _LineError(f"{text} is no {' or '.join(sorted(kinds))} by its ending")
                return path
    raise _LineError(
        f"{text if len(text) < 400 else text[:400] + '…'} is not there", "mend the path or take the line out"
    )


def _uneven(items: list[Item], numbers: list[int], manifest: Path) -> list[Problem]:
    """Lines without the control media or the mask that other lines have: training takes them from all or from none."""
    problems = []
    most = max((len(item.controls) for item in items), default=0)
    masked = any(item.mask for item in items)
    for number, item in zip(numbers, items, strict=True):
        if len(item.controls) < most:
            found = f"line {number}: has {len(item.controls)} of the {most} control_path that other lines have"
            problems.append(Problem(manifest, found, "write it, or take it out of the others"))
        if masked and not item.mask:
            problems.append(Problem(manifest, f"line {number}: has no mask_path, other lines have one",
                                    "write it; a white picture masks nothing"))  # fmt: skip
    return problems
