"""Rules about the dataset TOML that a call names, judged by the tool of that call."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wangen.generator.errors import WangenError, did_you_mean
from wangen.generator.files import read_file
from wangen.generator.lint.kinds import Finding
from wangen.generator.lint.script import HERE, UNKNOWN, Call, Script
from wangen.generator.manifests import is_manifest
from wangen.generator.paths import Machine, PathError, translate
from wangen.generator.toml_values import EXTRACTIONS, frames
from wangen.generator.tomls import KEYS as OWN_KEYS
from wangen.generator.tomls import (
    MANIFEST,
    MEDIA_KEYS,
    SOURCES,
    VIDEO_KEYS,
    asks_for_nothing,
    read_dataset,
    refuse_unknown,
)

_BOTH = {"resolution", "caption_extension", "batch_size", "num_repeats", "enable_bucket", "bucket_no_upscale"}
_IMAGE = {"multiple_target", "no_resize_control", "control_resolution", "fp_latent_window_size", "fp_1f_clean_indices",
          "fp_1f_target_index", "fp_1f_no_post", "flux_kontext_no_resize_control", "qwen_image_edit_no_resize_control",
          "qwen_image_edit_control_resolution"}  # fmt: skip
MUSUBI_KEYS = _BOTH | {*MEDIA_KEYS, "cache_directory", "control_directory"} | VIDEO_KEYS | _IMAGE
PATH_KEYS = (*MEDIA_KEYS, MANIFEST, "cache_directory", "control_directory", "mask_directory")
_QUOTED_PATH = re.compile(r'^\s*([\w.-]+)\s*=\s*"([^"\n]*\\[^"\n]*)"')
_BACKSLASHES = re.compile(r'(?m)^(\s*[\w.-]+\s*=\s*")([^"\n]*\\[^"\n]*)(")')
_ENTRY = re.compile(r"\s*([\w-]+|\"[^\"]*\")\s*=")


@dataclass
class Toml:
    """A dataset TOML as far as it can be read.

    Attributes:
        path: the file.
        text: its text.
        values: what it holds; empty when it is no TOML.
        error: why it is none.
        lines: (table, key) -> line; the tables are `general` and the numbers of the blocks.
    """

    path: Path
    text: str
    values: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    lines: dict[tuple[str | int, str], int] = field(default_factory=dict)

    def line(self, table: str | int, key: str = "") -> int:
        """The line of a key, or of its table."""
        return self.lines.get((table, key)) or self.lines.get((table, ""), 1)

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """The `[[datasets]]` blocks that are tables."""
        blocks = self.values.get("datasets", [])
        return [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []

    @property
    def general(self) -> dict[str, Any]:
        """The `[general]` table, empty when there is none."""
        general = self.values.get("general", {})
        return general if isinstance(general, dict) else {}


def locate(script: Script, call: Call, text: str) -> Path | None:
    """The file on this host that a call names; None when it cannot be seen from here."""
    if not text or UNKNOWN in text or "<" in text or "\0" in text:
        return None
    folder = script.path.parent
    cwd = folder if not call.cwd or UNKNOWN in call.cwd else _place(call.cwd, folder)
    for start in dict.fromkeys((cwd, folder)):
        if start is None:
            continue
        path = _place(text, start, here=folder)
        try:
            if path is not None and path.is_file():
                return path
        except (OSError, ValueError):
            return None
    return None


def _place(text: str, start: Path, here: Path | None = None) -> Path | None:
    """A path of a script as this host reaches it."""
    plain = text.replace("\\", "/")
    if plain.startswith(HERE):
        return Path((here or start) / plain.removeprefix(HERE).lstrip("/"))
    if re.match(r"[A-Za-z]:/", plain):
        direct = Path(text)
        if direct.is_absolute():
            return direct
        try:
            return Path(translate(plain, Machine(kind="windows"), Machine(kind="wsl")))
        except PathError:
            return None
    return start / plain


def read(path: Path) -> Toml:
    """A TOML file with the lines of its keys. Raises OSError when the file cannot be read."""
    data = read_file(path).removeprefix(b"\xef\xbb\xbf")
    return parse(path, data.decode("utf-8", "replace").replace("\r\n", "\n"))


def parse(path: Path, text: str) -> Toml:
    """As `read`, for a text at hand."""
    toml = Toml(path, text)
    try:
        toml.values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        toml.error = str(error)
    table: str | int = ""
    number = -1
    for place, line in enumerate(text.split("\n"), 1):
        if re.match(r"\s*\[\[\s*datasets\s*\]\]", line):
            number += 1
            table = number
            toml.lines[table, ""] = place
        elif match := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            table = match[1]
            toml.lines[table, ""] = place
        elif match := _ENTRY.match(line):
            toml.lines.setdefault((table, match[1].strip('"')), place)
    return toml


def datasets(script: Script) -> Iterator[Finding]:
    """Everything about the dataset TOMLs that the calls name."""
    judged: set[tuple[Path, str]] = set()
    for call in script.calls:
        path = locate(script, call, call.value("dataset_config") or "")
        if path is None or path.suffix.lower() == ".json" or (path, call.tool) in judged:
            continue
        judged.add((path, call.tool))
        try:
            toml = read(path)
        except OSError:
            continue
        shown = _shown(path, script.path.parent)
        for finding in judge_file(script, call, toml):
            yield Finding(finding.kind, finding.line, finding.found, finding.cure, finding.grave, shown)


def _shown(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def judge(script: Script, call: Call, toml: Toml) -> list[Finding]:
    """Everything that is wrong with a TOML for the tool of a call."""
    found = list(_slashes(toml))
    if toml.error and not found:
        number = re.search(r"at line (\d+)", toml.error)
        found.append(
            Finding("toml", int(number[1]) if number else 1, f"this is no TOML: {toml.error}", "mend this line")
        )
    if toml.error:
        toml = parse(toml.path, forward(toml.text))  # what else is wrong shows once the backslashes are gone
    return [*found, *_tables(script, call, toml)] if not toml.error else found


def judge_file(script: Script, call: Call, toml: Toml) -> list[Finding]:
    """As `judge`, and what wangen's own reader says about the file where no rule found anything grave."""
    found = judge(script, call, toml)
    if call.tool == "wangen" and not any(finding.severity == "error" for finding in found):
        try:
            read_dataset(toml.path)
        except WangenError as error:
            if not is_manifest(Path(error.where)):  # that may lie on another machine
                found.append(Finding("toml", 1, error.found, error.cure or "mend this value"))
    return found


def _tables(script: Script, call: Call, toml: Toml) -> Iterator[Finding]:
    if not toml.blocks:
        yield Finding("toml", 1, "there is no [[datasets]] block", "write [[datasets]] above the media folder")
    yield from _keys(call, toml)
    for number, block in enumerate(toml.blocks):
        merged = {**toml.general, **block}
        yield from _media(call, toml, number, block, merged)
        yield from _numbers(call, toml, number, merged)
        yield from _caption(call, toml, number, merged)
        yield from _cache(call, toml, number, block)
        yield from _paths(script, call, toml, number, block)
    yield from _shared(call, toml)


def forward(text: str) -> str:
    """The text of a TOML with / for the backslashes in its double-quoted paths."""
    return _BACKSLASHES.sub(lambda match: match[1] + re.sub(r"\\+", "/", match[2]) + match[3], text)


def _slashes(toml: Toml) -> Iterator[Finding]:
    for number, line in enumerate(toml.text.split("\n"), 1):
        match = _QUOTED_PATH.match(line)
        path = match[2].replace("\\\\", "/") if match else ""
        if match and "\\" in path:
            cure = path.replace("\\", "/")
            yield Finding("toml-slashes", number, f"{match[1]}: a backslash in double quotes starts an escape (\\t is "
                          "a tab, \\U a letter)", f'write {match[1]} = "{cure}"')  # fmt: skip


def _keys(call: Call, toml: Toml) -> Iterator[Finding]:
    known = MUSUBI_KEYS if call.tool == "musubi-tuner" else OWN_KEYS
    for key in toml.values:
        if key not in ("general", "datasets"):
            line = toml.line(key) if (key, "") in toml.lines else toml.line("", key)
            yield Finding("toml-key", line, f"{key!r} stands outside [general] and [[datasets]]",
                          "write it into one of them")  # fmt: skip
    for key in toml.general:
        if key in PATH_KEYS or (call.tool == "musubi-tuner" and key in VIDEO_KEYS | _IMAGE):
            yield Finding("toml-key", toml.line("general", key), f"{key} is refused in [general]",
                          "write it into each [[datasets]]")  # fmt: skip
        elif _is_refused(call, key, toml.general[key], known):
            yield _unknown(call, toml.line("general", key), key, known)
    for number, block in enumerate(toml.blocks):
        for key in block:
            if _is_refused(call, key, block[key], known):
                yield _unknown(call, toml.line(number, key), key, known)


def _is_refused(call: Call, key: str, value: object, known: set[str]) -> bool:
    return key not in known and not (call.tool == "wangen" and asks_for_nothing(key, value))


def _unknown(call: Call, line: int, key: str, known: set[str]) -> Finding:
    try:
        refuse_unknown({key: 0}, known, "")
    except WangenError as error:
        if call.tool == "wangen":
            return Finding("toml-key", line, error.found, error.cure)
    return Finding("toml-key", line, f"musubi-tuner refuses the key {key!r}", did_you_mean(key, known, "take it out"))


def _media(
    call: Call, toml: Toml, number: int, block: Mapping[str, Any], merged: Mapping[str, Any]
) -> Iterator[Finding]:
    found = [key for key in (SOURCES if call.tool == "wangen" else MEDIA_KEYS) if key in block]
    if len(found) != 1:
        what = "both " + " and ".join(found) if found else "no folder of images or videos"
        yield Finding("toml-key", toml.line(number, found[1] if found else ""), f"this block names {what}",
                      "give each its own [[datasets]]" if found else "write one")  # fmt: skip
    elif found[0].startswith("image"):
        for key in sorted(VIDEO_KEYS & block.keys()):
            yield Finding("toml-key", toml.line(number, key), f"{key} belongs to blocks of videos",
                          "take it out of this block of images")  # fmt: skip
    elif found[0] != MANIFEST and "target_frames" not in merged and merged.get("frame_extraction") != "full":
        yield Finding("toml-value", toml.line(number), "a block of videos without target_frames takes one frame of "
                      "each", "write target_frames = [81]")  # fmt: skip


def _numbers(call: Call, toml: Toml, number: int, block: Mapping[str, Any]) -> Iterator[Finding]:
    own = call.tool == "wangen"
    line = {key: toml.line(number if (number, key) in toml.lines else "general", key) for key in block}
    fps = block.get("source_fps")
    if fps is not None and not isinstance(fps, float) and not (own and isinstance(fps, int)):
        yield Finding("toml-value", line["source_fps"], f"musubi-tuner refuses source_fps = {fps!r}: it wants a "
                      "decimal point", f"write source_fps = {fps}.0")  # fmt: skip
    lengths = block.get("target_frames")
    if lengths is not None:
        try:
            frames("target_frames", lengths, "")
        except WangenError as error:
            grave = None if own or not error.found.startswith("target_frames must be 4n+1") else "warning"
            what = error.found if own or not grave else f"{error.found}; musubi-tuner rounds it down"
            yield Finding("toml-value", line["target_frames"], what, error.cure or "write [81]",
                          "warning" if grave else None)  # fmt: skip
    mode = block.get("frame_extraction")
    if mode is not None and mode not in EXTRACTIONS:
        yield Finding("toml-value", line["frame_extraction"], f"frame_extraction has no value {mode!r}",
                      f"one of {', '.join(EXTRACTIONS)}")  # fmt: skip
    if mode == "uniform" and block.get("frame_sample", 1) == 1:
        yield Finding("toml-value", line["frame_extraction"], "uniform with one sample is the same as head",
                      "write frame_sample = 4", "warning")  # fmt: skip
    batch = block.get("batch_size", 1)
    videos = any(key.startswith("video_") for key in block)
    if not own and videos and isinstance(batch, int) and batch > 1 and not block.get("enable_bucket"):
        yield Finding("toml-value", line["batch_size"], "videos of different shapes fail in one batch without buckets",
                      "write enable_bucket = true", "warning")  # fmt: skip


def _caption(call: Call, toml: Toml, number: int, block: Mapping[str, Any]) -> Iterator[Finding]:
    folder = any(key in block for key in ("image_directory", "video_directory"))
    extension = block.get("caption_extension")
    table: str | int = number if (number, "caption_extension") in toml.lines else "general"
    if extension is None and folder and call.tool == "musubi-tuner":
        yield Finding("toml-caption", toml.line(number), "without caption_extension musubi-tuner finds no caption",
                      'write caption_extension = ".txt"')  # fmt: skip
    elif isinstance(extension, str) and not extension.startswith("."):
        yield Finding("toml-caption", toml.line(table, "caption_extension"), f"{extension!r} has no dot",
                      f'write caption_extension = ".{extension}"')  # fmt: skip


def _cache(call: Call, toml: Toml, number: int, block: Mapping[str, Any]) -> Iterator[Finding]:
    media = next((block[key] for key in ("image_directory", "video_directory") if key in block), None)
    cache = block.get("cache_directory")
    own = call.tool == "wangen"
    if cache is None and own and MANIFEST in block:
        return  # it lies beside the manifest
    if cache is None:
        jsonl = any(key in block for key in ("image_jsonl_file", "video_jsonl_file"))
        what = "a jsonl block needs" if jsonl else "the cache lands among the media: there is no"
        yield Finding("toml-cache", toml.line(number), f"{what} cache_directory",
                      f'write cache_directory = "{_beside(media)}"', None if own or jsonl else "warning")  # fmt: skip
    elif isinstance(cache, str) and isinstance(media, str) and _same(cache) == _same(media):
        yield Finding("toml-cache", toml.line(number, "cache_directory"), "cache and media share one folder",
                      f'write cache_directory = "{_beside(media)}"', None if own else "warning")  # fmt: skip
    if isinstance(cache, str) and re.search(r"[\[\]]", cache) and not own:
        yield Finding("toml-cache", toml.line(number, "cache_directory"), "with [ or ] in its path musubi-tuner finds "
                      "nothing in the cache", "take the brackets out of the folder's name")  # fmt: skip


def _beside(media: object) -> str:
    return (str(media).replace("\\", "/").rstrip("/") if isinstance(media, str) else "dataset") + "_cache"


def _same(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").removeprefix("./").casefold()


def _shared(call: Call, toml: Toml) -> Iterator[Finding]:
    """musubi-tuner refuses two blocks with one cache; wangen tells their entries apart."""
    seen: dict[str, int] = {}
    for number, block in enumerate(toml.blocks if call.tool == "musubi-tuner" else ()):
        cache = block.get("cache_directory")
        if isinstance(cache, str):
            first = seen.setdefault(_same(cache), number)
            if first != number:
                yield Finding("toml-cache", toml.line(number, "cache_directory"), "another block has this cache "
                              "folder already, which musubi-tuner refuses", "give each block its own")  # fmt: skip


def _paths(script: Script, call: Call, toml: Toml, number: int, block: Mapping[str, Any]) -> Iterator[Finding]:
    for key in PATH_KEYS:
        path = block.get(key)
        if not isinstance(path, str):
            continue
        line = toml.line(number, key)
        plain = path.replace("\\", "/")
        if any(ord(character) < 32 for character in path):
            continue  # named by the rule on slashes
        windows = re.match(r"[A-Za-z]:/", plain) is not None
        if "\\" in path and ("/" in path or script.shell == "sh"):
            what = "mixes / and \\" if "/" in path else "has backslashes, which are no separators here"
            yield Finding("toml-slashes", line, f"{key} {what}", f'write {key} = "{plain}"',
                          None if script.shell == "sh" else "warning")  # fmt: skip
        if windows and script.shell == "sh" and not script.for_git_bash:
            yield Finding("toml-path", line, f"{key} is a Windows path, and the script runs under Linux or WSL",
                          f'in WSL write {key} = "/mnt/{plain[0].lower()}{plain[2:]}"')  # fmt: skip
        elif script.shell != "sh" and re.match("/[^/]", path):
            yield Finding("toml-path", line, f"{key} is a Linux path, and the script runs under Windows",
                          "write the Windows path with forward slashes")  # fmt: skip
        elif plain.startswith("~"):
            yield Finding("toml-path", line, f"{key}: nothing replaces ~ in a TOML", "write the whole path")
        elif not windows and not plain.startswith("/") and call.tool == "musubi-tuner":
            yield from _start(script, call, toml, line, plain, key)


def _start(script: Script, call: Call, toml: Toml, line: int, path: str, key: str) -> Iterator[Finding]:
    """musubi-tuner looks for relative paths in the working folder only, not beside the TOML."""
    cwd = script.path.parent if not call.cwd else _place(call.cwd, script.path.parent)
    beside = toml.path.parent / path
    if cwd is None or UNKNOWN in call.cwd or key == "cache_directory":
        return
    if beside.exists() and not (cwd / path).exists():
        yield Finding("toml-path", line, f"musubi-tuner looks for {path} in the folder the step runs in, and it lies "
                      "beside the TOML", "write the whole path")  # fmt: skip


RULES = (datasets,)
