"""What the steps wrote for a dataset: cache entries, clips, checkpoints, LoRAs, samples, videos, reports.

A file is known by its header, or by what stands in it or beside it, not by its name alone.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from wangen.generator import footage
from wangen.generator.errors import WangenError
from wangen.generator.formats.safetensors import read_safetensors
from wangen.generator.header_keys import FINGERPRINT
from wangen.generator.lock import RUN_LOCKS
from wangen.generator.publish.inventory import Inventory, Part, entries_of
from wangen.generator.run_folder import (
    ANEW,
    BEGUN,
    EVALUATION,
    FIRST_FRAMES,
    LOGS,
    LOSSES,
    METRICS,
    NEWEST,
    PAGE,
    SAMPLE_LIST,
    SAMPLES,
    TRACES,
    VIDEOS,
)
from wangen.generator.run_names import EXPERT_PART, EXPERTS, LORA_PARTS, SAMPLE_PARTS
from wangen.generator.session import report_files
from wangen.generator.steps import STEPS

_ENTRY = re.compile(r".*-[0-9a-f]{20}\.[a-z_]+\.safetensors")
_CACHE_NOTES = re.compile(
    r"\.wangen-[a-z]+(-[0-9a-f]{20}\.[a-z_]+)?\.jsonl?|\.claim-[0-9a-f]{20}(-[0-9a-f]{16})?"
    r"|\.([0-9a-f]{20}(\.index\.safetensors)?|\.wangen-.*|\.claim-.*)-[0-9a-f]{16}([0-9a-f]{8})?\.tmp"
)
_PACK = re.compile(r"[0-9a-f]{20}\.(tar|index\.safetensors)")
_TEMPORARY = re.compile(r"\..*-[0-9a-f]{24}\.tmp")
_STATE = re.compile(r"step-\d{8}(-old)?|\.staging-\d{8}")
_PARTS, _PART_FILES = "parts", re.compile(r"__\d+_\d+\.distcp(\.crc32)?|\.metadata|.*\.tmp")
"""Of a state of weights in parts: the folder, and what it holds."""
_STATE_FILES = re.compile(rf"state\.json|(adapter|optimizer|ema){EXPERT_PART}\.safetensors|.*\.tmp")
_LORA = re.compile(rf"{EXPERT_PART}{LORA_PARTS}\.safetensors")
_MAX_LINE = 1 << 20
_SAMPLE = re.compile(SAMPLE_PARTS)
_TRACE = re.compile(r"steps-\d+-\d+\.json\.gz|\.steps-\d+-\d+\.json\.gz\.tmp\.json\.gz")
_NOTE = re.compile(rf"{EXPERT_PART}\.(wandb|mlflow)-run")
_LOSSES, _FRAME = re.compile(r"[0-9a-f]{20}\.json"), re.compile(r"[0-9a-f]{20}\.png")
_MARKS = {".mp4": b"wangen", ".png": b"wangen", ".json": b'{"settings": '}
"""What stands in a video or picture of ours, and in what is known of it, by the ending."""


def look_at_cache(found: Inventory, folder: Path) -> None:
    """A folder of cache entries."""
    for path in entries_of(folder):
        if _CACHE_NOTES.fullmatch(path.name):
            found.files["caches"].append(path)
        elif _ENTRY.fullmatch(path.name):
            if _header(path).get("format", "").startswith("wangen-cache-"):
                found.files["caches"].append(path)
            else:
                found.kept["caches"].append((path, "no cache entry of ours by its header"))
    for path in entries_of(folder / "packs"):
        if _CACHE_NOTES.fullmatch(path.name) or (_PACK.fullmatch(path.name) and _is_pack(path)):
            found.files["caches"].append(path)
        elif _PACK.fullmatch(path.name):
            found.kept["caches"].append((path, "no pack of cache entries by what is in it"))
    found.folders["caches"] += [folder / "packs", folder]


def _is_pack(path: Path) -> bool:
    """Whether a tar begins with a cache entry, or an index says that it is one of a pack."""
    if path.suffix == ".safetensors":
        return "wangen-pack-" in _header(path).get("index", "")
    try:
        with path.open("rb") as file:
            return _ENTRY.fullmatch(file.read(100).rstrip(b"\0").decode("utf-8", "replace")) is not None
    except OSError:
        return False


def look_at_clips(found: Inventory, folder: Path) -> None:
    """The folder of clips that a script's first step cuts, with what is known of them."""
    records = folder / footage.RECORDS
    if not (records / footage.SETTINGS).is_file():
        return
    clips, notes = entries_of(folder / footage.CLIPS), records / footage.CLIPS
    ours = [path for path in clips if _TEMPORARY.fullmatch(path.name) or (notes / f"{path.name}.json").is_file()]
    edited = footage.edited_manifests(folder)
    pages = [path for name in footage.PAGES if (path := folder / name).is_file() and path not in edited]
    found.kept["caches"] += [(path, "edited by hand") for path in edited]
    found.files["caches"] += [*ours, *pages, *(path for path in sorted(records.rglob("*")) if path.is_file())]
    inner = sorted((path for path in records.rglob("*") if path.is_dir()), reverse=True)
    found.folders["caches"] += [folder / footage.CLIPS, *inner, records, folder]


def _header(path: Path) -> dict[str, str]:
    """The free text fields of a safetensors file; empty for anything else."""
    try:
        return read_safetensors(path).metadata
    except (WangenError, OSError):
        return {}


def look_at_outputs(found: Inventory, folder: Path) -> None:
    """The folder of a run: its states, its LoRAs, and what was said and shown of them."""
    states = [folder / f"{found.slug}{expert}-state" for expert in ("", *(f"_{name}" for name in EXPERTS))]
    for state in (path for part in states for path in entries_of(part) if _STATE.fullmatch(path.name)):
        found.files["checkpoints"] += [path for path in entries_of(state) if _STATE_FILES.fullmatch(path.name)]
        parts = entries_of(state / _PARTS)
        found.files["checkpoints"] += [path for path in parts if _PART_FILES.fullmatch(path.name)]
        found.folders["checkpoints"] += [state / _PARTS, state]
    found.files["checkpoints"] += filter(_names_a_state, (part / NEWEST for part in states))
    found.files["checkpoints"] += (path for part in states if _is_empty(path := part / ANEW))
    for path in entries_of(folder):
        rest = path.name.removeprefix(found.slug)
        if rest != path.name and path.is_file():
            name = _LORA.fullmatch(rest)
            on_the_way = name and (name["step"] or name["epoch"]) and not name["kept"]
            part: Part = "checkpoints" if on_the_way else "outputs"
            if name and FINGERPRINT in _header(path):
                found.files[part].append(path)
            elif name:
                found.kept[part].append((path, "no LoRA of ours by its header"))
    found.files["outputs"] += [*_reports(folder), *_experiment_logs(found, folder), *_watched(found, folder)]
    found.files["outputs"] += _judged(found, folder)
    found.folders["checkpoints"] += [*states, folder]
    found.folders["outputs"].append(folder)


def _is_empty(path: Path) -> bool:
    with suppress(OSError):
        return path.is_file() and not path.stat().st_size
    return False


def _names_a_state(path: Path) -> bool:
    """Whether a file says which state was saved last."""
    try:
        return bool(_STATE.fullmatch(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def _reports(folder: Path) -> Iterator[Path]:
    for step in STEPS:
        begun = [folder / BEGUN] if step.command == "train" else []
        for path in (*report_files(folder, step.command), *begun):
            with suppress(OSError, ValueError, RecursionError, AttributeError):
                if json.loads(path.read_text(encoding="utf-8")).get("step") == step.command:
                    yield path
    yield from (lock for lock in folder.glob(RUN_LOCKS) if lock.is_file())
    yield from (lock for lock in folder.glob(f".{RUN_LOCKS}-*.tmp") if _TEMPORARY.fullmatch(lock.name))


def _watched(found: Inventory, folder: Path) -> Iterator[Path]:
    """What training says and shows on its way: its numbers, its samples, its trace, the drawing of its timesteps."""
    for path in (folder / METRICS, folder / SAMPLES / SAMPLE_LIST):
        if _is_lines(path):
            yield path
    for path in entries_of(folder / SAMPLES):
        if path.name.startswith(found.slug) and _SAMPLE.fullmatch(path.name.removeprefix(found.slug)):
            yield path
    yield from (path for path in entries_of(folder / TRACES) if _TRACE.fullmatch(path.name))
    drawing = folder / f"{found.slug}-timesteps.svg"
    if drawing.is_file():
        yield drawing
    found.folders["outputs"] += [folder / SAMPLES, folder / TRACES]


def _judged(found: Inventory, folder: Path) -> Iterator[Path]:
    """What generating, evaluating and reporting leave: the numbers, the videos, the page."""
    evaluation, page = folder / EVALUATION, folder / PAGE
    if _holds(evaluation, b'"mean_base"'):
        yield evaluation
    if _holds(page, b'<meta name="generator" content="wangen'):
        yield page
    yield from (path for path in entries_of(folder / LOSSES) if _LOSSES.fullmatch(path.name))
    yield from (path for path in entries_of(folder / FIRST_FRAMES) if _FRAME.fullmatch(path.name))
    for path in (path for name in (VIDEOS, "generated") for path in entries_of(folder / name)):
        if path.suffix in _MARKS and _holds(path, _MARKS[path.suffix]):
            yield path
    found.folders["outputs"] += [folder / name for name in (LOSSES, FIRST_FRAMES, VIDEOS, "generated")]


def _holds(path: Path, mark: bytes) -> bool:
    try:
        return mark in path.read_bytes()
    except OSError:
        return False


def _is_lines(path: Path) -> bool:
    """Whether a file has a JSON object with a step in its first line, as training writes it."""
    try:
        with path.open(encoding="utf-8") as file:
            return "step" in json.loads(file.readline(_MAX_LINE))
    except (OSError, ValueError, RecursionError, TypeError):
        return False


def _experiment_logs(found: Inventory, folder: Path) -> list[Path]:
    """TensorBoard's files, notes of which run of wandb or mlflow it goes on in, and what processes said."""
    place = folder / LOGS
    files = sorted(place.rglob("events.out.tfevents.*")) if place.is_dir() else []
    files += [path for path in entries_of(place) if _NOTE.fullmatch(path.name.removeprefix(found.slug))]
    found.folders["outputs"] += _between(files, place)
    return [*files, *look_at_process_logs(found, place)]


def look_at_process_logs(found: Inventory, folder: Path) -> list[Path]:
    """What the processes of `--gpus` said, in a folder for each start, on a cluster in one of each machine."""
    files = [path for pattern in ("", "*/") for path in folder.glob(f"{pattern}*_*/attempt_*/*/std*.log")]
    found.folders["outputs"] += _between(files, folder)
    return files


def _between(files: Iterable[Path], top: Path) -> list[Path]:
    """The folders of files up to one above them, the innermost first."""
    inner = {parent for path in files for parent in path.parents if parent == top or top in parent.parents}
    return sorted(inner, key=lambda path: -len(path.parts))
