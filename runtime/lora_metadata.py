"""What a weight file's header says, for people and programs: metadata decoded, ranks and alphas by module.

No weight is read, only alphas, which are tensors of one number; and no torch is imported, which takes seconds.
"""

import json
import math
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from wangen.generator.errors import WangenError
from wangen.generator.formats import Header, TensorInfo
from wangen.generator.headers import read_header
from wangen.generator.kinds import examine
from wangen.generator.lora_config import read_alphas
from wangen.generator.lora_keys import foreign, layout_of, parse_key

NUMBERS = {"F64": "<d", "F32": "<f", "F16": "<e"}
MAX_DEPTH = 8  # of JSON within JSON


class _Group(NamedTuple):
    rank: int | None
    alpha: float | None


def describe_file(path: Path, flag: str) -> dict[str, Any]:
    """A weight file as a JSON object: kind, sizes, metadata, and for a LoRA its layout, ranks and alphas.

    Args:
        path: the file, or a folder.
        flag: the flag it was given to.

    Raises:
        WangenError: not a weight file.
    """
    facts, header = examine(path, flag), read_header(path, flag)
    found: dict[str, Any] = {
        "kind": facts.words.removeprefix("a ").removeprefix("an "),
        "format": facts.format,
        "tensors": len(header.tensors),
        "parameters": facts.num_parameters,
        "bytes": dict(facts.dtypes),
    }
    if facts.kind.startswith("lora"):
        found["lora"] = _describe_lora(path, header)
    found["metadata"] = {key: decoded(value) for key, value in sorted(header.metadata.items())}
    return found


def decoded(value: Any, depth: int = 0) -> Any:
    """A value with every text that holds a JSON object or list replaced by what it holds.

    >>> decoded('{"a": "[1, 2]", "b": "2"}')
    {'a': [1, 2], 'b': '2'}
    """
    if depth > MAX_DEPTH:
        return value
    if isinstance(value, dict):
        return {key: decoded(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [decoded(item, depth + 1) for item in value]
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return decoded(json.loads(value, parse_constant=_refuse), depth + 1)
    except (ValueError, RecursionError):
        return value


def read_number(info: TensorInfo) -> float | None:
    """The value of a tensor of one floating-point number; None where it is stored in another form.

    Raises:
        WangenError: the file can no longer be read.
    """
    place = info.place
    if place is None or info.dtype not in (*NUMBERS, "BF16"):
        return None
    try:
        with place.file.open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.num_bytes)
    except OSError as error:
        raise WangenError(f"cannot be read: {error.strerror or error}", where=str(place.file)) from error
    # bfloat16 is the upper half of a float32
    value: float = struct.unpack(NUMBERS.get(info.dtype, "<f"), b"\0\0" * (info.dtype == "BF16") + content)[0]
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _describe_lora(path: Path, header: Header) -> dict[str, Any]:
    """Modules of the same rank and alpha together, by their names with `*` for the block's number."""
    ranks: dict[str, int | None] = {}
    stored: dict[str, float | None] = {}
    strange: list[str] = []
    for key, info in header.tensors.items():
        parsed = parse_key(key)
        if parsed is None:
            strange.append(key)
            continue
        ranks.setdefault(parsed.module, None)
        if parsed.part == "down" and info.shape:
            ranks[parsed.module] = info.shape[0]
        elif parsed.part == "alpha" and math.prod(info.shape) == 1:
            stored[parsed.module] = read_number(info)
    alphas = read_alphas(path, header.metadata)
    groups: dict[_Group, Counter[str]] = {}
    for module, rank in ranks.items():
        alpha = stored.get(module)
        if alpha is None and rank and (alphas.default is not None or alphas.patterns):
            alpha = alphas.of(module, rank)
        name = re.sub(r"^blocks\.\d+\.", "blocks.*.", module)
        groups.setdefault(_Group(rank, alpha), Counter())[name] += 1
    found: dict[str, Any] = {
        "layout": layout_of(header.tensors),
        "modules": len(ranks),
        "adapters": [
            {"rank": group.rank, "alpha": group.alpha, "modules": dict(sorted(names.items()))}
            for group, names in groups.items()
        ],
    }
    if strange:
        words = next(filter(None, map(foreign, sorted(strange))), "keys of an unknown kind")
        found["not_understood"] = {"what": words, "keys": len(strange), "such_as": sorted(strange)[:3]}
    return found
