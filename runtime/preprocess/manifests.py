"""`train.jsonl`, `val.jsonl` and `dropped.jsonl`: one JSON object a line, in the order of videos and times."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wangen.generator.dataset import Problem
from wangen.generator.files import remove, write_text
from wangen.generator.footage import SETTINGS, edited_manifests, text_digest
from wangen.runtime.preprocess.candidates import Window
from wangen.runtime.preprocess.form import Form, Place
from wangen.runtime.preprocess.videos import Known, name_in

log = logging.getLogger("wangen")


@dataclass(frozen=True)
class Outcome:
    """What became of the videos.

    Attributes:
        train: windows that are clips to train on.
        val: those of other videos, to validate with.
        dropped: windows that were left out.
        copies: videos whose bytes are another one's, with the name of that.
        problems: files that cannot be used.
        made: how many clips were written in this run.
    """

    train: Sequence[Window]
    val: Sequence[Window]
    dropped: Sequence[Window]
    copies: Sequence[tuple[Known, str]]
    problems: Sequence[Problem]
    made: int


def write_manifests(outcome: Outcome, form: Form, place: Place, videos: Path) -> None:
    """Write all three; a clip's path is as seen from them, a video's as seen from the folder of videos.

    Both manifests of an earlier run go before one that differs comes: a run that is stopped in between leaves no pair
    in which a video is both trained on and validated with. One that was edited by hand stays, and that is said.

    Raises:
        WangenError: one of them cannot be written.
        OSError: an earlier one cannot be removed.
    """
    texts, edited = {}, edited_manifests(place.folder)
    for path, windows in zip(place.manifests, (outcome.train, outcome.val), strict=True):
        rows = [
            {"file": f"clips/{window.name(form)}", "prompt": window.prompt}
            | _facts(window, form)
            | {"width": form.width, "height": form.height, "signals": window.signals}
            for window in windows
        ]
        texts[path] = _lines(rows)
    for path in edited:
        log.warning("  %s was edited by hand and stays; to have it made again, move it away", path.name)
    ours = [path for path in texts if path not in edited]
    if not all(path.is_file() and path.read_bytes() == texts[path].encode() for path in ours):
        for path in ours:
            remove(path)
    digests = {path.name: text_digest(text.encode()) for path, text in texts.items()}
    digests[SETTINGS] = text_digest(place.settings.read_bytes())
    write_text(place.written, json.dumps(digests) + "\n")
    for path in ours:
        if not path.is_file():
            write_text(path, texts[path])
    write_text(place.folder / "dropped.jsonl", _lines(_dropped(outcome, form, videos)))


def _dropped(outcome: Outcome, form: Form, videos: Path) -> list[dict[str, Any]]:
    """What was left out, and why."""
    dropped = [
        _facts(window, form) | {"prompt": window.prompt, "reasons": window.reasons, "signals": window.signals}
        for window in outcome.dropped
    ]
    for item, first in outcome.copies:
        facts = {"source": item.video.name, "source_digest": item.source.digest}
        dropped.append(facts | {"reasons": [f"copy: the same file as {first}"]})
    for problem in outcome.problems:
        source = name_in(videos, problem.path)
        dropped.append({"source": source, "reasons": [f"problem: {problem.found}"], "do": problem.cure})
    return dropped


def _facts(window: Window, form: Form) -> dict[str, Any]:
    """Where a window comes from. Seconds are counted from the video's first frame."""
    pace = window.footage.pace(form.fps)
    return {
        "source": window.footage.video.name,
        "source_digest": window.footage.source.digest,
        "start_s": round(window.start / pace, 6),
        "end_s": round(window.end / pace, 6),
        "fps": form.fps,
        "frames": window.frames,
    }


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
