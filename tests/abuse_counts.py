"""The table of cases in `docs/reliability.md`, which `python tests/abuse_counts.py` writes anew."""

import re
import tempfile
from collections import Counter
from pathlib import Path

from abuse_cases import DEVICES, content_cases, path_cases, path_kinds, value_cases

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
_TABLE = re.compile(r"(?<=<!-- counts -->\n).*?(?=<!-- end of counts -->)", re.DOTALL)


def table() -> str:
    """A row for each step: cases of paths (without devices, which only the superuser can make), contents and values."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = [kind for kind in path_kinds(Path(folder) / "kinds") if kind not in DEVICES]
    parts = [Counter(case.step.command for case in cases)
             for cases in (path_cases(kinds), content_cases(), value_cases())]  # fmt: skip
    rows = [[name, *(part[name] for part in parts)] for name in parts[0]]
    rows.append(["all", *(part.total() for part in parts)])
    lines = ["| step | paths | contents | values | together |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, [*row, sum(row[1:])]))} |" for row in rows]
    return "\n".join(lines) + "\n"


def told() -> str:
    """The table as the page has it."""
    found = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found, "the page has its marks"
    return found[0]


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
