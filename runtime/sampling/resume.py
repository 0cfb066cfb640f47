"""Run again is resume: a file that holds the very settings of a video is that video, and is not made again.

Nothing beside the files says what is done. The settings hold digests of weights and LoRAs, so that a LoRA that was
trained anew under its old name gives videos of its own.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from glob import escape
from itertools import chain, count
from pathlib import Path
from typing import Any

from wangen.generator.errors import WangenError
from wangen.generator.files import place_new
from wangen.runtime.sampling.output import read_frames, read_settings


def is_made(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a file is the video with these settings, and whole.

    Args:
        path: `.mp4` or `.png`, which may be missing.
        settings: as they are stored; of the attention kernel `auto` any will do, as only a loaded model knows it.
    """
    wanted = json.loads(json.dumps(settings))
    try:
        told = read_settings(path, "--save_path")
        if wanted["attention"] == "auto":
            wanted["attention"] = told.get("attention")
        sizes = (wanted["video_length"], *wanted["video_size"])
        return bool(told == wanted and read_frames(path).shape[:3] == sizes)
    except WangenError:
        return False


def place(path: Path, settings: Mapping[str, Any], *, numbered: bool) -> tuple[Path, bool]:
    """The file of a video, and whether it is there already.

    Args:
        path: its name.
        settings: as they will be stored in it.
        numbered: where the name is another file's, it gets a number; else that file will be replaced.
    """
    names = (path, *sorted(path.parent.glob(f"{escape(path.stem)}-*{path.suffix}"))) if numbered else (path,)
    for name in names:
        if is_made(name, settings):
            return name, True
    if not numbered:
        return path, False
    more = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
    return next(name for name in chain([path], more) if not (name.exists() or name.is_symlink())), False


def place_numbered(whole: Path, path: Path, settings: Mapping[str, Any]) -> Path:
    """Move a video to a name that is free at this moment, and return it; nothing moves where it is there already.

    Another run may have taken a name since `place` told it.

    Args:
        whole: its file under a temporary name.
        path: the name without a number.
        settings: as they are stored in it.

    Raises:
        OSError: the disk refused.
    """
    while True:
        name, is_there = place(path, settings, numbered=True)
        if is_there:
            return name
        with suppress(FileExistsError):
            place_new(whole, name)
            return name
