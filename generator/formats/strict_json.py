"""JSON from files that may wish to do harm: UTF-8, no name twice, and memory in proportion to its length."""

import json
from typing import Any

MAX_PARTS = 2_000_000
"""How many values, roughly; each may take a hundred times the memory that it is long."""


def parse_json(text: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON, nested too deeply, with too many values, halves of characters, or a name twice in one
            object.
    """
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MAX_PARTS:
        raise ValueError(f"more than {MAX_PARTS} parts")
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique)
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # fails on halves of characters, which cannot be shown
        return value
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields
