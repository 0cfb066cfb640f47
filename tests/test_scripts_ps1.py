"""The .ps1 scripts, parsed and read: no PowerShell can be installed where the tests run."""

import re

import pytest
from shells.bundles import HOSTILE, bundle, prompts, steps

from wangen.generator.scripts import render


def powershell_tree(data):
    tree_sitter = pytest.importorskip("tree_sitter", reason="tree-sitter is not installed")
    grammar = pytest.importorskip("tree_sitter_pwsh", reason="tree-sitter-pwsh is not installed")
    parser = tree_sitter.Parser(tree_sitter.Language(grammar.language()))
    nodes = [parser.parse(data.removeprefix(b"\xef\xbb\xbf")).root_node]
    for node in nodes:
        nodes += node.children
    return sorted(nodes, key=lambda node: (node.start_byte, -node.end_byte))


@pytest.mark.parametrize("root", [None, "C:\\it's & ‘x86’"])
def test_powershell_grammar_accepts_the_script(root):
    texts = [text for text in HOSTILE if not text.endswith("\\")]
    data = render(bundle("ps1", (*steps("it's"), *prompts(*texts)), root=root), "ps1", "train")
    faults = [
        (node.start_point, node.text) for node in powershell_tree(data) if node.type == "ERROR" or node.is_missing
    ]
    assert faults == []


def test_powershell_does_not_stop_at_a_line_of_the_log():
    # Windows PowerShell 5.1 makes exceptions of redirected error lines (`.\\train_x.ps1 2>&1`) under Stop.
    text = render(bundle("ps1"), "ps1", "train").decode("utf-8-sig")
    before, _, after = text.partition("& $WgPython")
    assert re.findall(r"^\$ErrorActionPreference = '(\w+)'", before, re.MULTILINE) == ["Stop", "Continue"]
    assert "ErrorActionPreference =" not in after
    calls = re.findall(r"^ *& \$WgPython -m .*\n(.*)$", after, re.MULTILINE)
    assert [line.strip() for line in calls] == ["$WgCode = $LASTEXITCODE"] * len(steps())


def test_powershell_hands_further_words_to_the_step():
    text = render(bundle("ps1"), "ps1", "train").decode("utf-8-sig").replace("\r\n", "\n")
    assert "$WgMore = @($args[1..($args.Count - 1)])" in text
    assert text.count("-m wangen.runtime @WgArgv @WgMore\n") == len(steps())


def test_powershell_literals_by_another_parser():
    texts = [text for text in HOSTILE if not text.endswith("\\")]
    chosen = prompts(*texts)
    data = render(bundle("ps1", chosen), "ps1", "train")
    found = [n.text.decode() for n in powershell_tree(data) if n.type == "verbatim_string_characters"]
    plain = [re.sub("(['‘’‚‛])['‘’‚‛]", r"\1", literal[1:-1]) for literal in found]
    words = [word for step in chosen for word in step.argv()]
    # The script has literals of its own; `generate` stands among them too.
    assert [word for word in plain if word in set(words) and word != "generate"] == [
        w for w in words if w != "generate"
    ]
