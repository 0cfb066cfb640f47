"""The diagram of docs/how-it-works.md and the contract of docs/extend.md are those of the source."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from documented import blocks_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-it-works.md"


def package_of(parts: list[str]) -> str:
    """The innermost package of a module, at most two deep: `runtime/cache`, `generator`."""
    return "/".join(parts[:2]) if len(parts) > 1 and (ROOT / parts[0] / parts[1]).is_dir() else parts[0]


def imported(module: ast.AST) -> Iterator[list[str]]:
    """What a module imports of wangen, at its head and inside functions, without `wangen`."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "wangen":
            yield from ([*node.module.split(".")[1:], name.name] for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name.split(".")[1:] for name in node.names if name.name.startswith("wangen."))


@cache
def imports() -> frozenset[tuple[str, str]]:
    """Who imports whom: (`runtime/training`, `runtime/models`), …"""
    found = set()
    for top in ("generator", "runtime", "profiles", "templates"):
        for path in (ROOT / top).rglob("*.py"):
            here = package_of(list(path.relative_to(ROOT).with_suffix("").parts))
            found |= {(here, package_of(to)) for to in imported(ast.parse(path.read_text(encoding="utf-8")))}
    return frozenset((here, there) for here, there in found if here != there)


def diagram() -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The packages of the diagram by their names in it, and its arrows that stand for imports."""
    (block,) = (block for block in blocks_of(PAGE) if block.language == "mermaid")
    packages = dict(re.findall(r'(\w+)\["([\w/]+)<br>', block.text))
    arrows = re.findall(r"(\w+) --> (\w+)", block.text)
    assert len(arrows) > 15
    return packages, [(packages[here], packages[there]) for here, there in arrows]


def test_every_arrow_is_an_import():
    _, arrows = diagram()
    assert [arrow for arrow in arrows if arrow not in imports()] == []


def test_every_package_of_the_diagram_is_there():
    packages, _ = diagram()
    assert [name for name in packages.values() if not (ROOT / name / "__init__.py").is_file()] == []


def test_nothing_is_imported_over_a_border_the_other_way():
    order = ["templates", "profiles", "generator", "runtime"]
    for here, there in imports():
        tops = [name.split("/")[0] for name in (here, there)]
        if all(top in order for top in tops):
            assert order.index(tops[0]) >= order.index(tops[1]), f"{here} imports {there}"


def test_the_contract_of_an_architecture_is_listed_whole():
    module = ast.parse((ROOT / "runtime" / "models" / "__init__.py").read_text(encoding="utf-8"))
    (contract,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Family")
    wanted = [node.name for node in contract.body if isinstance(node, ast.FunctionDef)]
    section = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8").partition("## An architecture")[2]
    listed = section.partition("leave out:")[2].split("\n\n")[1]
    assert re.findall(r"`(\w+)`", listed) == wanted
