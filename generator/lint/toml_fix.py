"""A corrected copy of a dataset TOML, beside the one that a script names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.errors import WangenError, read_cure
from wangen.generator.files import write_text
from wangen.generator.lint.script import Call, Script
from wangen.generator.lint.toml import PATH_KEYS, Toml, forward, judge, judge_file, parse, read
from wangen.generator.paths import Machine, PathError, translate
from wangen.generator.signing import same_text, signed, unedited
from wangen.generator.toml_values import longest_clip

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

_CLIPS = ("video_directory", "video_jsonl_file")
_FPS = 16.0
"""Of every model that musubi-tuner trains on clips here."""


@dataclass(frozen=True)
class Copy:
    """A corrected TOML.

    Attributes:
        path: `<name>_wangen.toml` beside the original.
        changes: what is different, in words.
        kept: a file of that name was edited by hand and stays; the new text is in `<name>_wangen.toml.new`.
    """

    path: Path
    changes: tuple[str, ...]
    kept: bool


def mend(script: Script, call: Call, path: Path) -> Copy | None:
    """Write a corrected copy of a TOML that wangen would refuse, or read otherwise; None when it is right as it is.

    Raises:
        WangenError: it has faults that cannot be mended without its owner, who may also have edited every copy.
    """
    own = replace(call, tool="wangen")
    try:
        toml = read(path)
    except OSError as error:
        raise WangenError(f"cannot read the TOML: {error.strerror}", where=str(path), cure=read_cure(error)) from None
    foreign = call.tool != "wangen"
    if not judge_file(script, own, toml) and not (foreign and _of_files_rate(toml.general, toml.blocks)):
        return None
    text, changes = _mended(script, toml, foreign)
    rest = judge(script, own, parse(path, text))
    if rest:
        raise WangenError(f"the TOML cannot be mended: {rest[0].found}", where=f"{path.name}:{rest[0].line}",
                          cure=rest[0].cure)  # fmt: skip
    copy = path.with_name(f"{path.stem.removesuffix('_wangen')}_wangen.toml")
    target, kept = copy, False
    if copy.exists():
        data = copy.read_bytes()
        if not unedited(data) and not same_text(data, text):
            target, kept = copy.with_name(f"{copy.name}.new"), True
            if target.exists() and not unedited(target.read_bytes()):
                raise WangenError(f"{copy.name} and {target.name} were edited by hand", where=str(copy.parent),
                                  cure=f"move {target.name} away, then run lint --fix again")  # fmt: skip
    write_text(target, signed(text))
    return Copy(copy, tuple(f"{path.name}: {change}" for change in changes), kept)


def _mended(script: Script, toml: Toml, foreign: bool) -> tuple[str, list[str]]:
    import tomlkit

    changes: list[str] = []
    text = forward(toml.text)
    if text != toml.text:
        changes.append("backslashes in double quotes became /")
    try:
        document = tomlkit.parse(text)
    except tomlkit.exceptions.ParseError as error:
        raise WangenError(f"the TOML cannot be mended: {error}", where=str(toml.path), cure="mend that line") from None
    _tables(script, document, changes, foreign)
    return tomlkit.dumps(document), changes


def _tables(script: Script, document: "TOMLDocument", changes: list[str], foreign: bool) -> None:
    general: Any = document.get("general", {})
    blocks: Any = document.get("datasets", [])
    moved = general.pop("cache_directory", None) if isinstance(general, dict) else None
    if moved is not None:
        changes.append("cache_directory left [general]")
    tables = [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
    for table in [general, *tables]:
        if isinstance(table, dict):
            _values(script, table, changes)
    for block in tables:
        _cache(block, moved, changes)
    for block in _of_files_rate(general if isinstance(general, dict) else {}, tables) if foreign else ():
        block["source_fps"] = _FPS
        changes.append(f"source_fps is {_FPS}: all frames, as musubi-tuner takes them")


def _of_files_rate(general: Mapping[str, Any], blocks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of clips of which musubi-tuner takes every frame, and wangen those of the model's rate."""
    return [block for block in blocks if "source_fps" not in {*general, *block} and not block.keys().isdisjoint(_CLIPS)]


def _values(script: Script, table: dict[str, Any], changes: list[str]) -> None:
    """Mend paths, clip lengths and the caption's ending of one table."""
    for key in PATH_KEYS:
        path = table.get(key)
        if isinstance(path, str):
            plain = _path(script, str(path))
            if plain != path:
                table[key] = plain
                changes.append(f"{key} is {plain}")
    lengths = table.get("target_frames")
    items = lengths if isinstance(lengths, list) else [lengths]
    numbers = [int(item) for item in items if isinstance(item, int) and item > 0]
    if numbers and len(numbers) == len(items):
        whole = sorted({longest_clip(number) for number in numbers})
        if whole != sorted(numbers):
            table["target_frames"] = whole
            changes.append(f"target_frames is {whole}")
    extension = table.get("caption_extension")
    if isinstance(extension, str) and extension and not extension.startswith("."):
        table["caption_extension"] = f".{extension}"
        changes.append(f"caption_extension is .{extension}")


def _path(script: Script, path: str) -> str:
    """A path with forward slashes, as the script's system writes it."""
    plain = path.replace("\\", "/") if script.shell != "sh" or re.match(r"[A-Za-z]:|.*\\", path) else path
    windows, wsl = Machine(kind="windows"), Machine(kind="wsl")
    try:
        if script.shell == "sh" and re.match(r"[A-Za-z]:/", plain):
            return translate(plain, windows, wsl)
        if script.shell != "sh" and re.match(r"/mnt/[a-z]/", plain):
            return translate(plain, wsl, windows).replace("\\", "/")
    except PathError:
        pass  # it stays, and the judge names it
    return plain


def _cache(block: dict[str, Any], moved: object, changes: list[str]) -> None:
    """A cache folder of its own for each block, beside the media."""
    media = next((str(block[key]) for key in ("image_directory", "video_directory") if key in block), "")
    cache = str(block.get("cache_directory", moved or ""))
    plain = cache.rstrip("/").casefold()
    if media and (not plain or plain == media.rstrip("/").casefold()):
        cache = f"{media.rstrip('/')}_cache"
    if cache and cache != block.get("cache_directory"):
        block["cache_directory"] = cache
        changes.append(f"cache_directory is {cache}")
