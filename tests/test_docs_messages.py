"""Every message that a page explains stands in the source, so that a search for it finds it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / "troubleshooting.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]


def messages() -> list[str]:
    """What stands in backticks in the first column of tables of messages."""
    tables = [
        table
        for page in PAGES
        for table in page.read_text(encoding="utf-8").split("\n\n")
        if table.startswith(("| message |", "| you see |"))
    ]
    found = [message for table in tables for message in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)]
    assert len(found) > 70
    return found


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Every text of a module but its docstrings; `…` where a value is put in."""
    about = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in about and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[.\d]*[sdf]|\{\}", "…", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


@cache
def source() -> tuple[str, ...]:
    """All texts of the program: of Python, and the lines of the script templates."""
    modules = [path for folder in ("generator", "runtime") for path in (ROOT / folder).rglob("*.py")]
    texts = {text for path in modules for text in texts_of(ast.parse(path.read_text(encoding="utf-8")))}
    for path in (ROOT / "templates").glob("*.j2"):
        lines = path.read_text(encoding="utf-8").splitlines()
        texts |= {re.sub(r"\{\{.*?\}\}|\$\w+|\$\{\w+\}|%\w+%", "…", line) for line in lines}
    return tuple(text for text in texts if len(text) > 10)


def is_said(message: str) -> bool:
    """Whether one text of the program holds all parts of a message in their order."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in source())


@pytest.mark.parametrize("message", messages())
def test_the_message_stands_in_the_source(message):
    assert is_said(message)


def test_a_message_that_nobody_says_is_found():
    assert not is_said("the card is on fire at step …")
    assert not is_said("found, … bytes expected")  # the parts in another order
