"""What the .ps1 scripts start, as each version of PowerShell would start it: under wine, by a real Windows Python.

The model of PowerShell runs the script, the rules of each version make the command lines, CreateProcess takes them.
"""

import pytest
from hypothesis import given
from shells.bundles import HOSTILE, bundle, put, steps
from shells.drawn import VALUES, carried, drawn_steps, executed
from shells.wine import HOME, Library, needs_wine, windows

pytest.importorskip("tree_sitter_pwsh", reason="tree-sitter-pwsh is not installed")

from shells.powershell import execute
from shells.powershell_native import VERSIONS, command_line

from wangen.generator.scripts import render

pytestmark = needs_wine
CARRIED = [text for text in HOSTILE if not text.endswith("\\")]


def hand_on(folder, chosen, words=()):
    """What the steps of a script receive, by version of PowerShell."""
    script = folder / "bundle (x86) & é !x! ^y 'q'" / "train_red_house.ps1"
    (script.parent / "venv").mkdir(parents=True)
    (script.parent / "venv" / "Scripts").symlink_to(HOME / "python", target_is_directory=True)
    put(script, render(bundle("ps1", chosen), "ps1", "train"))
    run = execute(script, words, start=lambda call: 0)
    assert run.code == 0
    calls = [call for call in run.calls if call.words[0] == "-m"]
    library = Library(folder)
    lines = [command_line(version, call.program, call.words) for version in VERSIONS for call in calls]
    assert [answer for answer in library.start(lines) if answer["code"]] == []
    argv = [call["argv"] for call in library.calls]
    return {version: argv[number * len(calls) :][: len(calls)] for number, version in enumerate(VERSIONS)}


def test_hostile_words_reach_python_exactly(tmp_path):
    check, latents, text, cached, train = steps("é日本 (x86) & 100% !x! ^y 'q' ‘’")
    unc = type(check)(dataset_config="\\\\nas\\a & b", vae="C:\\100%\\", t5="D:\\" + "long\\" * 80, dit="--dit")
    all_words = type(train)(**(vars(train) | {"optimizer_args": tuple(CARRIED), "training_comment": "x" * 7000}))
    chosen = (unc, latents, text, cached, all_words)
    for version, argv in hand_on(tmp_path, chosen).items():
        assert argv == [step.argv() for step in chosen], version


@pytest.mark.parametrize("words", [("smoke",), ("train", "--training_comment=two words", "a & b")])
def test_words_of_the_caller_reach_python_exactly(tmp_path, words):
    chosen = steps()[-1:]
    more = ["--smoke"] if words == ("smoke",) else list(words[1:])
    for version, argv in hand_on(tmp_path, chosen, words).items():
        assert argv == [[*chosen[0].argv(), *more]], version


def test_the_old_rules_really_lose_words(tmp_path):
    # Without this the test above could pass although no command line is ever taken apart.
    library = Library(tmp_path)
    words = ["-m", "wangen.runtime", "x", "", "a b\\", "end"]
    library.start(command_line(version, windows(HOME / "python" / "python.exe"), words) for version in VERSIONS)
    old, middle, *new = (call["argv"] for call in library.calls)
    assert (old, middle) == (["x", 'a b" end'], ["x", "a b\\", "end"])
    assert new == [words[2:], words[2:]]


@pytest.mark.parametrize("word", ["", 'a "b" c', "a b\\", "--%", "C:\\x\\", "a b", "--a=b c", "a\u3000\\"])
def test_a_word_is_refused_or_reaches_python_exactly(tmp_path, word):
    script = tmp_path / "train_red_house.ps1"
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "Scripts").symlink_to(HOME / "python", target_is_directory=True)
    put(script, render(bundle("ps1", steps()[-1:]), "ps1", "train"))
    library = Library(tmp_path)
    words = ["--training_comment", word, "--seed", "5"]
    runs = {version: execute(script, ("train", *words), start=lambda call: 0, version=version) for version in VERSIONS}
    carrying = [version for version in VERSIONS if runs[version].code == 0]
    lines = [
        command_line(version, runs[version].calls[-1].program, runs[version].calls[-1].words) for version in carrying
    ]
    library.start(lines)
    assert [call["argv"] for call in library.calls] == [[*steps()[-1].argv(), *words]] * len(carrying)
    assert {runs[version].code for version in VERSIONS} <= {0, 2}
    assert carrying[-2:] == ["7.3", "7.6"]


@executed
@given(texts=carried("ps1", 30), values=VALUES)
def test_drawn_words_reach_python_exactly(tmp_path_factory, texts, values):
    # Each step is a start of Python for each version; the training step has all texts.
    chosen = drawn_steps(texts, values)[3:6]
    for version, argv in hand_on(tmp_path_factory.mktemp("ps1"), chosen).items():
        assert argv == [step.argv() for step in chosen], version
