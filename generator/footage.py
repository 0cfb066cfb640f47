"""Long videos on the machine that trains: its script cuts them into clips before anything else.

Publishing sees none of them. The dataset's TOML names the manifest that the script's first step writes.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wangen.generator.errors import UsageError
from wangen.generator.geometry import nearest_size
from wangen.generator.paths import Machine, PathError, translate
from wangen.generator.prepare_steps import Preprocess
from wangen.generator.resolutions import resolution_name
from wangen.generator.target import Target, machine_of
from wangen.generator.workspace import FILE, Workspace
from wangen.profiles import Model

CLIPS = "clips"
"""The folder below a dataset's where clips and manifests are made."""

MANIFEST, VAL_MANIFEST = "train.jsonl", "val.jsonl"

PAGES = (MANIFEST, VAL_MANIFEST, "dropped.jsonl", "contact_sheet.html")
"""What stands beside the clips."""

RECORDS, SETTINGS, WRITTEN = ".preprocess", "settings.json", "manifests.json"
"""The folder of what is known of videos and clips, and in it the flags of the last run and digests of its manifests."""

_DAY = r"(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])"
_CLIP = re.compile(rf".+-(?!{_DAY})([0-9a-f]{{8}})-[0-9]{{6,}}\.(?:mp4|npz)")

_FILLED_IN = {
    "videos": "[dataset.NAME] footage", "output": "the dataset's name", "task": "model", "fps": "model",
    "frames": "num_frames, above all sections", "resolution": "[dataset.NAME] resolutions",
}  # fmt: skip
"""Flags that the script's other lines must agree with, and what decides them."""


def cut_footage(
    footage: str, workspace: Workspace, target: Target, model: Model, sizes: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Flags of the step that cuts footage.

    Nothing is kept for `val.jsonl`, unless the workspace says so: `validation_items` holds whole videos out.

    Args:
        footage: the folder, as the target writes it, or relative to the bundle's root.
        workspace: what the user says of the step.
        target: where the script runs.
        model: its clip length is that of the clips.
        sizes: of the dataset's TOML, as (width, height) in pixels; clips are as large as the largest.

    Raises:
        UsageError: the target cannot see the folder, the workspace sets what is decided elsewhere, or the model takes
            no clips, or none of such a size.
    """
    if model.num_frames == 1:
        raise UsageError(f"{model.title} trains on pictures, not on clips", where=footage, cure="choose a video model")
    for name in workspace.steps.get(Preprocess.command, {}):
        if name in _FILLED_IN:
            raise UsageError(f"[steps.{Preprocess.command}]: {name} is not set here", cure="take it out; "
                             f"{_FILLED_IN[name]} decides it", where=str(workspace.folder / FILE))  # fmt: skip
    largest = max(sizes, key=lambda size: size[0] * size[1])
    nearest = nearest_size(largest, model.bucket_step)
    if nearest != largest:
        raise UsageError(f"clips of {resolution_name(largest)} cannot be cut: {model.title} takes multiples of "
                         f"{model.bucket_step}", cure=f"--resolution {resolution_name(nearest)}")  # fmt: skip
    return {
        "videos": seen_from(footage, target, workspace),
        "frames": model.num_frames,
        "resolution": resolution_name(largest),
        "val_share": 0.0,
    }


def seen_from(path: str, target: Target, workspace: Workspace) -> str:
    """The folder of footage, or its labels, as a target writes it; a relative path begins at the bundle's root.

    Raises:
        UsageError: the target cannot see it, or cannot hold such a name.
    """
    wsl = machine_of("wsl", workspace.sections.get("wsl"))
    here = wsl if target.machine.kind == "windows" else target.machine
    writer = here if path.startswith("/") and not path.startswith("//") else Machine(kind="windows")
    try:
        return target.path(translate(path, writer, target.machine))
    except PathError as error:
        first = "" if error.code == "not-visible" else f"{error.cure}, or "
        raise UsageError(f"{target.platform.name} cannot see the footage: {error.found}", where=path,
                         cure=f"{first}publish with --platform for the machines that see it, or put it below the "
                         "bundle's root and give the path from there, such as --footage footage") from None  # fmt: skip


def clip_name(stem: str, digest: str, start: int, suffix: str) -> str:
    """The file name of a clip: the same for the same frames of the same content.

    Args:
        stem: of the video's name.
        digest: of the video's content.
        start: first frame, at the clips' rate.
        suffix: `mp4` or `npz`.

    >>> clip_name("a walk", "0123456789abcdef", 81, "mp4")
    'a_walk-01234567-000081.mp4'
    """
    return f"{clip_stem(stem)}-{digest[:8]}-{start:06}.{suffix}"


def clip_stem(stem: str) -> str:
    """What the names of a video's clips begin with.

    >>> clip_stem("a walk")
    'a_walk'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", stem, flags=re.ASCII)[:40]


def video_of(clip: str) -> str | None:
    """What says which video a clip was cut from, by its name as `clip_name` makes it; None for any other file.

    A day and a time, as telephones name what they record, are no digest and no frame.

    >>> video_of("a_walk-01234567-000081.mp4"), video_of("screen-20240131-101500.mp4")
    ('01234567', None)
    """
    match = _CLIP.fullmatch(clip)
    return match[1] if match else None


def edited_manifests(folder: Path) -> list[Path]:
    """The manifests in the folder of the clips that somebody changed since the step wrote them."""
    written = written_digests(folder)
    found = (folder / name for name in (MANIFEST, VAL_MANIFEST) if written)
    return [path for path in found if path.is_file() and text_digest(path.read_bytes()) != written.get(path.name)]


def written_digests(folder: Path) -> dict[str, str]:
    """What the manifests and the flags of the last run are known by, by their files' names; empty before one ends."""
    try:
        written = json.loads((folder / RECORDS / WRITTEN).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return written if isinstance(written, dict) else {}


def text_digest(data: bytes) -> str:
    """What a manifest, or the flags of a run, are known by."""
    return hashlib.sha256(data).hexdigest()
