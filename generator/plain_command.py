"""A click command whose flags do not swallow each other."""

from collections.abc import Sequence
from itertools import takewhile

import click

from wangen.generator.errors import UsageError


class PlainCommand(click.Command):
    """A command that refuses a flag with fewer values than it takes, for which click would take the next flag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse words.

        Raises:
            UsageError: a flag has the next flag in the place of a value. A text may begin with dashes, but be no flag.
        """
        if not ctx.resilient_parsing:
            self._refuse_too_few(args)
        return super().parse_args(ctx, args)

    def _refuse_too_few(self, words: Sequence[str]) -> None:
        options = [parameter for parameter in self.params if isinstance(parameter, click.Option)]
        named = {_plain(name): option for option in options for name in (*option.opts, *option.secondary_opts)}
        known = {*named, "--help"}
        for number, word in enumerate(takewhile(lambda word: word != "--", words)):
            option, after = named.get(_plain(word)), words[number + 1 :]
            if option is None or option.is_flag or option.count or option.multiple:
                continue
            if option.nargs > 1:
                values = list(takewhile(lambda value: not value.startswith("--"), after[: option.nargs]))
                if len(values) < option.nargs:
                    raise UsageError(f"{word} takes {option.nargs} values, got {' '.join(values) or 'none'}",
                                     cure=f"give {option.help}")  # fmt: skip
            elif after and _plain(after[0].partition("=")[0]) in known:
                text = isinstance(option.type, click.types.StringParamType)
                joined = f"; a text that is called so is joined to it: {word}={after[0]}" if text else ""
                raise UsageError(f"{word} has no value: {after[0]} follows", cure=f"give {option.help}{joined}")


def _plain(flag: str) -> str:
    """A flag as it is declared, whichever dashes it is written with; any other word as nothing."""
    return f"--{flag[2:].replace('-', '_')}" if flag.startswith("--") else ""
