"""Completion in the shell, as click makes it."""

from importlib.metadata import version

import click
from click.shell_completion import get_completion_class

from wangen.generator import COMPLETE
from wangen.generator.errors import UsageError

SHELLS = ("bash", "zsh", "fish", "powershell")


def script(shell: str, command: click.Command) -> str:
    """What a shell has to run so that it completes `wangen`.

    Raises:
        UsageError: there is none for this shell.
    """
    if shell not in SHELLS:
        raise UsageError(f"there is no completion for {shell!r}", cure=f"one of {', '.join(SHELLS)}")
    made = get_completion_class(shell)
    if made is None:
        raise UsageError(f"click {version('click')} has no completion for {shell}", cure="pip install --upgrade click")
    return made(command, {}, "wangen", COMPLETE).source()
