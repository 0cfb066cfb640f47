"""The raw 1X World Model data (v2.0): shards of mp4 with each frame's segment and robot state, checked before use.

    train_v2.0_raw/                          val_v2.0_raw/
      metadata.json   num_shards, hz           metadata.json
      videos/video_0.mp4                       video_0.mp4
      segment_indices/segment_idx_0.bin        segment_idx_0.bin    int32 [frames]
      robot_states/states_0.bin                states_0.bin         float32 [frames, 25]
      metadata/metadata_0.json                 metadata_0.json      shard_num_frames

Frame i of a shard has segment index i and state i. Frames of one segment follow each other in time; between two
segments the picture jumps.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wangen.generator.dataset import MediaFacts, Problem, read_facts
from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.excerpts import Excerpt
from wangen.generator.install import require_library
from wangen.runtime.progress import progress

if TYPE_CHECKING:
    import numpy as np

    States = np.ndarray[Any, np.dtype[np.float32]]

Split = Literal["train", "val"]
STATE_SIZE = 25
"""Numbers of a robot state: 21 joint angles, two hands, and the driving and turning speed."""

_METADATA = "metadata.json"
_SPLIT_FOLDER = "{split}_v2.0_raw"
_NUM_BYTES = 4
"""Of an int32 and of a float32."""
_AGAIN = "download it again"
_SHOWN = 20
"""Problems that are said one by one."""
_AT_ONCE = 1000
"""Shards that are read before it is asked whether so much is wrong that the others need not be looked at."""


@dataclass(frozen=True)
class Shard:
    """One video with what is known of its frames.

    Attributes:
        number: counted from 0.
        video: the mp4.
        segments: int32 [frames], the segment of each frame.
        states: float32 [frames, 25].
        facts: of the video; its `num_frames` is that of all three.
    """

    number: int
    video: Path
    segments: Path
    states: Path
    facts: MediaFacts


@dataclass(frozen=True)
class RawData:
    """One split; `hz` is frames per second as its metadata says, 0.01 to 1000; None where it says none."""

    folder: Path
    shards: tuple[Shard, ...]
    hz: float | None


def read_raw_data(source: Path, split: Split) -> RawData:
    """One split of the data, every file of it found and of the size that the others say.

    Args:
        source: the folder that holds `metadata.json`, or the one above it with both splits.
        split: which of both, when the folder holds both.

    Raises:
        UsageError: there is no such data in the folder, or it is the other split's.
        WangenError: files are missing, cannot be read or disagree; they are named and counted, but not
            beyond the shards where they become many.
    """
    folder = _split_folder(source, split)
    about = _read_json(folder / _METADATA)
    num_shards = _number(about, "num_shards", folder / _METADATA)
    found = list[tuple[Shard | None, list[Problem]]]()
    problems = list[Problem]()
    with ThreadPoolExecutor() as pool, progress("shards", num_shards) as advance:
        while len(found) < num_shards and len(problems) <= _SHOWN:
            some = range(len(found), min(len(found) + _AT_ONCE, num_shards))
            for read in pool.map(lambda number: _read_shard(folder, number), some):
                found.append(read)
                problems += read[1]
                advance(1, "")
    shards = tuple(shard for shard, _ in found if shard)
    total = sum(shard.facts.num_frames for shard in shards)
    if not problems and about.get("num_images", total) != total:
        fact = f"says num_images {about['num_images']}, the shards have {many(total, 'frame')}"
        problems.append(Problem(folder / _METADATA, fact, _AGAIN))
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems[:_SHOWN])
        rest = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        rest += f"; shards from {len(found)} on were not looked at" if len(found) < num_shards else ""
        raise WangenError(f"the data has {many(len(problems), 'problem')}:\n{listed}{rest}", where=str(folder))
    hz = about.get("hz")
    rate = float(hz) if isinstance(hz, int | float) and not isinstance(hz, bool) and 0.01 <= hz <= 1000 else None
    return RawData(folder, shards, rate)


def segments_of(shard: Shard) -> list[tuple[int, int]]:
    """The segments of a shard as (first frame, frame after the last), in their order.

    A segment is an unbroken run of one index: an index that comes back later begins another one.
    """
    import numpy as np

    indices = np.fromfile(shard.segments, "<i4")
    borders = [0, *(np.flatnonzero(np.diff(indices)) + 1).tolist(), len(indices)]
    return list(pairwise(borders))


def read_states(path: Path, excerpt: Excerpt) -> "States":
    """The robot states of a clip's frames, float32 [excerpt.count, 25].

    Args:
        path: the shard's `states_N.bin`, which a line of the manifest calls `robot_states`.
        excerpt: which frames the line takes.

    Raises:
        WangenError: the file cannot be read, or ends before the last of them.
    """
    import numpy as np

    numbers = excerpt.numbers()
    offset, wanted = numbers[0] * STATE_SIZE, (numbers[-1] - numbers[0] + 1) * STATE_SIZE
    try:
        states = np.fromfile(path, "<f4", count=wanted, offset=offset * _NUM_BYTES)
    except OSError as error:
        raise WangenError(f"cannot be read: {error.strerror}", where=str(path), cure=_AGAIN) from None
    if len(states) < wanted:
        raise WangenError(f"ends before the state of frame {numbers[-1]}", where=str(path), cure=_AGAIN)
    return states.reshape(-1, STATE_SIZE)[:: excerpt.step].astype(np.float32)


def _split_folder(source: Path, split: Split) -> Path:
    other: Split = "val" if split == "train" else "train"
    if source.resolve().name == _SPLIT_FOLDER.format(split=other):
        raise UsageError(f"is the folder of the other split, and --split is {split}", where=str(source),
                         cure=f"--split {other}, or the other folder")  # fmt: skip
    below = source / _SPLIT_FOLDER.format(split=split)
    for folder in (source, below):
        if (folder / _METADATA).is_file():
            return folder
    raise UsageError(f"holds neither {_METADATA} nor {below.name}/{_METADATA}", where=str(source),
                     cure="give the folder of the raw data as it was downloaded, worldmodel_raw_data")  # fmt: skip


def _read_shard(folder: Path, number: int) -> tuple[Shard | None, list[Problem]]:
    """A shard, or what is wrong with it."""
    places = {"videos": f"video_{number}.mp4", "segment_indices": f"segment_idx_{number}.bin",
              "robot_states": f"states_{number}.bin", "metadata": f"metadata_{number}.json"}  # fmt: skip
    files = [_place(folder, below, name) for below, name in places.items()]
    if missing := [path for path in files if not path.is_file()]:
        return None, [Problem(path, f"is not there (shard {number})", _AGAIN) for path in missing]
    video, segments, states, metadata = files
    try:
        num_frames = _number(_read_json(metadata), "shard_num_frames", metadata)
        facts = read_facts(video)
    except WangenError as error:
        return None, [Problem(Path(error.where), error.found, error.cure or _AGAIN)]
    problems = [*_wrong_size(segments, num_frames, 1, metadata), *_wrong_size(states, num_frames, STATE_SIZE, metadata)]
    if facts.num_frames != num_frames:
        fact = f"has {many(facts.num_frames, 'frame')}, {metadata.name} says {num_frames}"
        problems.append(Problem(video, fact, _AGAIN))
    return (None if problems else Shard(number, video, segments, states, facts)), problems


def _place(folder: Path, below: str, name: str) -> Path:
    """Where a file lies: in the folder of its kind, or beside the others as in the validation split."""
    return folder / below / name if (folder / below).is_dir() else folder / name


def _wrong_size(path: Path, num_frames: int, width: int, metadata: Path) -> Iterator[Problem]:
    """A file of `width` numbers for each frame that has another size."""
    found, wanted = path.stat().st_size, num_frames * width * _NUM_BYTES
    if found != wanted:
        each = f"{width} numbers" if width > 1 else "one number"
        fact = f"has {found} bytes: {many(num_frames, 'frame')} as {metadata.name} says, {each} each, are {wanted}"
        yield Problem(path, fact, _AGAIN)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise WangenError(f"cannot be read: {error.strerror}", where=str(path), cure=_AGAIN) from None
    except (ValueError, RecursionError) as error:
        raise WangenError(f"is not JSON ({error})", where=str(path), cure=_AGAIN) from None
    if not isinstance(values, dict):
        raise WangenError("is no JSON object", where=str(path), cure=_AGAIN)
    return values


def _number(values: dict[str, Any], key: str, path: Path) -> int:
    """A count above 0 that a metadata file says."""
    number = values.get(key)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise WangenError(f"{key} must be a whole number from 1 on, got {json.dumps(number)[:40]}", where=str(path),
                          cure=_AGAIN)  # fmt: skip
    return number


def require_readers() -> None:
    """Refuse to start without the libraries that read videos and arrays.

    Raises:
        WangenError: one is not installed.
    """
    for library in ("av", "numpy"):
        require_library(library)
