"""Run again is resume: a file that holds the very settings of a video is that video, and is not made again.

Nothing beside the files says what is done. The settings hold digests of weights and LoRAs, so that a LoRA that was
trained anew under its old name gives videos of its own.
"""

import json
import os
from collections.abc import Mapping
from glob import escape
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

from wangen.generator.errors import UsageError, WangenError
from wangen.runtime.sampling.output import read_frames, read_settings

State = Literal["made", "torn", "other"]


def state_of(path: Path, settings: Mapping[str, Any]) -> State:
    """What a file is to a video with these settings: that video, what a crash has left of one, or another thing.

    Args:
        path: `.mp4` or `.png`; one that is missing is another thing.
        settings: as they are stored; of the attention kernel `auto` any will do, as only a loaded model knows it.
    """
    wanted = json.loads(json.dumps(settings))
    try:
        told = read_settings(path, "--save_path")
    except UsageError:
        told = None
    if told is not None:
        if wanted["attention"] == "auto":
            wanted["attention"] = told.get("attention")
        if told != wanted:
            return "other"
    try:
        frames = read_frames(path)
    except WangenError:
        return "torn" if path.is_file() and os.access(path, os.R_OK) else "other"
    if told is None:
        return "other"
    return "made" if frames.shape[:3] == (wanted["video_length"], *wanted["video_size"]) else "torn"


def place(path: Path, settings: Mapping[str, Any], *, numbered: bool) -> tuple[Path, bool]:
    """The file of a video, and whether it is there already.

    Args:
        path: its name.
        settings: as they will be stored in it.
        numbered: where the name is another file's, it gets a number; else that file will be replaced.
    """
    names = (path, *sorted(path.parent.glob(f"{escape(path.stem)}-*{path.suffix}"))) if numbered else (path,)
    states = {name: state_of(name, settings) for name in names}
    for name, state in states.items():
        if state == "made":
            return name, True
    if not numbered:
        return path, False
    more = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
    return next(name for name in chain([path], more) if states.get(name) == "torn" or not name.exists()), False
