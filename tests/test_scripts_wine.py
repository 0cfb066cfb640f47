"""The .bat scripts run under wine with a real CPython for Windows; `tests/shells/setup_wine.sh` installs both."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from shells.bundles import HOSTILE, bundle, prompts, read_calls, steps

from wangen.generator.scripts import render, write

TESTS = Path(__file__).resolve().parent
HOME = Path(os.environ.get("WANGEN_WINE", TESTS.parent / ".wine"))
READY = shutil.which("wine") is not None and (HOME / "python" / "python.exe").exists() and (HOME / "prefix").is_dir()
pytestmark = [
    pytest.mark.wine,
    pytest.mark.skipif(not READY, reason="no wine with a Windows Python here: run tests/shells/setup_wine.sh"),
]
EXPLORER = 'C:\\windows\\system32\\cmd.exe /c ""C:\\x.bat" "'
# wine 8 expands a variable's value twice and looks for a program with a semicolon in its path piece by piece; so
# folders with % or ; are left to Windows itself. As words of a command line both are among the hostile ones.
FOLDER = "musubi (x86) & é日本 !x! ^y"


@pytest.fixture(scope="session")
def wine():
    """The environment of wine, its server kept alive: else its services inherit the pipes of the first program."""
    env = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "VIRTUAL_ENV", "PYTHONPATH")}
    env |= {
        "WINEPREFIX": str(HOME / "prefix"),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "mscoree,mshtml=",
        "LC_ALL": "hi_IN.UTF-8",
    }
    detached = {"env": env, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # The prefix belongs to the caller; only a server that this session started is ended.
    started = subprocess.run(["wineserver", "-p"], **detached).returncode == 0
    subprocess.run(["wine", "cmd", "/c", "exit"], check=True, **detached)
    yield env
    if started:
        subprocess.run(["wineserver", "-k"], **detached)


def windows(path):
    return "Z:" + str(path).replace("/", "\\")


class Site:
    """A published bundle with the Windows Python and a `wangen.runtime` that records its calls."""

    def __init__(self, wine, folder, chosen, **details):
        self.wine, self.folder, self.record = wine, folder, folder.parent / "record.jsonl"
        folder.mkdir(exist_ok=True)
        write(folder / "train_red_house.bat", render(bundle("bat", chosen, **details), "bat", "train"))
        self.library = folder.parent / "library"
        runtime = self.library / "wangen" / "runtime"
        runtime.mkdir(parents=True)
        (runtime / "__init__.py").touch()
        (runtime / "__main__.py").write_text(
            "import sys, recorder\nsys.exit(recorder.main(['-m', 'wangen.runtime', *sys.argv[1:]]))\n"
        )
        shutil.copy(TESTS / "shells" / "recorder.py", self.library)

    def python(self, environment="venv"):
        place = self.folder / environment
        place.mkdir(parents=True)
        (place / "Scripts").symlink_to(HOME / "python", target_is_directory=True)

    def run(self, *words, **env):
        self.record.unlink(missing_ok=True)
        env = {"RECORDER_OUT": windows(self.record), "PYTHONPATH": windows(self.library)} | env
        command = ["wine", "cmd", "/c", "train_red_house.bat", *words]
        # Pipes, no files: under wine 8 CPython dies when an output is a regular file.
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.wine | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
        )

    @property
    def calls(self):
        return read_calls(self.record)


@pytest.fixture
def site(wine, tmp_path):
    site = Site(wine, tmp_path / FOLDER, steps())
    site.python()
    return site


def test_hostile_words_reach_python_exactly(wine, tmp_path):
    plain = steps()
    chosen = (
        *steps("é日本 (x86) & 100% !x! ^y 'q' \\")[:4],
        type(plain[4])(
            dataset_config=plain[4].dataset_config, dit="C:\\100% (x86)\\", output_dir="\\\\nas\\a & b\\",
            output_name="%PATH%", optimizer_args=tuple(HOSTILE), seed=-1,
        ),
        *prompts("", 'x' * 7000),
    )  # fmt: skip
    site = Site(wine, tmp_path / FOLDER, chosen)
    site.python()
    done = site.run()
    assert [call["argv"] for call in site.calls] == [step.argv() for step in chosen]
    assert done.returncode == 0
    assert "wangen: train_red_house finished." in done.stdout
    assert {call["cwd"] for call in site.calls} == {windows(site.folder)}
    assert site.calls[0]["env"] == {
        "PYTHONUTF8": "1", "PYTHONSAFEPATH": "1", "WANGEN_SCRIPT": "1", "WANGEN_SCRIPT_VERSION": "0.1.0",
    }  # fmt: skip


@pytest.mark.parametrize(("code", "seen"), [("7", 7), ("-1073741819", 5)])
def test_the_first_failing_step_ends_the_script_with_its_code(site, code, seen):
    done = site.run(RECORDER_FAIL="cache_latents", RECORDER_CODE=code)
    assert [call["argv"][0] for call in site.calls] == ["check", "cache_latents"]
    assert f"step cache_latents failed, exit code {code}" in done.stdout
    assert "finished" not in done.stdout
    # Linux sees the lowest eight bits of a Windows exit code.
    assert done.returncode == seen


def test_a_step_name_runs_that_step_only(site):
    assert site.run("check_cache").returncode == 0
    assert [call["argv"][0] for call in site.calls] == ["check_cache"]


@pytest.mark.parametrize("words", [["--fresh"], ["--resume", "C:\\a b & (c)", "--x", "é !x! ^y"]])
def test_further_words_are_handed_to_that_step(site, words):
    assert site.run("train", *words).returncode == 0
    assert [call["argv"] for call in site.calls] == [[*steps()[-1].argv(), *words]]


@pytest.mark.parametrize("words", [("bake",), ("bake", "--fresh"), ("--fresh",), ("train", *"abcde")])
def test_unknown_words_are_a_usage_error(site, words):
    done = site.run(*words)
    assert (done.returncode, site.calls) == (2, [])
    assert "cache_latents" in done.stdout


def test_missing_environment_says_what_to_do(wine, tmp_path):
    done = Site(wine, tmp_path / FOLDER, steps()).run()
    assert done.returncode == 1
    assert "in the folder of a wangen clone:" in done.stdout
    assert f'"{windows(tmp_path / FOLDER)}\\venv\\Scripts\\python.exe" -m pip install ".[runtime]"' in done.stdout


def test_environment_without_wangen_gets_the_pip_line(site):
    done = site.run(PYTHONPATH="")
    assert done.returncode == 1
    assert "in the folder of a wangen clone:" in done.stdout
    assert f'"{windows(site.folder)}\\venv\\Scripts\\python.exe" -m pip install ".[runtime]"' in done.stdout


def test_where_python_is_looked_for(wine, tmp_path):
    site = Site(wine, tmp_path / FOLDER, steps()[:1])
    site.python("active & (x86)")
    environment = windows(site.folder / "active & (x86)")
    assert site.run(VIRTUAL_ENV=environment).returncode == 0
    assert site.run(WANGEN_PYTHON=environment + "\\Scripts\\python.exe").returncode == 0
    done = site.run(WANGEN_PYTHON="C:\\no & where.exe")
    assert (done.returncode, "WANGEN_PYTHON names no program" in done.stdout) == (1, True)


def test_a_configured_root(wine, tmp_path):
    root = tmp_path / "root & 100% (x86) é"
    site = Site(wine, tmp_path / FOLDER, steps()[:1], root=windows(root), venv=(windows(tmp_path / FOLDER / "env"),))
    site.python("env")
    done = site.run()
    assert (done.returncode, f'this folder is not there: "{windows(root)}"' in done.stdout) == (1, True)
    root.mkdir()
    assert site.run().returncode == 0
    assert {call["cwd"] for call in site.calls} == {windows(root)}


def test_a_double_clicked_window_stays_open_on_failure_only(site):
    def prompt(**env):
        done = site.run("check", CMDCMDLINE=EXPLORER, RECORDER_CODE="7", **env)
        return done.stdout.strip().splitlines()[-1]

    held = prompt(RECORDER_FAIL="check")
    assert "wangen" not in held
    assert "finished" in prompt()
    assert "failed" in prompt(RECORDER_FAIL="check", WANGEN_NO_PAUSE="1")
