"""What a weight file's header says, for people and programs: metadata decoded, ranks and alphas by module.

No torch is imported, which takes seconds.
"""

import json
from pathlib import Path
from typing import Any

from wangen.generator.headers import read_header
from wangen.generator.kinds import examine
from wangen.generator.models.adapters import describe_lora

MAX_DEPTH = 8  # of JSON within JSON


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
        found["lora"] = describe_lora(facts.files[0], header).fields()
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


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
