"""Files of prompts, as musubi-tuner reads them: what each prompt says, with every unknown option refused.

A `.txt` has a prompt per line with options behind it (`A cat. --w 832 --h 480 --f 81`), `#` before a comment. A `.json`
is a list of such lines or of tables, a `.toml` a `[prompt]` table of common settings with `[[prompt.subset]]` tables.
"""

import io
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wangen.generator.errors import UsageError, did_you_mean, printable
from wangen.generator.files import read_file
from wangen.generator.formats.strict_json import parse_json

OPTIONS: Mapping[str, str] = {
    "w": "width", "h": "height", "f": "frame_count", "d": "seed", "s": "sample_steps", "g": "guidance_scale",
    "fs": "discrete_flow_shift", "l": "cfg_scale", "lh": "cfg_scale_high_noise", "n": "negative_prompt",
    "i": "image_path", "ei": "end_image_path", "ss": "sample_sampler", "ci": "control_image_path",
}  # fmt: skip
"""Options of a line -> the keys of the tables. `lh` and `ss` are ours: guidance of the high-noise expert, sampler."""

_CONTROL_VIDEO = "control videos belong to Fun-Control models"
_ONE_FRAME = "one-frame sampling is not in this version of wangen"
ELSEWHERE: Mapping[str, str] = {
    "cn": _CONTROL_VIDEO, "control_video_path": _CONTROL_VIDEO, "of": _ONE_FRAME, "one_frame": _ONE_FRAME,
}  # fmt: skip
"""What musubi-tuner's prompt files may hold beside, and why it is refused here."""

_OPTION = re.compile(r"\s--(?=[A-Za-z])")


def entries(path: Path, flag: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each prompt stands, and its values by the keys of `OPTIONS`, and `prompt`.

    Args:
        path: `.txt`, `.toml` or `.json`, in UTF-8.
        flag: that the file was given to, for messages.

    Raises:
        UsageError: the file cannot be read, or an option is unknown.
    """
    try:
        text = read_file(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{flag} cannot be read: {reason}", where=str(path), cure="give another file") from None
    ending = path.suffix.lower()
    try:
        if ending == ".txt":
            yield from _lines(path, text)
        elif ending == ".json":
            yield from _json_entries(path, parse_json(text.encode()))
        elif ending == ".toml":
            yield from _toml_entries(path, tomllib.loads(text))
        else:
            raise UsageError(f"{flag} takes .txt, .toml or .json, not {ending or 'a file without an ending'}",
                             where=str(path), cure="rename it")  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is no {ending[1:].upper()}: {error}", where=str(path), cure="mend it there") from None


def _lines(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):  # at the ends of lines alone
        if line.strip() and not line.lstrip().startswith("#"):
            where = f"{path}, line {number}"
            yield where, parse_line(line, where)


def parse_line(line: str, where: str) -> dict[str, Any]:
    """A prompt with its options, by the keys that the tables have.

    Raises:
        UsageError: an option is unknown, is given twice, or has no value.

    >>> parse_line("A cat, --ears up. --w 832 --n blurry, dark", "")
    Traceback (most recent call last):
        ...
    wangen.generator.errors.UsageError: --ears is no option of a prompt
      do:    one of --w --h --f --d --s --g --fs --l --lh --n --i --ei --ss --ci
    >>> parse_line("A cat. --w 832 --n blurry, dark", "")
    {'prompt': 'A cat.', 'width': '832', 'negative_prompt': 'blurry, dark'}
    """
    prompt, *parts = _OPTION.split(f" {line.strip()}")
    values: dict[str, Any] = {"prompt": prompt.strip()}
    for part in parts:
        name, value = (*part.split(maxsplit=1), "")[:2]
        key = OPTIONS.get(name.lower())
        if name.lower() in ELSEWHERE:
            raise UsageError(f"--{name}: {ELSEWHERE[name.lower()]}", where=where, cure="leave it out")
        if key is None:
            raise UsageError(f"--{printable(name)} is no option of a prompt", where=where,
                             cure=f"one of {' '.join(f'--{option}' for option in OPTIONS)}")  # fmt: skip
        if key in values and key != "control_image_path":
            raise UsageError(f"--{name} is given twice", where=where, cure="give it once")
        if not value.strip():
            raise UsageError(f"--{name} has no value", where=where, cure="write one behind it or leave it out")
        values[key] = (*values.get(key, ()), value.strip()) if key == "control_image_path" else value.strip()
    return values


def _json_entries(path: Path, content: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(content, list):
        raise UsageError("a .json of prompts is a list", where=str(path), cure='write ["A cat. --w 832 --h 480"]')
    for number, entry in enumerate(content, start=1):
        where = f"{path}, entry {number}"
        if isinstance(entry, str):
            yield where, parse_line(entry, where)
        else:
            yield where, _table(entry, where)


def _toml_entries(path: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    common = content.get("prompt")
    if not isinstance(common, Mapping) or set(content) != {"prompt"}:
        raise UsageError("a .toml of prompts has a [prompt] table and nothing else beside it", where=str(path),
                         cure="write [prompt] with what all share, then a [[prompt.subset]] for each")  # fmt: skip
    subsets = common.get("subset", [{}])
    if not isinstance(subsets, list):
        raise UsageError("prompt.subset is no list of tables", where=str(path), cure="write [[prompt.subset]]")
    shared = {key: value for key, value in common.items() if key != "subset"}
    for number, subset in enumerate(subsets, start=1):
        where = f"{path}, prompt.subset {number}"
        yield where, {**_table(shared, f"{path}, [prompt]"), **_table(subset, where)}


def _table(entry: Any, where: str) -> Mapping[str, Any]:
    """A table whose keys are known."""
    if not isinstance(entry, Mapping):
        raise UsageError("this is neither a line nor a table", where=where, cure='write {"prompt": "A cat."}')
    known = ("prompt", *OPTIONS.values())
    for key in entry:
        if key in ELSEWHERE:
            raise UsageError(f"{key}: {ELSEWHERE[key]}", where=where, cure="leave it out")
        if key not in known:
            raise UsageError(f"{printable(key)} is no key of a prompt", where=where,
                             cure=did_you_mean(key, known, f"one of {', '.join(known)}"))  # fmt: skip
    return entry
