"""Completion in the shell: what `wangen completion` prints makes a real bash complete commands, flags and values."""

import os
import shutil
import subprocess
import sys

import click
import pytest

from wangen.generator import completion
from wangen.generator.cli import main, wangen
from wangen.generator.completion import SHELLS, script
from wangen.generator.errors import UsageError

BASH = """
eval "$1"
COMP_LINE="$2"
read -ra COMP_WORDS <<< "$2"
case $2 in *' ') COMP_WORDS+=('') ;; esac
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
compopt() { :; }
_wangen_completion wangen
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def on_path(tmp_path):
    """An environment in whose PATH `wangen` is this one."""
    command = tmp_path / "wangen"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m wangen.runtime "$@"\n')
    command.chmod(0o755)
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="bash")
@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("wangen tr", {"train"}),
        ("wangen models do", {"download"}),
        ("wangen train --network_d", {"--network_dim", "--network_dropout"}),
        ("wangen train --task i2v", {"i2v-14B", "i2v-A14B"}),
        ("wangen train --lora_layout ", {"comfyui", "kohya", "diffusers"}),
        ("wangen train --config_file ", set()),
    ],
)
def test_bash_completes(on_path, tmp_path, line, some):
    words = ["bash", "-c", BASH, "bash", script("bash", wangen), line]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=on_path, cwd=tmp_path)
    assert done.stderr == ""
    assert some <= set(done.stdout.split())
    assert some or not done.stdout.strip()


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes(on_path, tmp_path):
    (tmp_path / "wangen.fish").write_text(script("fish", wangen))
    line = "source wangen.fish; complete -C'wangen train --task i2v'"
    env = on_path | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    done = subprocess.run(["fish", "-c", line], capture_output=True, text=True, check=True, env=env, cwd=tmp_path)
    assert done.stdout.split() == ["i2v-14B", "i2v-A14B"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_get_a_script_that_asks_wangen(shell, capsys):
    assert main(["completion", shell]) == 0
    assert f"_WANGEN_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_powershell_gets_one_where_click_has_it(capsys):
    code = main(["completion", "powershell"])
    out, err = capsys.readouterr()
    assert (code == 0 and "Register-ArgumentCompleter" in out) or (code == 2 and "upgrade click" in err)


def test_an_older_click_is_named_with_the_cure(monkeypatch):
    monkeypatch.setattr(completion, "get_completion_class", lambda shell: None)
    with pytest.raises(UsageError, match="has no completion for powershell"):
        script("powershell", wangen)


def test_another_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert ", ".join(SHELLS) in capsys.readouterr().err


def test_a_command_that_is_not_there_is_no_message_while_words_are_completed():
    with click.Context(wangen, resilient_parsing=True) as context:
        assert wangen.resolve_command(context, ["foo"])[1] is None
