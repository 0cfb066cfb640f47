import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shells.bundles import HOSTILE, POSIX_ONLY, bundle, prompts, read_calls, steps

from wangen.generator import scripts
from wangen.generator.errors import WangenError
from wangen.generator.quoting import Word, ps1_word
from wangen.generator.scripts import read_knobs, read_steps, render, untouched, write

SHELLS = ("sh", "bat", "ps1")
RECORDER = Path(__file__).parent / "shells" / "recorder.py"
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


# ---- what is read back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_every_line_reads_back_to_the_steps_own_words(shell, text):
    chosen = steps(text)
    assert read_steps(render(bundle(shell, chosen), shell, "train"), shell) == [step.argv() for step in chosen]


def carried(shell):
    categories = ("Cs",) if shell == "sh" else ("Cs", "Cc")
    without = "\0" if shell == "sh" else '"'
    return st.text(st.characters(exclude_categories=categories, exclude_characters=without), max_size=60)


@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_drawn_texts_read_back(shell, data):
    texts = data.draw(st.lists(carried(shell), min_size=1, max_size=3))
    if shell == "ps1":
        texts = [text.rstrip("\\") for text in texts if text != "--%"] or ["x"]
    chosen = (*steps(texts[0] or "x", seed=data.draw(st.integers(-5, 5))), *prompts(*texts))
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
def test_one_flag_with_two_values_gets_a_variable_per_step(shell):
    chosen = list(steps())
    chosen[2] = type(chosen[2])(dataset_config=chosen[2].dataset_config, t5=chosen[2].t5, num_workers=2)
    knobs = read_knobs(render(bundle(shell, chosen), shell, "train"))
    assert (knobs["NUM_WORKERS_CACHE_LATENTS"], knobs["NUM_WORKERS_CACHE_TEXT"]) == ("4", "2")
    assert "NUM_WORKERS" not in knobs


@pytest.mark.parametrize("shell", SHELLS)
def test_a_knob_of_one_step_says_so_when_another_step_has_that_field(shell):
    knobs = read_knobs(render(bundle(shell), shell, "train"))
    assert knobs["BATCH_SIZE_CACHE_TEXT"] == "16"
    assert "BATCH_SIZE" not in knobs
    assert {"NUM_WORKERS", "LEARNING_RATE"} <= knobs.keys()
    alone = read_knobs(render(bundle(shell, [steps()[2]]), shell, "train"))
    assert alone["BATCH_SIZE"] == "16"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_given_knob_reaches_every_step_that_uses_it(shell):
    data = render(bundle(shell), shell, "train", {"VAE_DTYPE": "bfloat16"})
    lines = [line for line in read_steps(data, shell) if "--vae_dtype" in line]
    assert [line[line.index("--vae_dtype") + 1] for line in lines] == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize("knobs", [{"SEED": "1; rm -rf"}, {"SEED": ""}, {"NO_SUCH": "1"}])
def test_wrong_knobs_are_refused(knobs):
    with pytest.raises(WangenError):
        render(bundle("sh"), "sh", "train", knobs)


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


@pytest.mark.parametrize("text", ["", "--%"])
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


# ---- bash, for real ----------------------------------------------------------------------------------------------


class Site:
    """A published bundle with a recording Python."""

    def __init__(self, folder, chosen, *, root=None, venv=("venv", ".venv")):
        self.folder, self.record = folder, folder / "record.jsonl"
        self.script = folder / "train_red_house.sh"
        write(self.script, render(bundle("sh", chosen, root=root, venv=venv), "sh", "train"))

    def python(self, place):
        program = self.folder / place
        program.parent.mkdir(parents=True)
        program.write_text(f"#!{sys.executable} -IS\n" + RECORDER.read_text(encoding="utf-8"), encoding="utf-8")
        program.chmod(0o755)
        return program

    def run(self, *words, cwd="/", **env):
        env = {"PATH": os.environ["PATH"], "RECORDER_OUT": str(self.record)} | env
        self.record.unlink(missing_ok=True)
        return subprocess.run(["bash", self.script, *words], capture_output=True, text=True, env=env, cwd=cwd)

    @property
    def calls(self):
        return read_calls(self.record)


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "bundle (x86) & 100% é日本 !x! 'q'"
    folder.mkdir()
    site = Site(folder, steps())
    site.python("venv/bin/python")
    return site


@needs_bash
def test_bash_hands_hostile_words_on_exactly(tmp_path):
    chosen = (*steps("é (x86) & 100% 'q' \\"), *prompts(*HOSTILE, *POSIX_ONLY))
    site = Site(tmp_path, chosen)
    site.python("venv/bin/python")
    done = site.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert [call["argv"] for call in site.calls] == [step.argv() for step in chosen]


@needs_bash
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(carried("sh"), min_size=1, max_size=3))
def test_bash_hands_drawn_prompts_on_exactly(tmp_path_factory, texts):
    chosen = prompts(*texts)
    site = Site(tmp_path_factory.mktemp("site"), chosen)
    site.python("venv/bin/python")
    assert site.run().returncode == 0
    assert [call["argv"] for call in site.calls] == [step.argv() for step in chosen]


@needs_bash
def test_steps_run_in_the_root_with_their_environment(site):
    done = site.run(VIRTUAL_ENV="/elsewhere")
    assert done.stdout.splitlines()[-1] == "wangen: train_red_house finished."
    for call in site.calls:
        assert call["cwd"] == str(site.folder)
        assert call["env"] == {
            "PYTHONUTF8": "1", "PYTHONSAFEPATH": "1", "WANGEN_SCRIPT": "1", "WANGEN_SCRIPT_VERSION": "0.1.0",
        }  # fmt: skip


@needs_bash
def test_the_first_failing_step_ends_the_script_with_its_code(site):
    done = site.run(RECORDER_FAIL="cache_text", RECORDER_CODE="7")
    assert done.returncode == 7
    assert [call["argv"][0] for call in site.calls] == ["check", "cache_latents", "cache_text"]
    assert "step cache_text failed (exit code 7)" in done.stderr
    assert "finished" not in done.stdout


@needs_bash
def test_a_step_name_runs_that_step_only(site):
    assert site.run("check_cache").returncode == 0
    assert [call["argv"][0] for call in site.calls] == ["check_cache"]


@needs_bash
def test_further_words_are_handed_to_that_step(site):
    for words in (["--fresh"], ["--seed=7", "two words", "", "*", "$x", "||"]):
        assert site.run("train", *words).returncode == 0
        assert [call["argv"] for call in site.calls] == [[*steps()[-1].argv(), *words]]


@needs_bash
@pytest.mark.parametrize("words", [("bake",), ("bake", "--fresh"), ("--fresh",), ("", "--fresh"), ("*",)])
def test_unknown_words_are_a_usage_error(site, words):
    done = site.run(*words)
    assert done.returncode == 2
    assert site.calls == []
    assert done.stderr.startswith("wangen: ")


@needs_bash
def test_missing_environment_says_what_to_do(site):
    shutil.rmtree(site.folder / "venv")
    done = site.run()
    assert done.returncode == 1
    assert "in the folder of a wangen clone:" in done.stderr
    assert done.stderr.splitlines()[-1] == f'  "{site.folder}/venv/bin/python" -m pip install ".[runtime]"'
    assert "WANGEN_PYTHON" in done.stderr


@needs_bash
def test_environment_without_wangen_gets_the_pip_line(site):
    done = site.run(RECORDER_EMPTY="1")
    assert done.returncode == 1
    assert "in the folder of a wangen clone:" in done.stderr
    assert done.stderr.splitlines()[-1] == f'  "{site.folder}/venv/bin/python" -m pip install ".[runtime]"'


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("index", ["", "https://example.org/whl"])
def test_without_python_or_package_the_same_lines_are_shown(shell, index):
    made = bundle(shell)
    made = replace(made, platform=replace(made.platform, torch_index=index))
    text = render(made, shell, "train").decode()
    assert text.count("in the folder of a wangen clone:") == 2
    assert text.count('".[runtime]"') == 2
    assert text.count("pip install torch --index-url https://example.org/whl") == (2 if index else 0)
    assert "wangen[" not in text


@needs_bash
def test_where_python_is_looked_for(tmp_path):
    site = Site(tmp_path, steps())
    windows = site.python("venv/Scripts/python.exe")
    assert site.run().returncode == 1, f"{windows} is of no use here"
    active = site.python("active env/bin/python")
    assert site.run(VIRTUAL_ENV=str(active.parent.parent)).returncode == 0
    own = site.python("own/py thon")
    assert site.run(WANGEN_PYTHON=str(own)).returncode == 0
    assert site.run(WANGEN_PYTHON=str(tmp_path)).returncode == 1
    site.python(".venv/bin/python")
    assert site.run().returncode == 0


@needs_bash
def test_a_moved_bundle_runs_where_it_is(site, tmp_path):
    there = tmp_path / "moved to ünther's"
    site.folder.rename(there)
    site.folder, site.script, site.record = there, there / site.script.name, there / site.record.name
    assert site.run().returncode == 0
    assert {call["cwd"] for call in site.calls} == {str(there)}


@needs_bash
@pytest.mark.parametrize("shell", ["sh", "dash"])
def test_another_shell_hands_over_to_bash(site, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    env = {"PATH": os.environ["PATH"], "RECORDER_OUT": str(site.record)}
    assert subprocess.run([shell, site.script, "train"], env=env, capture_output=True).returncode == 0
    assert len(site.calls) == 1


@needs_bash
def test_a_configured_root_and_environment(tmp_path):
    root = tmp_path / "root's $x"
    site = Site(tmp_path, steps(), root=str(root), venv=("env", str(tmp_path / "abs env")))
    done = site.run()
    assert (done.returncode, str(root) in done.stderr) == (1, True)
    root.mkdir()
    site.python("abs env/bin/python")
    assert site.run().returncode == 0
    assert {call["cwd"] for call in site.calls} == {str(root)}


@needs_bash
def test_a_knob_that_the_user_broke_is_named(site):
    site.script.write_text(site.script.read_text().replace("SEED='42'", "SEED='4 2'"))
    done = site.run()
    assert (done.returncode, "the knob SEED" in done.stderr, site.calls) == (2, True, [])


def test_the_templates_name_no_flag():
    folder = Path(scripts.__file__).resolve().parent.parent / "templates"
    for template in folder.glob("run.*.j2"):
        words = set(template.read_text(encoding="utf-8").split())
        assert {word for word in words if word.startswith("--")} <= {"--", "--index-url"}, template.name
