"""The two install lines of the README, which `.ci/run` takes from it; test_docs.py runs the others."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block_after(words: str) -> str:
    """The first code block behind these words."""
    found = re.search(r"```\w+\n(.*?)```", README[README.index(words) :], re.DOTALL)
    assert found
    return found[1]


def test_the_two_lines_are_one_line_each_and_use_the_constraints():
    for name, last in (("<!-- demo -->", "wangen demo"), ("<!-- test -->", "python -m pytest")):
        lines = block_after(name).splitlines()
        assert len(lines) == 1
        assert "-c constraints.txt" in lines[0]
        assert lines[0].endswith(last)
