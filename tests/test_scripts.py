import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shells.bundles import HOSTILE, POSIX_ONLY, bundle, prompts, steps

from wangen.generator import scripts
from wangen.generator.errors import WangenError
from wangen.generator.quoting import Word, ps1_word
from wangen.generator.scripts import changed_knobs, parsed_steps, read_knobs, read_steps, render, untouched
from wangen.generator.steps import STEPS
from wangen.generator.table import options
from wangen.profiles import platform

SHELLS = ("sh", "bat", "ps1")

# Variables that a shell sets itself, or that change how it works.
MEANING = {
    "sh": (
        "CDPATH COLUMNS DIRSTACK ENV EUID FIGNORE FUNCNAME FUNCNEST GLOBIGNORE GROUPS HOME HOSTNAME HOSTTYPE "
        "IFS IGNOREEOF LANG LINENO LINES MACHTYPE MAIL MAPFILE OLDPWD OPTARG OPTERR OPTIND OSTYPE PATH "
        "PIPESTATUS POSIXLY_CORRECT PPID PWD RANDOM REPLY SECONDS SHELL SHELLOPTS SHLVL SRANDOM EPOCHSECONDS "
        "EPOCHREALTIME TERM TIMEFORMAT TMOUT TMPDIR UID USER"
    ),
    "bat": (
        "APPDATA CD CMDCMDLINE CMDEXTVERSION COMSPEC DATE ERRORLEVEL HOMEDRIVE HOMEPATH LOCALAPPDATA PATH "
        "PATHEXT PROMPT RANDOM SYSTEMROOT TEMP TIME TMP USERPROFILE WINDIR"
    ),
    "ps1": (
        "ARGS ERROR ERRORACTIONPREFERENCE ERRORVIEW EVENT EXECUTIONCONTEXT FALSE FOREACH HOME HOST INPUT "
        "LASTEXITCODE MATCHES MYINVOCATION NULL OFS OUTPUTENCODING PID PROFILE PWD SENDER SHELLID STACKTRACE "
        "SWITCH THIS TRUE"
    ),
}


# ---- what is read back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_every_line_reads_back_to_the_steps_own_words(shell, text):
    chosen = steps(text)
    assert read_steps(render(bundle(shell, chosen), shell, "train"), shell) == [step.argv() for step in chosen]


def test_a_prompt_that_looks_like_a_script_is_a_prompt():
    first = render(bundle("sh"), "sh", "train").decode()
    chosen = prompts(first, "after")
    data = render(bundle("sh", chosen), "sh", "train")
    assert read_steps(data, "sh") == [step.argv() for step in chosen]
    assert (read_knobs(data), untouched(data)) == ({}, True)


@pytest.mark.parametrize("shell", SHELLS)
def test_knobs_are_the_steps_values(shell):
    chosen = steps(seed=-1, learning_rate=2e-5, lr_scheduler="constant_with_warmup")
    knobs = read_knobs(render(bundle(shell, chosen), shell, "train"))
    assert knobs["SEED"] == "-1"
    assert knobs["LEARNING_RATE"] == "2e-05"
    assert knobs["LR_SCHEDULER"] == "constant_with_warmup"
    assert knobs["VAE_DTYPE"] == "float32"
    assert knobs["NUM_WORKERS"] == "4"
    assert "SAVE_EVERY_N_EPOCHS" not in knobs


@pytest.mark.parametrize("shell", SHELLS)
def test_a_platform_says_why_it_wants_a_value(shell):
    made = replace(bundle(shell), platform=platform("windows-rocm"))
    note = "float32 because on ROCm a bfloat16 VAE gives all-zero"
    assert render(made, shell, "train").decode().count(note) == 1
    other = replace(made, steps=(replace(steps()[1], vae_dtype="bfloat16"),))
    assert "because on ROCm" not in render(other, shell, "train").decode()


def test_a_reason_stays_readable_in_a_remark_of_cmd():
    reasons = {"train.seed": "Jane’s & 5% of 3<4 ^|…\nunglücklich (published: 9)"}
    made = replace(bundle("bat"), platform=replace(platform("windows"), reasons=reasons))
    data = render(made, "bat", "train")
    assert "42 because Jane's and 5 percent of 34 ... unglücklich (published: 9) (published: 42)".encode() in data
    assert changed_knobs(data) == {}


@pytest.mark.parametrize("shell", SHELLS)
def test_one_flag_with_two_values_gets_a_variable_per_step(shell):
    chosen = list(steps())
    chosen[2] = type(chosen[2])(dataset_config=chosen[2].dataset_config, t5=chosen[2].t5, num_workers=2)
    knobs = read_knobs(render(bundle(shell, chosen), shell, "train"))
    assert (knobs["NUM_WORKERS_CACHE_LATENTS"], knobs["NUM_WORKERS_CACHE_TEXT"]) == ("4", "2")
    assert "NUM_WORKERS" not in knobs


@pytest.mark.parametrize("shell", SHELLS)
def test_a_knob_of_one_step_says_so_when_another_step_has_that_field(shell):
    knobs = read_knobs(render(bundle(shell, [*steps(), *prompts("a cat")]), shell, "train"))
    assert knobs["SEED_TRAIN"] == "42"
    assert "SEED" not in knobs
    assert {"NUM_WORKERS", "LEARNING_RATE"} <= knobs.keys()
    alone = read_knobs(render(bundle(shell), shell, "train"))
    assert alone["SEED"] == "42"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_given_knob_reaches_every_step_that_uses_it(shell):
    data = render(bundle(shell), shell, "train", {"VAE_DTYPE": "bfloat16"})
    lines = [line for line in read_steps(data, shell) if "--vae_dtype" in line]
    assert [line[line.index("--vae_dtype") + 1] for line in lines] == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize("knobs", [{"SEED": "1; rm -rf"}, {"SEED": ""}, {"NO_SUCH": "1"}])
def test_wrong_knobs_are_refused(knobs):
    with pytest.raises(WangenError):
        render(bundle("sh"), "sh", "train", knobs)


@pytest.mark.parametrize("shell", SHELLS)
def test_no_knob_is_a_variable_that_means_something_to_a_shell(shell):
    knobs = {
        name
        for step in STEPS
        for option in options(step)
        if option.flag.knob
        for name in (option.name.upper(), f"{option.name}_{step.command}".upper())
    }
    assert {"SEED", "NUM_WORKERS_CACHE_TEXT"} <= knobs
    assert not {name for name in knobs if name.startswith(("WG", "PYTHON", "WANGEN", "PS", "BASH", "LC_"))}
    assert not knobs & {*MEANING[shell].split()}


@pytest.mark.parametrize(
    ("shell", "line"),
    [("sh", '  wg_step "$WG_PY" -m wangen.runtime '), ("bat", '"%WG_PY%" -m wangen.runtime '),
     ("ps1", "    $WgArgv = @(\n)")],
)  # fmt: skip
def test_a_step_that_lost_its_words_is_refused(shell, line):
    with pytest.raises(WangenError, match="words cannot be read") as caught:
        list(parsed_steps(b"first\n" + line.encode() + b"\nlast\n", shell))
    assert caught.value.where == "line 2 of the script"


# ---- what a shell cannot carry -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "text"),
    [(shell, text) for shell in ("bat", "ps1") for text in ('a "b"', "a\nb", "a\rb", "a\0b", "a\x1ab", "a\ud800b")]
    + [("sh", "a\0b"), ("sh", "a\ud800b"), ("ps1", "C:\\a b\\"), ("bat", "x" * 8000)],
    ids=lambda value: ascii(value)[:20],
)
def test_what_a_shell_cannot_carry_is_refused(shell, text):
    with pytest.raises(WangenError):
        render(bundle(shell, prompts(text)), shell, "train")


@pytest.mark.parametrize("text", ["", "--%", "~", "~\\models", "~/models", "a\u180eb\\"])
def test_powershell_gets_no_word_that_it_would_drop(text):
    with pytest.raises(WangenError):
        ps1_word(Word(text))


def test_the_length_of_a_bat_line_counts_what_cmd_expands():
    assert render(bundle("bat", prompts("x" * 7000)), "bat", "train")
    with pytest.raises(WangenError, match="characters long"):
        render(bundle("bat", prompts("%" * 4000)), "bat", "train")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_root_with_a_line_break_is_refused(shell):
    with pytest.raises(WangenError):
        render(bundle(shell, root="/a\nb"), shell, "train")


# ---- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_bytes_are_what_the_shell_wants(shell):
    data = render(bundle(shell, steps("é日本 🦊")), shell, "train")
    assert data.startswith(b"\xef\xbb\xbf") == (shell == "ps1")
    assert data.count(b"\r\n") == (0 if shell == "sh" else data.count(b"\n"))
    assert b"\r" not in data.replace(b"\r\n", b"")
    assert data == render(bundle(shell, steps("é日本 🦊")), shell, "train")


def test_a_bat_is_ascii_until_it_has_chosen_utf8():
    data = render(bundle("bat", steps("é"), root="C:\\é"), "bat", "train")
    assert data.partition(b"chcp 65001")[0].isascii()
    assert max(map(len, data.decode().replace("^\r\n", "").split("\r\n"))) <= 8000


def test_a_bat_hands_texts_on_as_literals():
    # A variable, `call` or delayed expansion would expand a percent sign or an exclamation mark a second time.
    text = render(bundle("bat", steps("m%rk!x!")), "bat", "train").decode()
    marked = [line for line in text.split("\r\n") if "m%%rk!x!" in line]
    assert marked
    assert all(line.startswith('  "--') for line in marked)
    assert "call " not in text
    assert "EnableDelayedExpansion" not in text
    assert "^ \r\n" not in text


def test_a_bat_asks_for_its_own_folder_before_it_goes_elsewhere():
    # cmd takes "some folder\\train.bat", typed in quotes, from the folder of that moment, not of the start.
    before, _, after = render(bundle("bat"), "bat", "train").decode().partition("pushd ")
    assert (before.count("%~dp0"), after.count("%~")) == (1, 0)


def test_a_bat_that_cannot_enter_its_root_runs_nothing():
    # No folder of wine refuses that. `ver` is there because pushd need not take back an earlier failure.
    lines = render(bundle("bat", root="\\\\nas\\x"), "bat", "train").decode().split("\r\n")
    place = lines.index('pushd "\\\\nas\\x"')
    assert lines[place - 1 : place + 2] == ["ver >nul", 'pushd "\\\\nas\\x"', "if errorlevel 1 goto wg_noroot"]


@pytest.mark.parametrize("root", [None, "/data/it's & (x86)"])
def test_shellcheck_has_nothing_to_warn_of(root, tmp_path):
    # The package installs its program beside the interpreter, which need not be on PATH.
    program = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        pytest.skip("shellcheck is not installed")
    path = tmp_path / "x.sh"
    path.write_bytes(
        render(bundle("sh", (*steps("$x 'é' \\"), *prompts(*HOSTILE, *POSIX_ONLY[:1])), root=root), "sh", "train")
    )
    done = subprocess.run([program, "-S", "warning", path], capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0


# ---- what is offered ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_smoke_is_offered_where_something_is_trained(shell):
    train, cache = render(bundle(shell), shell, "train"), render(bundle(shell, steps()[:4]), shell, "cache")
    assert b"50 steps on at most 8 items into outputs/red_house/smoke" in train
    assert b"smoke" not in cache.lower()
    assert read_steps(train, shell) == [step.argv() for step in steps()]


@pytest.mark.parametrize("shell", SHELLS)
def test_no_script_tells_to_fetch_wangen_by_its_name(shell):
    # It is on no index: whoever claims the name there would be installed instead.
    text = render(bundle(shell), shell, "train").decode()
    assert text.count("wangen-0.1.0-py3-none-any.whl[runtime]" if shell != "ps1" else "[runtime]") == 1
    assert "install wangen" not in text
    assert "wangen[" not in text


def test_the_templates_name_no_flag():
    folder = Path(scripts.__file__).resolve().parent.parent / "templates"
    flags = {option.name for kind in STEPS for option in options(kind)}
    for template in folder.glob("run.*.j2"):
        words = set(template.read_text(encoding="utf-8").split())
        if template.name == "run.sbatch.j2":  # Slurm's commands have flags of their own, one of the same name
            named = {re.split(r"[=;\"]", word)[0].removeprefix("--") for word in words if word.startswith("--")}
            assert named & flags <= {"output"}
        else:
            assert {word for word in words if word.startswith("--")} <= {"--", "--index-url"}, template.name
