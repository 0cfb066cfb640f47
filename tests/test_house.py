"""What CONTRIBUTING.md says of every file: how long it is, what it catches, and that no imports go in a circle."""

import ast
import graphlib
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("examples", "generator", "profiles", "runtime", "templates")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
FILES = [*SOURCES, *sorted((ROOT / "tests").glob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]
MAX_LINES, MAX_FUNCTION = 400, 60


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("wangen", *parts)).removesuffix(".__init__")


def imported(tree: ast.Module, modules: Collection[str]) -> Iterator[str]:
    """Those of the modules that a file names, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules else node.module for name in named if node.module in modules)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_are_short_and_catch_what_they_name(path: Path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or node.lineno) - node.lineno < MAX_FUNCTION, node.name
        if isinstance(node, ast.ExceptHandler) and path in SOURCES:
            assert node.type is not None, f"line {node.lineno} catches everything"
            assert not {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} & {"Exception"}


def test_no_module_needs_itself():
    """Imports inside of functions and those for types count, too: a circle is one wherever it is closed."""
    modules = {module_of(path): path for path in SOURCES}
    needs = {
        name: set(imported(ast.parse(path.read_text(encoding="utf-8")), modules)) for name, path in modules.items()
    }
    graphlib.TopologicalSorter(needs).prepare()  # a CycleError names the circle
    assert sum(map(len, needs.values())) > 1000
