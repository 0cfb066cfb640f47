"""The command line as a person meets it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from wangen.generator.cli import main
from wangen.generator.commands import StepCommand
from wangen.generator.errors import WAS_STOPPED
from wangen.generator.steps import STEPS
from wangen.generator.table import spellings
from wangen.generator.tasks import supported


def run_cli(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "wangen.runtime", *words], capture_output=True, text=True, check=False, cwd=cwd
    )


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_overview_names_every_command_without_importing_torch_or_click(tmp_path, words):
    code = (
        f"import sys; sys.argv[1:] = {words}; from wangen.generator.entry import entry; entry(); "
        "print({'torch', 'click', 'numpy'} & set(sys.modules))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    for command in "demo init publish check cache_latents cache_text check_cache train generate".split():
        assert f"\n  {command} " in shown
    assert shown.endswith("set()\n")


@pytest.mark.parametrize(
    "step", ["check", "cache-latents", "cache_text", "check_cache", "wan_train_network", "generate"]
)
def test_help_of_a_step_does_not_import_torch(tmp_path, step):
    code = (
        f"import sys; from wangen.generator.cli import main; main(['{step}', '--help']); print('torch' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert "--log_file" in shown
    assert shown.endswith("False\n")


def test_version_is_the_package_version(capsys):
    assert main(["--version"]) == 0
    assert "0.1" in capsys.readouterr().out


def test_unknown_command_gets_the_nearest_one(capsys):
    assert main(["publsh", "x"]) == 2
    assert "did you mean publish?" in capsys.readouterr().err


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.command)
def test_every_spelling_of_a_flag_is_taken(step):
    command = StepCommand(step, lambda _step: 0)
    taken = {name.removeprefix("--") for option in command.params for name in option.opts}
    assert {name for name, *_ in spellings(step)} - taken == set()


def test_a_task_that_is_proposed_is_one_that_is_not_refused_later(tmp_path, capsys):
    for words in (["train", "--dit", "x", "--output_dir", "o", "--output_name", "n", "--dataset_config", "d"],
                  ["cache_latents", "--vae", "x", "--dataset_config", "d"]):  # fmt: skip
        assert main([*words, "--task", "zzz"]) == 2
        assert f"do:    one of {', '.join(supported())}" in capsys.readouterr().err
    command = StepCommand(STEPS[0], lambda _step: 0)
    (task,) = (option for option in command.params if option.name == "task")
    proposed = [item.value for item in task.shell_complete(click.Context(command), "")]
    assert proposed == supported()
    assert main(["init", str(tmp_path)]) == 0
    (tmp_path / "wangen.toml").write_text('model = "zzz"\n')
    assert main(["publish", "cats", "--workspace", str(tmp_path)]) == 2
    assert "flf2v" not in capsys.readouterr().err


def test_errors_are_one_message_without_a_traceback(tmp_path):
    for words, code in [
        (["publish", "cats"], 2),
        (["check", "--dataset_config", "none.toml"], 1),
        (["train", "--nonsense"], 2),
        (["cache_latents", "--dataset_config", "none.toml", "--vae", "none.pth"], 1),
    ]:
        result = run_cli(*words, cwd=tmp_path)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        assert result.stderr.strip()


def test_the_runtime_module_and_the_command_are_the_same(tmp_path):
    command = Path(sys.executable).with_name("wangen.exe" if os.name == "nt" else "wangen")
    if not command.exists():
        pytest.skip("the console script is not installed in this environment")
    through_module = run_cli("train", "--help", cwd=tmp_path).stdout
    through_command = subprocess.run([command, "train", "--help"], capture_output=True, text=True, check=True).stdout
    assert through_module == through_command
    assert "--network_dim" in through_module


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
def test_ctrl_c_while_libraries_are_imported_is_one_message_and_its_own_exit_code(tiny_run, tmp_path):
    """An import that is broken off would end in a traceback of diffusers or numpy, or swallow the interrupt."""
    words = ["generate", "--prompt", "a", "--save_path", str(tmp_path / "a.mp4"), "--infer_steps", "500"]
    words += [word for flag, path in tiny_run.weights.items() for word in (f"--{flag}", str(path))]
    num_judged = 0
    for delay_s in (0.2, 0.4, 0.7, 1.0, 1.5, 2.2, 3.0):
        process = subprocess.Popen([sys.executable, "-m", "wangen.runtime", *words], stderr=subprocess.PIPE, text=True)
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=60)
        if process.returncode == -signal.SIGINT and "/wangen/" not in shown:
            continue  # on a busy machine Python itself has not started yet
        num_judged += 1
        assert process.returncode == WAS_STOPPED, (delay_s, shown)
        assert "Traceback" not in shown, (delay_s, shown)
        assert shown.count("run the same line again") == 1, (delay_s, shown)
    assert num_judged >= 4


@pytest.mark.skipif(os.name == "nt", reason="several processes are for Linux")
@pytest.mark.parametrize(("processes", "code"), [("1", -signal.SIGABRT), ("2", 0)])
def test_of_several_processes_one_ends_before_the_interpreter_ends_the_threads_of_libraries(processes, code):
    program = (
        "import atexit, os, sys\nfrom wangen.generator.entry import entry\natexit.register(os.abort)\n"
        "sys.argv = ['wangen', '--version']\nentry()\n"
    )
    environment = os.environ | {"WORLD_SIZE": processes}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code
    assert done.stdout.startswith("wangen ")


@pytest.mark.skipif(os.name == "nt", reason="a shell closes the output")
def test_a_closed_output_is_no_traceback():
    line = [sys.executable, "-m", "wangen.runtime", "--version"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name == "nt", reason="such names are a matter of Linux")
def test_a_name_that_the_terminal_cannot_show_is_no_error(tmp_path):
    command = Path(sys.executable).with_name("wangen")
    if not command.exists():
        pytest.skip("the console script is not installed in this environment")
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    done = subprocess.run([command, "init", folder], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"caf\udce9" in done.stdout
