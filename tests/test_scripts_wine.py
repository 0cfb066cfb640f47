"""The .bat scripts run under wine with a real CPython for Windows; `tests/shells/setup_wine.sh` installs both.

What wine 8 cannot show is checked in the text instead (`test_scripts.py`): that lines end in CRLF (wine's cmd takes
LF as well), that nothing but ASCII stands before `chcp` (which does nothing here: the locale gives UTF-8), that no text
with a percent sign goes through a variable (wine expands it twice), the length of lines.
"""

import pytest
from shells.bundles import HOSTILE, bundle, prompts, put, steps
from shells.wine import FOLDER, Site, needs_wine, windows

from wangen.generator.scripts import render
from wangen.generator.steps import CacheLatents, CacheText, Check, CheckCache, Train

pytestmark = needs_wine
COMMAND = "C:\\windows\\system32\\cmd.exe"
ENVIRONMENT = {"PYTHONUTF8": "1", "PYTHONSAFEPATH": "1", "PYTHONHOME": None, "WANGEN_SCRIPT_VERSION": "0.1.0"}


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path / FOLDER, steps())
    site.python()
    return site


def names(site):
    return [call["argv"][0] for call in site.calls]


def hostile_steps():
    """Steps that hold the whole list in flags of every kind: paths, texts, repeated ones, joined with `=`."""
    config, unc = "files/tomls/x.toml", "\\\\nas\\a & b\\"
    return (
        Check(dataset_config=config, vae="C:\\100% (x86)\\", t5=unc, dit="\\\\?\\C:\\" + "long\\" * 80),
        CacheLatents(dataset_config=unc, vae="--vae", vae_dtype="float32", device="-!x! ^y"),
        CacheText(dataset_config=config, t5="é日本 (x86) & 100% !x! ^y 'q' \\", device="=;,"),
        CheckCache(dataset_config=config, vae="🦊\\", vae_dtype="float32", t5="%%A%PATH%"),
        Train(
            dataset_config=config, dit=":: \\\\", output_dir=unc, output_name="%PATH%", seed=-1, training_comment="",
            optimizer_args=(*HOSTILE, "^&", "a\\\\", "()", "%1", "%~dp0", "%*", "&&", ">nul", "2>&1", "@echo"),
        ),
        *prompts("", "x" * 7000, *HOSTILE[3:8]),
    )  # fmt: skip


def test_hostile_words_reach_python_exactly(tmp_path):
    chosen = hostile_steps()
    site = Site(tmp_path / FOLDER, chosen)
    site.python()
    done = site.run()
    assert [call["argv"] for call in site.calls] == [step.argv() for step in chosen]
    assert done.returncode == 0
    assert "wangen: train_red_house finished." in done.stdout
    assert {call["cwd"] for call in site.calls} == {windows(site.folder)}
    assert site.calls[0]["env"] == ENVIRONMENT | {"WANGEN_SCRIPT": windows(site.script)}


@pytest.mark.parametrize(("code", "seen"), [("7", 7), ("-1073741819", 5)])
def test_the_first_failing_step_ends_the_script_with_its_code(site, code, seen):
    done = site.run(RECORDER_FAIL="cache_latents", RECORDER_CODE=code)
    assert names(site) == ["check", "cache_latents"]
    assert f"step cache_latents failed, exit code {code}" in done.stdout
    assert "finished" not in done.stdout
    # Linux sees the lowest eight bits of a Windows exit code.
    assert done.returncode == seen


@pytest.mark.parametrize("code", ["130", "-1073741510"])
def test_a_step_that_somebody_stopped_is_nothing_to_mend(site, code):
    """The second is what Windows gives where Ctrl-C comes before Python has begun."""
    done = site.run(RECORDER_FAIL="cache_latents", RECORDER_CODE=code)
    assert done.stdout.splitlines()[-1] == (
        "wangen: step cache_latents was stopped. Nothing saved is lost: run this script again to go on."
    )
    assert (done.returncode, names(site)) == (int(code) & 0xFF, ["check", "cache_latents"])


def test_variables_of_the_user_hide_no_failure_and_break_no_python(site):
    # A variable ERRORLEVEL stands before the real one; with PYTHONHOME Python searches its library elsewhere.
    done = site.run(ERRORLEVEL="0", RECORDER_FAIL="check", RECORDER_CODE="7")
    assert (done.returncode, names(site)) == (7, ["check"])
    assert site.run(ERRORLEVEL="1", PYTHONHOME="C:\\elsewhere").returncode == 0


@pytest.mark.parametrize(("word", "code"), [("bake", 2), ("check", 0)])
def test_the_callers_folders_are_left_as_they_were(site, word, code):
    (site.folder / "one" / "two").mkdir(parents=True)
    lines = ["@echo off", "pushd one", "pushd two", f"call ..\\..\\{site.script.name} {word}"]
    lines += ["echo code %ERRORLEVEL%", 'echo "%CD%"', "popd", 'echo "%CD%"']
    site.script = site.folder / "caller.bat"
    site.script.write_text("\r\n".join(lines), newline="")
    folder = windows(site.folder)
    # wine 8 gives 1 for every code of a called file.
    assert site.run().stdout.splitlines()[-3:] == [
        f"code {min(code, 1)}", f'"{folder}\\one\\two"', f'"{folder}\\one"'
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        'set "SEED=4 & (2) ^ |x >y; !z!"', 'set "SEED = 7"', "set SEED=7 ", "set SEED=7 & rem mine", 'set SEED="4 2"',
        'set "SEED=42""', "", "rem", 'set "SEED="', 'set "SEEED=7"', "set SEED=%PATH%", "set SEED=é",
    ],
)  # fmt: skip
def test_a_knob_that_the_user_broke_is_named(site, line):
    """What stands in the environment under its name does not count."""
    text = site.script.read_bytes()
    site.script.write_bytes(text.replace(b'set "SEED=42"', line.encode()))
    done = site.run(SEED="999")
    assert (done.returncode, site.calls) == (2, [])
    assert done.stderr == "wangen: the knob SEED may hold letters, digits and . _ , + - only\n"
    assert done.stdout == '  do:    write its line at the top of this script like the others: set "NAME=value"\n'


def test_a_knob_without_quotes_and_the_users_variables(site):
    text = site.script.read_bytes()
    site.script.write_bytes(text.replace(b'set "SEED=42"', b"set SEED=-7"))
    assert site.run("train", SEED="999", NETWORK_DIM="999").returncode == 0
    (words,) = (call["argv"] for call in site.calls)
    assert [words[words.index(flag) + 1] for flag in ("--seed", "--network_dim")] == ["-7", "16"]


def test_run_again_after_a_failure_runs_all_steps(site):
    # Every step knows by itself what is done; the script keeps no notes.
    before = sorted(site.folder.rglob("*"))
    assert site.run(RECORDER_FAIL="train").returncode == 1
    assert site.run().returncode == 0
    assert names(site) == ["check", "cache_latents", "cache_text", "check_cache", "train"]
    assert sorted(site.folder.rglob("*")) == before


def test_a_step_name_runs_that_step_only(site):
    assert site.run("check_cache").returncode == 0
    assert names(site) == ["check_cache"]


def test_smoke_marks_every_step_that_knows_it(site):
    done = site.run("smoke")
    check, *others = (step.argv() for step in steps())
    assert [call["argv"] for call in site.calls] == [check, *([*words, "--smoke"] for words in others)]
    assert (done.returncode, "wangen: train_red_house smoke finished." in done.stdout) == (0, True)


@pytest.mark.parametrize("words", [["--fresh"], ["--resume", "C:\\a b & (c)", "--x", "é !x! ^y"]])
def test_further_words_are_handed_to_that_step(site, words):
    assert site.run("train", *words).returncode == 0
    assert [call["argv"] for call in site.calls] == [[*steps()[-1].argv(), *words]]


@pytest.mark.parametrize("words", [("bake",), ("bake", "--fresh"), ("--fresh",), ("train", *"abcde"), ("smoke", "--x")])
def test_unknown_words_are_a_usage_error(site, words):
    done = site.run(*words)
    assert (done.returncode, site.calls) == (2, [])
    assert "cache_latents" in done.stdout


def test_a_cache_script_has_no_try(site):
    script = site.folder / "cache_red_house.bat"
    put(script, render(bundle("bat", steps()[:4]), "bat", "cache"))
    site.script = script
    assert (site.run("smoke").returncode, site.calls) == (2, [])
    assert site.run().returncode == 0
    assert [call["argv"] for call in site.calls] == [step.argv() for step in steps()[:4]]


def test_missing_environment_says_what_to_do(tmp_path):
    done = Site(tmp_path / FOLDER).run()
    assert done.returncode == 1
    assert f'"{windows(tmp_path / FOLDER)}\\venv\\Scripts\\python.exe"' in done.stdout
    assert "run setup_wangen.bat beside this script" in done.stdout


def test_environment_without_wangen_gets_the_pip_line(site):
    done = site.run(PYTHONPATH="")
    assert done.returncode == 1
    wheel = windows(site.folder) + "\\files\\wangen-0.1.0-py3-none-any.whl[runtime]"
    assert f'"{windows(site.folder)}\\venv\\Scripts\\python.exe" -m pip install "{wheel}"' in done.stdout


def test_where_python_is_looked_for(tmp_path):
    site = Site(tmp_path / FOLDER, steps()[:1])
    site.python("active & (x86)")
    environment = windows(site.folder / "active & (x86)")
    assert site.run(VIRTUAL_ENV=environment).returncode == 0
    assert site.run(WANGEN_PYTHON=environment + "\\Scripts\\python.exe").returncode == 0
    for wrong in ("C:\\no & where.exe", environment, '""'):
        done = site.run(WANGEN_PYTHON=wrong)
        assert (done.returncode, "WANGEN_PYTHON names no program" in done.stdout) == (1, True)
        assert done.stdout.endswith("\n  do:    unset it, or give the full path of a python.exe\n")


def test_a_configured_root(tmp_path):
    root = tmp_path / "root & 100% (x86) é"
    site = Site(tmp_path / FOLDER, steps()[:1], root=windows(root), venv=(windows(tmp_path / FOLDER / "env"),))
    site.python("env")
    done = site.run()
    assert (done.returncode, f'this folder is not there: "{windows(root)}"' in done.stdout) == (1, True)
    root.mkdir()
    assert site.run().returncode == 0
    assert {call["cwd"] for call in site.calls} == {windows(root)}


def double_click(site, **env):
    """Start the script as Explorer does. wine leaves CMDCMDLINE empty, so it is given."""
    line = f'{COMMAND} /c ""{windows(site.script)}" "'
    site.library.record.unlink(missing_ok=True)
    (done,) = site.library.start([line], "C:\\windows\\system32", CMDCMDLINE=line, **env)
    return done["code"], done["output"].strip().splitlines()


def test_a_double_clicked_window_stays_open_on_failure_only(site):
    code, lines = double_click(site)
    assert (code, lines[-1]) == (0, "wangen: train_red_house finished.")
    assert [call["argv"] for call in site.calls] == [step.argv() for step in steps()]
    assert {call["cwd"] for call in site.calls} == {windows(site.folder)}
    failing = {"RECORDER_FAIL": "check", "RECORDER_CODE": "-1073741819"}
    code, lines = double_click(site, **failing)
    # The last line is the prompt of `pause`. The whole code arrives where Linux does not cut it.
    assert (code & 0xFFFFFFFF, "failed" in lines[-2], "wangen" in lines[-1]) == (0xC0000005, True, False)
    code, lines = double_click(site, WANGEN_NO_PAUSE="1", **failing)
    assert (code & 0xFFFFFFFF, "failed" in lines[-1]) == (0xC0000005, True)


def test_a_double_clicked_window_stays_open_when_nothing_can_run(tmp_path):
    gone = Site(tmp_path / FOLDER, root="Q:\\gone")
    code, lines = double_click(gone)
    assert (code, lines[0]) == (1, 'wangen: this folder is not there: "Q:\\gone"')
    assert "wangen" not in lines[-1]
