"""JSON from files that may wish to do harm: UTF-8, no name twice, and no more memory than in proportion to its length."""

import json
from typing import Any

MAX_PARTS = 2_000_000
"""How many values, roughly; each may take a hundred times the memory that it is long."""


def parse_json(text: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON, nested too deeply, with too many values, or with a name twice in one object.
    """
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MAX_PARTS:
        raise ValueError(f"more than {MAX_PARTS} parts")
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields
