"""The .sh scripts, run by bash with a recording Python."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shells.bash import Site, needs_bash
from shells.bundles import HOSTILE, POSIX_ONLY, prompts, steps

pytestmark = needs_bash


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "bundle (x86) & 100% é日本 !x! 'q'"
    folder.mkdir()
    site = Site(folder, steps())
    site.python("venv/bin/python")
    return site


def test_bash_hands_hostile_words_on_exactly(tmp_path):
    *others, train = steps("é (x86) & 100% 'q' \\")
    all_words = replace(train, optimizer_args=(*HOSTILE, *POSIX_ONLY))
    chosen = (*others, all_words, *prompts(*HOSTILE[3:8], *POSIX_ONLY))
    site = Site(tmp_path, chosen)
    site.python("venv/bin/python")
    done = site.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert [call["argv"] for call in site.calls] == [step.argv() for step in chosen]


def test_steps_run_in_the_root_with_their_environment(site):
    done = site.run(VIRTUAL_ENV="/elsewhere", PYTHONHOME="/elsewhere")
    assert done.stdout.splitlines()[-1] == "wangen: train_red_house finished."
    for call in site.calls:
        assert call["cwd"] == str(site.folder)
        assert call["env"] == {
            "PYTHONUTF8": "1", "PYTHONSAFEPATH": "1", "PYTHONHOME": None,
            "WANGEN_SCRIPT": str(site.script), "WANGEN_SCRIPT_VERSION": "0.1.0",
        }  # fmt: skip


def test_the_first_failing_step_ends_the_script_with_its_code(site):
    done = site.run(RECORDER_FAIL="cache_text", RECORDER_CODE="7")
    assert done.returncode == 7
    assert [call["argv"][0] for call in site.calls] == ["check", "cache_latents", "cache_text"]
    assert "step cache_text failed (exit code 7)" in done.stderr
    assert "finished" not in done.stdout


def test_a_step_name_runs_that_step_only(site):
    assert site.run("check_cache").returncode == 0
    assert [call["argv"][0] for call in site.calls] == ["check_cache"]


def test_further_words_are_handed_to_that_step(site):
    for words in (["--fresh"], ["--seed=7", "two words", "", "*", "$x", "||"]):
        assert site.run("train", *words).returncode == 0
        assert [call["argv"] for call in site.calls] == [[*steps()[-1].argv(), *words]]


@pytest.mark.parametrize(
    "words", [("bake",), ("bake", "--fresh"), ("--fresh",), ("", "--fresh"), ("*",), ("smoke", "--x"), ("Smoke",)]
)
def test_unknown_words_are_a_usage_error(site, words):
    done = site.run(*words)
    assert done.returncode == 2
    assert site.calls == []
    assert done.stderr.startswith("wangen: ")


def test_smoke_marks_every_step_that_knows_it(site):
    done = site.run("smoke", WG_SMOKE="--fresh")
    check, *others = (step.argv() for step in steps())
    assert [call["argv"] for call in site.calls] == [check, *([*words, "--smoke"] for words in others)]
    assert done.stdout.splitlines()[-1] == "wangen: train_red_house (smoke) finished."
    assert site.run(RECORDER_FAIL="cache_text", RECORDER_CODE="3").returncode == 3
    assert not [call for call in site.calls if "--smoke" in call["argv"]]


def test_missing_environment_says_what_to_do(site):
    shutil.rmtree(site.folder / "venv")
    done = site.run()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "  do:    run setup_wangen.sh beside this script, or set WANGEN_PYTHON to an interpreter"
    )


def typed(line, folder):
    """The words of a line as bash has them, typed in a folder."""
    shown = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], stdout=subprocess.PIPE, cwd=folder, timeout=60)
    return shown.stdout.decode().splitlines()


def test_environment_without_wangen_gets_the_line_to_type(site):
    done = site.run(RECORDER_EMPTY="error while loading shared libraries: libpython3.11.so.1.0")
    assert done.returncode == 1
    first, second, *_, last = done.stderr.splitlines()
    assert first == "error while loading shared libraries: libpython3.11.so.1.0"
    assert second == f"wangen: this Python cannot import wangen, as it says above: {site.folder}/venv/bin/python"
    wheel = f"{site.folder}/files/wangen-0.1.0-py3-none-any.whl[runtime]"
    assert typed(last, "/") == [f"{site.folder}/venv/bin/python", "-m", "pip", "install", wheel]


@pytest.mark.parametrize("name", ["plain", "a `touch ran`", "$(touch ran)", 'a"; touch ran; "', "it's \\ $HOME"])
def test_the_line_to_type_runs_nothing_else(tmp_path, name):
    (tmp_path / name).mkdir()
    site = Site(tmp_path / name, steps())
    site.python("venv/bin/python")
    last = site.run(RECORDER_EMPTY="nothing").stderr.splitlines()[-1]
    wheel = f"{site.folder}/files/wangen-0.1.0-py3-none-any.whl[runtime]"
    assert typed(last, tmp_path) == [f"{site.folder}/venv/bin/python", "-m", "pip", "install", wheel]
    assert not (tmp_path / "ran").exists()
    if name == "plain":
        shown = wheel.replace(f"{site.folder}/", f"{site.folder}'/")
        assert last == f"  {site.folder}/venv/bin/python -m pip install {shown}'"


def test_where_python_is_looked_for(tmp_path):
    site = Site(tmp_path, steps())
    windows = site.python("venv/Scripts/python.exe")
    assert site.run().returncode == 1, f"{windows} is of no use here"
    active = site.python("active env/bin/python")
    assert site.run(VIRTUAL_ENV=str(active.parent.parent)).returncode == 0
    own = site.python("own/py thon")
    assert site.run(WANGEN_PYTHON=str(own)).returncode == 0
    bad = site.run(WANGEN_PYTHON=str(tmp_path))
    assert (bad.returncode, bad.stderr) == (
        1,
        f"wangen: WANGEN_PYTHON names no program: {tmp_path}\n  do:    unset it, or give the full path of a python\n",
    )
    site.python(".venv/bin/python")
    assert site.run().returncode == 0


def test_a_moved_bundle_runs_where_it_is(site, tmp_path):
    there = tmp_path / "moved to ünther's"
    site.folder.rename(there)
    site.folder, site.script, site.record = there, there / site.script.name, there / site.record.name
    assert site.run().returncode == 0
    assert {call["cwd"] for call in site.calls} == {str(there)}


def test_a_link_to_the_script_runs_the_bundle_that_it_names(site, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "train").symlink_to(os.path.relpath(site.script, tmp_path / "bin"))
    site.script = tmp_path / "bin" / "train"
    assert site.run().returncode == 0
    assert {call["cwd"] for call in site.calls} == {str(site.folder)}


HOSTILE_ENVIRONMENTS = (
    {"SHELLOPTS": "nounset:noglob:noclobber:allexport:posix", "POSIXLY_CORRECT": "1"},
    {"CDPATH": "/:/tmp:/usr", "IFS": "/ae", "LANG": "C", "LC_ALL": "C", "OLDPWD": "/nowhere"},
    {
        "wg_only": "bake",
        "WG_PY": "/no",
        "WG_ROOT": "/no",
        "WG_SMOKE": "--x",
        "WG_STOPPED": "1",
        "SEED": "9",
        "code": "9",
    },
)


@pytest.mark.parametrize("env", HOSTILE_ENVIRONMENTS, ids=["options", "folders", "names"])
def test_the_users_variables_change_nothing(site, env):
    # Started by a relative path, which CDPATH would take elsewhere.
    site.script, cwd = Path(site.folder.name) / site.script.name, str(site.folder.parent)
    done = site.run(cwd=cwd, **env)
    assert (done.returncode, done.stderr) == (0, "")
    assert [call["argv"] for call in site.calls] == [step.argv() for step in steps()]
    assert {call["cwd"] for call in site.calls} == {str(site.folder)}
    assert site.run(cwd=cwd, RECORDER_FAIL="check", RECORDER_CODE="255", **env).returncode == 255


@pytest.mark.parametrize("shell", ["sh", "dash", "zsh"])
def test_another_shell_hands_over_to_bash(site, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    env = {"PATH": os.environ["PATH"], "RECORDER_OUT": str(site.record)}
    assert subprocess.run([shell, site.script, "train"], env=env, capture_output=True).returncode == 0
    assert len(site.calls) == 1


def test_a_configured_root_and_environment(tmp_path):
    root = tmp_path / "root's $x"
    site = Site(tmp_path, steps(), root=str(root), venv=("env", str(tmp_path / "abs env")))
    done = site.run()
    assert (done.returncode, str(root) in done.stderr) == (1, True)
    root.mkdir()
    site.python("abs env/bin/python")
    assert site.run().returncode == 0
    assert {call["cwd"] for call in site.calls} == {str(root)}


def test_a_knob_that_the_user_broke_is_named(site):
    site.script.write_text(site.script.read_text().replace("SEED='42'", "SEED='4 2'"))
    done = site.run()
    assert (done.returncode, "the knob SEED" in done.stderr, site.calls) == (2, True, [])


@pytest.mark.parametrize("line", ["", "SEEED='7'", "# SEED='42'", "SEED="])
def test_a_knob_that_the_user_took_out_is_named(site, line):
    """What the environment has under its name does not count."""
    site.script.write_text(site.script.read_text().replace("SEED='42'", line))
    for env in ({}, {"SEED": "9"}):
        done = site.run(**env)
        assert (done.returncode, site.calls) == (2, [])
        assert done.stderr == "wangen: the knob SEED may hold letters, digits and . _ , + - only\n"


def test_line_ends_of_windows_are_named(site):
    site.script.write_bytes(site.script.read_bytes().replace(b"\n", b"\r\n"))
    done = site.run()
    assert (done.returncode, site.calls) == (2, [])
    assert "has the line ends of Windows: publish again, or remove them (sed -i 's/\\r//')" in done.stderr
    subprocess.run(["sed", "-i", "s/\\r//", site.script], check=True)
    assert site.run().returncode == 0


def test_a_step_that_the_system_killed(site):
    done = site.run(RECORDER_FAIL="train", RECORDER_CODE="137")
    assert done.returncode == 137
    assert "step train was killed (exit code 137), as Linux does when memory runs out" in done.stderr


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", ">/dev/full", "2>&-"])
def test_a_script_to_which_nobody_listens_makes_all_its_steps(site, closed):
    """As of a daemon, or on a terminal that is gone."""
    code = f'"$@" {closed}'
    env = {"PATH": os.environ["PATH"], "RECORDER_OUT": str(site.record)}
    done = subprocess.run(["bash", "-c", code, "bash", "bash", site.script], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [call["argv"] for call in site.calls] == [step.argv() for step in steps()]


@pytest.mark.parametrize(("code", "signal_name"), [("143", "SIGTERM"), ("129", "SIGHUP"), ("130", "SIGINT")])
def test_a_step_that_somebody_stopped_is_nothing_to_mend(site, code, signal_name):
    done = site.run(RECORDER_FAIL="train", RECORDER_CODE=code)
    assert done.returncode == int(code) == 128 + getattr(signal, signal_name)
    assert f"step train was stopped (exit code {code}). Run this script again to go on" in done.stderr
    assert "Mend it" not in done.stderr


STOPPED = "wangen: stopped. Nothing saved is lost: run this script again to go on.\n"

YOUNG_STEP = """
import sys, time
if "-c" not in sys.argv:
    print("young", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_script_that_is_stopped_while_its_step_cannot_speak_yet_says_so(site, name):
    (site.folder / "venv/bin/python").write_text(f"#!{sys.executable} -IS\n{YOUNG_STEP}")
    pipe = subprocess.PIPE
    with subprocess.Popen(["bash", site.script], stdout=pipe, stderr=pipe, text=True, start_new_session=True) as run:
        assert run.stdout
        assert run.stdout.readline().startswith("wangen: step 1 of")
        assert run.stdout.readline() == "young\n"
        (os.killpg if name == "SIGINT" else os.kill)(run.pid, getattr(signal, name))
        errors = run.communicate(timeout=30)[1]
    assert run.returncode == 130
    assert errors.endswith(STOPPED)


SLOW_STEP = """
import os, signal, sys, time
def told(number, frame):
    os.write(1, f"told {signal.Signals(number).name}\\n".encode())  # it may have come amid a print
    time.sleep(SAVES_S)
    os._exit(5)
if "-c" not in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, told)
    print("heard", sys.stdin.readline(), flush=True)
    for _ in range(600):  # one long sleep, about to begin when the signal comes, would sleep on
        time.sleep(0.1)
"""


@pytest.mark.parametrize("saves_s", ["0", "0.3"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_stopped_script_waits_for_its_step_to_save(site, name, saves_s):
    """Ctrl-C comes to both; `kill`, `docker stop` and a watchdog reach the script alone."""
    (site.folder / "venv/bin/python").write_text(f"#!{sys.executable} -IS\n{SLOW_STEP.replace('SAVES_S', saves_s)}")
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["bash", site.script], stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as run:
        assert (run.stdin, run.stdout) != (None, None)
        run.stdin.write("a word\n")
        run.stdin.flush()
        assert run.stdout.readline().startswith("wangen: step 1 of")
        assert run.stdout.readline() == "heard a word\n"
        (os.killpg if name == "SIGINT" else os.kill)(run.pid, getattr(signal, name))
        out, errors = run.communicate(timeout=30)
    assert (run.returncode, errors) == (130, STOPPED), "what the step says may be lost, as where it has just begun"
    assert out == f"told {'SIGTERM' if name == 'SIGHUP' else name}\n", "and no second step"
