"""The .ps1 scripts, run by a model of PowerShell: none can be installed where the tests run."""

import re
from pathlib import Path

import pytest
from shells.bundles import HOSTILE, bundle, prompts, put, steps

pytest.importorskip("tree_sitter_pwsh", reason="tree-sitter-pwsh is not installed")

from shells.powershell import OutsideError, execute, faults, tree
from shells.powershell_native import USER, command_line
from shells.powershell_values import Dashed
from shells.wine import windows

from wangen.generator.scripts import render

# PowerShell 5.1 swallows the word behind one that has a blank and ends in a backslash; render refuses such words.
CARRIED = [text for text in HOSTILE if not text.endswith("\\")]
IMPORT = ("-c", "import wangen.runtime")


class Site:
    """A published bundle whose programs are asked for by name and not started."""

    def __init__(self, folder: Path, chosen=None, **details):
        folder.mkdir(exist_ok=True)
        self.folder, self.script = folder, folder / "train_red_house.ps1"
        self.codes: dict[str, int | None] = {}
        put(self.script, render(bundle("ps1", chosen, **details), "ps1", "train"))

    def python(self, place="venv"):
        program = self.folder / place / "Scripts" / "python.exe"
        program.parent.mkdir(parents=True)
        program.touch()
        return program

    def run(self, *words, line="powershell -File x.ps1", variables=None, version="5.1", **env):
        def start(call):
            code = self.codes.get("import" if call.words == IMPORT else call.words[2], 0)
            if code is None:
                raise OSError("the file name or extension is too long")
            return code

        return execute(self.script, words, start=start, env=env, line=line, variables=variables, version=version)

    def change(self, old, new):
        text = self.script.read_text(encoding="utf-8-sig")
        assert old in text
        self.script.write_text(text.replace(old, new, 1), encoding="utf-8-sig", newline="")


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path / "musubi (x86) & 100% é日本 [x] ;y 'q'")
    site.python()
    return site


def started(run):
    """The words of the steps that a run started."""
    return [list(call.words[2:]) for call in run.calls if call.words != IMPORT]


def names(run):
    return [words[0] for words in started(run)]


@pytest.mark.parametrize("root", [None, "C:\\it's & ‘x86’"])
def test_powershell_grammar_accepts_the_script(root):
    data = render(bundle("ps1", (*steps("it's"), *prompts(*CARRIED)), root=root), "ps1", "train")
    assert [(fault.start_point, fault.text) for fault in faults(tree(data))] == []


@pytest.mark.parametrize("fault", ["if $x { }", "$x = @('a'", "Write-Host 'a", "} else {"])
def test_the_grammar_sees_faults(fault):
    assert faults(tree(f"$a = 'b'\r\n{fault}\r\n".encode()))


def test_all_steps_run_in_order_with_exactly_their_words(tmp_path):
    chosen = (*steps("it's é & 100%"), *prompts(*CARRIED))
    site = Site(tmp_path, chosen)
    program = site.python()
    run = site.run()
    assert (run.code, run.error) == (0, "")
    assert started(run) == [step.argv() for step in chosen]
    assert run.lines[-1] == "wangen: train_red_house finished."
    assert {(call.program, call.folder) for call in run.calls} == {(windows(program), windows(tmp_path))}


def test_the_environment_of_the_steps_ends_with_the_script(site):
    given = {"PYTHONUTF8": "0", "VIRTUAL_ENV": "C:\\elsewhere", "PYTHONHOME": "C:\\elsewhere"}
    run = site.run(**given)
    for call in run.calls:
        assert "PYTHONHOME" not in call.env
        wanted = {"PYTHONUTF8": "1", "PYTHONSAFEPATH": "1", "WANGEN_SCRIPT_VERSION": "0.1.0"}
        wanted["WANGEN_SCRIPT"] = windows(site.folder) + "\\train_red_house.ps1"
        assert wanted.items() <= call.env.items()
    assert run.env == given


@pytest.mark.parametrize("code", [7, -1073741819])
def test_the_first_failing_step_ends_the_script_with_its_code(site, code):
    site.codes["cache_text"] = code
    run = site.run()
    assert run.code == code
    assert names(run) == ["check", "cache_latents", "cache_text"]
    assert f"step cache_text failed (exit code {code})" in run.lines[-1]
    assert run.env == {}


@pytest.mark.parametrize("code", [130, -1073741510])
def test_a_step_that_somebody_stopped_is_nothing_to_mend(site, code):
    site.codes["cache_text"] = code
    run = site.run()
    assert (run.code, names(run)) == (code, ["check", "cache_latents", "cache_text"])
    assert run.lines[-1] == (
        "wangen: step cache_text was stopped. Nothing saved is lost: run this script again to go on."
    )


@pytest.mark.parametrize("step", ["import", "cache_text"])
def test_a_program_that_windows_does_not_start_is_a_failure(site, step):
    # A line that is too long, a folder with brackets in Windows PowerShell: the code of the program before stays.
    site.codes[step] = None
    run = site.run()
    assert run.code == 1
    assert "the file name or extension is too long" in run.lines
    assert names(run) == ([] if step == "import" else ["check", "cache_latents"])


def test_a_window_that_explorer_opened_stays_open_on_failure(site):
    # The lines of Windows and of PowerShell 7; with one more PowerShell in between, every way to fail is covered.
    for shell in ('"C:\\powershell.exe" "-Command" "if', '"C:\\pwsh.exe" -Command "$host.UI = 1; if'):
        line = (
            f"{shell}((Get-ExecutionPolicy ) -ne 'AllSigned') {{ Set-ExecutionPolicy -Scope Process Bypass }}; & 'x'\""
        )
        for code in (0, 7):
            site.codes["Bypass"] = code
            run = site.run(line=line)
            assert run.code == code
            assert [call.words for call in run.calls] == [
                ("-NoProfile", "-ExecutionPolicy", "Bypass", "-File", windows(site.script))
            ]
            assert run.lines == (["Press Enter to close this window"] if code else [])
        assert len(started(site.run(line=line, WANGEN_NO_PAUSE="1"))) == 5


def test_run_again_after_a_failure_runs_all_steps(site):
    # Every step knows by itself what is done; the script keeps no notes.
    site.codes["train"] = 1
    before = sorted(site.folder.rglob("*"))
    assert site.run().code == 1
    site.codes.clear()
    again = site.run()
    assert (again.code, len(started(again)), sorted(site.folder.rglob("*"))) == (0, 5, before)


def test_a_step_name_runs_that_step_only(site):
    run = site.run("check_cache")
    assert (run.code, names(run)) == (0, ["check_cache"])
    assert run.lines[-1] == "wangen: train_red_house (step check_cache) finished."


@pytest.mark.parametrize("words", [["--fresh"], ["--seed=7", "two words", "*", "$x", "||"]])
def test_further_words_are_handed_to_that_step(site, words):
    run = site.run("train", *words)
    assert started(run) == [[*steps()[-1].argv(), *words]]
    # A word that PowerShell still takes for a parameter would lose its quotes in 5.1 and 7.2.
    assert not [word for word in run.calls[-1].words if isinstance(word, Dashed)]


@pytest.mark.parametrize("version", ["5.1", "7.2"])
@pytest.mark.parametrize(
    ("word", "cure"),
    [
        ('the "red" house', "leave the double quote out, or use a single quote"),
        ('--training_comment="', "leave the double quote out, or use a single quote"),
        ("", "leave the option out"),
        ("--%", "leave the option out"),
        ("D:\\my loras\\", "leave the last backslash out"),
    ],
)
def test_a_word_that_this_powershell_would_change_is_refused(site, version, word, cure):
    run = site.run("train", "--training_comment", word, "--seed", "5", version=version)
    assert (run.code, run.calls) == (2, [])
    assert run.lines == [
        f"wangen: this version of PowerShell would change the word '{word}'",
        f"  do:    {cure}; or use PowerShell 7.3 or newer (pwsh)",
    ]
    words = ["--training_comment", word, "--seed", "5"]
    for newer in ("7.3", "7.6", "8.0"):
        assert started(site.run("train", *words, version=newer)) == [[*steps()[-1].argv(), *words]]


@pytest.mark.parametrize("version", ["5.1", "7.6"])
def test_a_path_behind_an_equals_sign_that_powershell_took_apart(site, version):
    run = site.run("train", "--seed", "1", "--output_dir=D:\\a b", version=version)
    assert (run.code, run.calls) == (2, [])
    assert run.lines == [
        "wangen: PowerShell took this word apart at its colon: --output_dir=D:\\a b",
        "  do:    write a blank in place of the =: --output_dir D:\\a b",
    ]
    words = ["--output_dir", "D:\\a b", "--output_name=x", "--seed", "5"]
    assert started(site.run("train", *words, version=version)) == [[*steps()[-1].argv(), *words]]


def test_a_word_with_a_dash_keeps_its_blanks(site):
    words = site.run("train", "--training_comment=two words").calls[-1].words
    assert command_line("5.1", "p", words).endswith(' "--training_comment=two words"')
    assert command_line("5.1", "p", [Dashed("--a=b c")]) == '"p" --a=b c'


def test_smoke_marks_every_step_that_knows_it(site):
    run = site.run("smoke")
    assert run.code == 0
    check, *others = (step.argv() for step in steps())
    assert started(run) == [check, *([*words, "--smoke"] for words in others)]
    assert run.lines[-1] == "wangen: train_red_house (smoke) finished."


def test_a_failing_try_ends_with_its_code(site):
    site.codes["train"] = 3
    assert site.run("smoke").code == 3


@pytest.mark.parametrize("words", [("bake",), ("bake", "--fresh"), ("--fresh",), ("", "--fresh"), ("smoke", "--x"),
                                   ("TRAIN",), ("Smoke",)])  # fmt: skip
def test_unknown_words_are_a_usage_error(site, words):
    run = site.run(*words)
    assert (run.code, run.calls) == (2, [])
    assert "cache_latents" in run.lines[-1]


def test_missing_root_says_what_to_do(tmp_path):
    site = Site(tmp_path, root=windows(tmp_path / "gone ‘é’"))
    run = site.run()
    assert (run.code, run.calls) == (1, [])
    assert run.lines[0] == f"wangen: this folder is not there: {windows(tmp_path / 'gone ‘é’')}"


def test_a_configured_root_is_where_steps_run(tmp_path):
    root = tmp_path / "root's $x & y"
    root.mkdir()
    site = Site(tmp_path, root=windows(root), venv=("env", windows(tmp_path / "abs env")))
    program = site.python("abs env")
    run = site.run()
    assert {(call.program, call.folder) for call in run.calls} == {(windows(program), windows(root))}


def test_missing_environment_says_what_to_do(tmp_path):
    run = Site(tmp_path).run()
    assert (run.code, run.calls) == (1, [])
    assert f"  {windows(tmp_path)}\\venv" in run.lines
    assert run.lines[-1].startswith("  do:    run setup_wangen.ps1 beside this script, or set WANGEN_PYTHON")


def test_environment_without_wangen_gets_the_pip_line(site):
    site.codes["import"] = 1
    run = site.run()
    assert (run.code, started(run), run.env) == (1, [], {})
    wheel = windows(site.folder) + "\\files\\wangen-0.1.0-py3-none-any.whl[runtime]"
    program = windows(site.folder) + "\\venv\\Scripts\\python.exe"
    assert "'q'" in program
    assert run.lines[-1] == "  & '{}' -m pip install '{}'".format(*(s.replace("'", "''") for s in (program, wheel)))


def test_the_pip_line_holds_a_folder_that_powershell_would_read_otherwise(tmp_path):
    site = Site(tmp_path / "a$(id)`b ‘c’")
    site.python()
    site.codes["import"] = 1
    folder, wheel = windows(tmp_path) + "\\a$(id)`b ‘‘c’’", "wangen-0.1.0-py3-none-any.whl[runtime]"
    program = f"'{folder}\\venv\\Scripts\\python.exe'"
    assert site.run().lines[-1] == f"  & {program} -m pip install '{folder}\\files\\{wheel}'"


def test_where_python_is_looked_for(tmp_path):
    site = Site(tmp_path)
    active = site.python("active env")
    assert site.run(VIRTUAL_ENV=windows(active.parents[1])).calls[-1].program == windows(active)
    own = active.with_name("own.exe")
    own.touch()
    assert site.run(WANGEN_PYTHON=windows(own)).calls[-1].program == windows(own)
    assert site.run(WANGEN_PYTHON=f'"{windows(own)}"').calls[-1].program == windows(own)
    bad = site.run(WANGEN_PYTHON=windows(tmp_path))
    assert (bad.code, bad.lines) == (
        1,
        [
            f"wangen: WANGEN_PYTHON names no program: {windows(tmp_path)}",
            "  do:    unset it, or give the full path of a python.exe",
        ],
    )
    dotted = site.python(".venv")
    assert site.run(VIRTUAL_ENV=windows(active.parents[1])).calls[-1].program == windows(dotted)


@pytest.mark.parametrize("value", ["'4 2'", "''", "256,512", "'$(x)'"])
def test_a_knob_that_the_user_broke_is_named(site, value):
    site.change("$SEED = '42'", f"$SEED = {value}")
    run = site.run()
    assert (run.code, run.calls) == (2, [])
    assert "the knob SEED" in run.lines[0]


def test_a_plain_number_is_a_knob(site):
    site.change("$SEED = '42'", "$SEED = 7")
    words = started(site.run())[-1]
    assert words[words.index("--seed") + 1] == "7"


@pytest.mark.parametrize("line", ["", "$SEEED = '7'"])
def test_a_knob_that_the_user_took_out_is_named(site, line):
    """What the window has under its name does not count."""
    site.change("$SEED = '42'", line)
    run = site.run(variables={"seed": "9"})
    assert (run.code, run.calls) == (2, [])
    assert run.lines == ["wangen: the knob SEED may hold letters, digits and . _ , + - only"]


def test_strict_mode_stops_at_a_variable_that_is_not_set(site):
    site.change("$WgStep = 'check'", "$WgStep = $WgStepp")
    run = site.run()
    assert (run.code, "$WgStepp" in run.error, started(run)) == (1, True, [])


@pytest.mark.parametrize(
    "line",
    ["Get-ChildItem .", "$x = [int]'7'", "$x = \"a`tb\"", "$x = \"$WgRoot: x\"", "'left over'", "while ($true) { }",
     "$x = @($args)[9]", "$x = 'a' -like 'b'", "& cmd.exe /c x", "$x += 'y'", "$x = $WgRoot.Length",
     "$x = (1, 2) -eq 1", "try { exit 0 } catch { }", "$x = $($y)", "Write-Host 'a' | Out-File x"],
)  # fmt: skip
def test_what_the_model_does_not_know_is_no_success(site, line):
    site.change("$WgPython = ''", f"{line}\r\n$WgPython = ''")
    with pytest.raises(OutsideError):
        site.run()


def test_powershell_does_not_stop_at_a_line_of_the_log():
    # Windows PowerShell 5.1 makes exceptions of redirected error lines (`.\\train_x.ps1 2>&1`) under Stop.
    text = render(bundle("ps1"), "ps1", "train").decode("utf-8-sig")
    before, _, after = text.partition("& $WgPython")
    assert re.findall(r"^ *\$ErrorActionPreference = '(\w+)'", before, re.MULTILINE) == ["Stop", "Continue"]
    assert "ErrorActionPreference =" not in after
    calls = re.findall(r"^ *& \$WgPython -m .*\n(.*)$", after, re.MULTILINE)
    assert [line.strip() for line in calls] == ["$WgCode = $LASTEXITCODE"] * len(steps())


@pytest.mark.parametrize("root", [None, "D:\\"])
def test_a_locked_down_powershell_allows_every_call(root):
    # Its constrained language has no methods but those of PowerShell's own types.
    text = render(bundle("ps1", root=root), "ps1", "train").decode()
    assert re.findall(r"\]::\w+\(|\.\w+\(", text) == []


def test_powershell_literals_by_another_parser():
    chosen = prompts(*CARRIED)
    nodes = [tree(render(bundle("ps1", chosen), "ps1", "train"))]
    for node in nodes:
        nodes += node.children
    nodes.sort(key=lambda node: node.start_byte)
    found = [node.text.decode() for node in nodes if node.type == "verbatim_string_characters"]
    plain = [re.sub("(['‘’‚‛])['‘’‚‛]", r"\1", literal[1:-1]) for literal in found]
    words = [word for step in chosen for word in step.argv() if word != "generate"]
    # The script has literals of its own; `generate` stands among them too.
    assert [word for word in plain if word in words] == words


@pytest.mark.parametrize(
    ("version", "word", "line"),
    [("5.1", "", '"p" '), ("7.2", "", '"p" '), ("7.3", "", '"p" ""'), ("5.1", "a b\\", '"p" "a b\\"'),
     ("7.2", "a b\\", '"p" "a b\\\\"'), ("7.3", "a b\\", '"p" "a b\\\\"'), ("7.2", 'a "b" c', '"p" "a "b" c"'),
     ("7.3", 'a\\"b', '"p" "a\\\\\\"b"'), ("7.3", "C:\\x\\", '"p" C:\\x\\'), ("5.1", "a\u3000b", '"p" "a\u3000b"'),
     ("7.3", "~\\x", '"p" ~\\x'), ("7.6", "~\\x", f'"p" {USER}\\x'), ("7.6", "~\\x y", '"p" "~\\x y"')],
)  # fmt: skip
def test_how_each_version_makes_a_command_line(version, word, line):
    assert command_line(version, "p", [word]) == line
