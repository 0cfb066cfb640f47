"""Files of rows: what is known of very many files, as lines of JSON, each with a digest of itself.

They only save time. A line that is damaged is left out and what it said is found out again; a file of another version
counts as empty. Lines hold many rows, so that reading is quick, and are read one by one, so that it stays lean.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from wangen.generator.files import write_whole

ROWS_PER_LINE = 1000


def read_rows(path: Path, title: str) -> Iterator[list[Any]]:
    """The rows of a file that was written under the same title; none when there is no such file.

    Args:
        path: the file.
        title: what the rows are, with the version of their form.
    """
    with suppress(OSError), path.open("rb") as file:
        if _checked(file.readline()) != [title]:
            return
        for line in file:
            yield from _checked(line)


def write_rows(path: Path, title: str, rows: Iterable[Sequence[Any]]) -> None:
    """Write a file of rows, whole or not at all.

    Raises:
        OSError: the disk refused; the old file, if any, is untouched.
    """
    write_whole(path, _lines(title, iter(rows)))


def _lines(title: str, rows: Iterator[Sequence[Any]]) -> Iterator[bytes]:
    yield _line([title])
    while part := list(islice(rows, ROWS_PER_LINE)):
        yield _line(part)


def _line(values: list[Any]) -> bytes:
    text = json.dumps(values, separators=(",", ":")).encode()  # in ASCII: names that are no Unicode become escapes
    return b'["%s",%s]\n' % (_digest(text), text)


def _checked(line: bytes) -> list[Any]:
    """What a line holds; nothing when it is damaged."""
    digest, text = line[2:18], line[20:-2]
    with suppress(ValueError, RecursionError):
        if _digest(text) == digest:
            values = json.loads(text)
            return values if isinstance(values, list) else []
    return []


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()
