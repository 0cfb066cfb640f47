"""A folder of videos and what is said of them: captions beside them, a table of labels, or a class per folder."""

import csv
import errno
import io
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wangen.generator.dataset import VIDEO_SUFFIXES, BadItemError, Problem, media_of, read_caption
from wangen.generator.errors import UsageError, WangenError, printable, read_cure, unreadable
from wangen.generator.npz import is_npz
from wangen.generator.prepare_steps import Preprocess
from wangen.runtime.sources import Source, relative_name

_VIDEO = ("video", "path", "file", "video_path")
_PROMPT = ("prompt", "caption")
_SEPARATORS = ",;\t"
_MAX_S = 1e9
_SAID_CHARACTERS = 100

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
"""Errors by which no file has a name; any other says nothing of that."""

NO_PROMPT = "has no prompt"


@dataclass(frozen=True)
class Segment:
    """A part of a video that one prompt belongs to.

    Attributes:
        prompt: the text.
        start_s: seconds from the video's first frame.
        end_s: where it ends; None for the video's end.
    """

    prompt: str
    start_s: float = 0.0
    end_s: float | None = None


@dataclass(frozen=True)
class Video:
    """A video with its prompts.

    Attributes:
        path: the file.
        name: the path as seen from the folder of videos, with forward slashes.
        segments: its parts that are used, by start.
    """

    path: Path
    name: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Known:
    """A video that can be read, with its digest and facts."""

    video: Video
    source: Source


def find_videos(options: Preprocess) -> tuple[list[Video], list[Problem]]:
    """The videos that have a prompt, by name, and what is wrong with the others.

    Raises:
        UsageError: a flag is wrong, or the table of labels is none.
        WangenError: the folder holds no videos or cannot be listed.
    """
    _check(options)
    if options.labels:
        labelled, problems = _labelled(options, options.labels)
    else:
        paths = sorted(_walk(options.videos))
        if not paths:
            raise WangenError("no video is in this folder, nor in the folders in it", where=str(options.videos),
                              cure=f"put videos there: {', '.join(sorted(VIDEO_SUFFIXES))}")  # fmt: skip
        labelled, problems = {}, []
        for path in paths:
            try:
                labelled[path] = [Segment(_prompt(path, options))]
            except BadItemError as bad:
                problems.append(bad.problem)
    videos = [Video(path, relative_name(path, options.videos), tuple(sorted(parts, key=_by_start)))
              for path, parts in labelled.items()]  # fmt: skip
    return sorted(videos, key=lambda video: video.name), problems


def name_in(videos: Path, path: Path) -> str:
    """What a file is called: as seen from the folder of videos, one elsewhere by its name alone."""
    return relative_name(path, videos) if path.is_relative_to(videos) else path.name


def _by_start(segment: Segment) -> tuple[float, float, str]:
    return segment.start_s, segment.end_s if segment.end_s is not None else float("inf"), segment.prompt


def _check(options: Preprocess) -> None:
    if not options.videos.is_dir():
        raise UsageError("there is no such folder of videos", where=str(options.videos.absolute()),
                         cure="put the videos there, or name their folder with --videos")  # fmt: skip
    if options.output.resolve().is_relative_to(options.videos.resolve()):
        raise UsageError("the output would lie in the folder of videos, which stays as it is",
                         where=str(options.output), cure="give an --output beside it")  # fmt: skip
    if "{label}" not in options.prompt_template:
        raise UsageError(f"--prompt_template {options.prompt_template!r} has no {{label}}",
                         cure='for example --prompt_template "a person who is {label}"')  # fmt: skip
    prompts = {"prompt_template": options.prompt_template, "default_prompt": options.default_prompt}
    for name, text in prompts.items():
        if text is None:
            continue
        try:
            _whole(text)
        except ValueError as error:
            raise UsageError(f"--{name} {error}", cure="write what the videos show, or leave it out") from None


def _walk(folder: Path) -> Iterator[Path]:
    """The videos in a folder and those in it; hidden ones are left out, and folders that are links are followed once.

    Raises:
        WangenError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise WangenError(f"cannot list the folder: {error.strerror}", where=str(error.filename), cure=read_cure(error))

    seen = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        status = Path(parent).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (
            Path(parent, name)
            for name in names
            if not name.startswith(".") and media_of(name) == "video" and not is_npz(Path(name))
        )


def _prompt(path: Path, options: Preprocess) -> str:
    """The caption beside a video, or else that of its folder's name, or else the one for all.

    Raises:
        BadItemError: there is none, or the caption file is bad.
    """
    caption = path.with_suffix(".txt")
    try:
        return read_caption(caption)
    except FileNotFoundError:
        pass
    label = path.parent.name.replace("_", " ").strip()
    if path.parent != options.videos and label:
        try:
            return _whole(options.prompt_template.replace("{label}", label))
        except ValueError as error:
            raise BadItemError(path, f"the name of its folder {error}", "rename the folder") from None
    if options.default_prompt is not None:
        return options.default_prompt.strip()
    cure = (
        f"write {caption.name} beside it, put it in a folder named for its class, or give --default_prompt or --labels"
    )
    raise BadItemError(path, NO_PROMPT, cure)


def _whole(text: str) -> str:
    """A text without blanks around it. Raises ValueError where it is empty or cannot be written."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a character") from None
    if not text.strip():
        raise ValueError("is empty")
    return text.strip()


def _labelled(options: Preprocess, table: Path) -> tuple[dict[Path, list[Segment]], list[Problem]]:
    """The parts of each video that a table names, and its lines that are wrong."""
    found: dict[Path, list[Segment]] = {}
    first_named: dict[Path, Path] = {}
    problems = []
    for number, line in _rows(table):
        try:
            row = _values(line)
            path = _named(row, options.videos, table)
            segment = _segment(row, options)
            found.setdefault(first_named.setdefault(path.resolve(), path), []).append(segment)
        except ValueError as error:
            problems.append(Problem(table, f"line {number}: {error}", "mend this line"))
    if not found:
        first = f": {problems[0].found}" if problems else ""
        raise WangenError(
            f"the table names no video that can be used{first}",
            where=str(table),
            cure="a line holds video (or path) and prompt or label, and if wanted start_s and end_s",
        )
    return found, problems


def _rows(table: Path) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """The lines of a table that hold something, with their numbers: of csv by column, of jsonl as they are.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        text = table.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read the labels: {error.strerror}", where=str(table), cure="check --labels") from None
    except UnicodeDecodeError:
        raise UsageError("the labels are not UTF-8", where=str(table), cure="save them as UTF-8") from None
    if table.suffix.lower() == ".csv":
        separator = max(_SEPARATORS, key=text.partition("\n")[0].count)
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
        try:
            reader.fieldnames = [name.strip().casefold() for name in reader.fieldnames or ()]
            yield from ((reader.line_num, row) for row in reader)
        except csv.Error as error:
            raise UsageError(f"is no csv: {error}", where=f"{table}, line {reader.line_num}") from None
        return
    # Not splitlines: JSON may hold U+2028 and its like.
    yield from ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _values(line: Mapping[Any, Any] | str) -> Mapping[str, Any]:
    """What a line holds. Raises ValueError where it is no JSON object, or has more columns than the table."""
    if not isinstance(line, str):
        if any(text.strip() for text in line.get(None) or ()):
            raise ValueError("has more columns than the first line: put a text that holds the separator in quotes")
        return line
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(values, dict):
        raise ValueError("is no JSON object")
    return values


def _named(row: Mapping[str, Any], folder: Path, table: Path) -> Path:
    """The video that a line names, from the folder of videos or from the table's own.

    Raises:
        ValueError: there is none.
        WangenError: the system does not say whether it is there.
    """
    text = str(next((row[key] for key in _VIDEO if row.get(key)), "")).strip()
    if not text:
        raise ValueError("names no video")
    said = printable(text if len(text) < _SAID_CHARACTERS else text[:_SAID_CHARACTERS] + "…")
    for name in (text, text.replace("\\", "/")):
        for start in (folder, table.parent):
            path = start / name
            if _is_there(path):
                if is_npz(path) or media_of(path) == "image":
                    raise ValueError(f"{said} is no video")
                return path
    raise ValueError(f"{said} is not there")


def _is_there(path: Path) -> bool:
    """Whether a table names a file; a drive that does not answer is no reason to forget its videos."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except ValueError:  # no file can have such a name
        return False
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise unreadable(path, error) from None


def _segment(row: Mapping[str, Any], options: Preprocess) -> Segment:
    """The part of the video that a line is about. Raises ValueError for one that cannot be."""
    prompt = str(next((row[key] for key in _PROMPT if row.get(key)), "")).strip()
    label = str(row.get("label") or "").strip()
    prompt = prompt or (options.prompt_template.replace("{label}", label) if label else options.default_prompt or "")
    if not prompt:
        raise ValueError("has no prompt and no label")
    try:
        prompt = _whole(prompt)
    except ValueError as error:
        raise ValueError(f"its prompt {error}") from None
    start_s, end_s = _seconds(row, "start_s") or 0.0, _seconds(row, "end_s")
    if start_s < 0 or (end_s is not None and end_s <= start_s):
        raise ValueError(f"start_s {start_s:g} and end_s {end_s} are no part of a video")
    return Segment(prompt, start_s, end_s)


def _seconds(row: Mapping[str, Any], key: str) -> float | None:
    raw = row.get(key)
    if raw is None or raw == "":
        return None
    try:
        value = float(raw)
    except (TypeError, ValueError, OverflowError):
        value = float("nan")
    if not abs(value) < _MAX_S:
        raise ValueError(f"{key} is {printable(str(raw)[:_SAID_CHARACTERS])!r}, no number of seconds")
    return value
