"""A click command whose flags do not swallow each other."""

from collections.abc import Sequence
from itertools import pairwise

import click

from wangen.generator.errors import UsageError


class PlainCommand(click.Command):
    """A command that refuses a flag without its value, for which click would take the next flag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse words.

        Raises:
            UsageError: a flag has the next flag in the place of its value, which may begin with dashes, but be none.
        """
        if not ctx.resilient_parsing:
            self._refuse_flag_for_value(args)
        return super().parse_args(ctx, args)

    def _refuse_flag_for_value(self, words: Sequence[str]) -> None:
        options = [parameter for parameter in self.params if isinstance(parameter, click.Option)]
        named = {_plain(name): option for option in options for name in (*option.opts, *option.secondary_opts)}
        known = {*named, "--help"}
        for word, value in pairwise(words):
            if word == "--":
                break
            option = named.get(_plain(word))
            if option and _takes_one(option) and _plain(value.partition("=")[0]) in known:
                text = isinstance(option.type, click.types.StringParamType)
                joined = f"; a text that is called so is joined to it: {word}={value}" if text else ""
                raise UsageError(f"{word} has no value: {value} follows", cure=f"give {option.help}{joined}")


def _takes_one(option: click.Option) -> bool:
    return not (option.is_flag or option.count or option.multiple) and option.nargs == 1


def _plain(flag: str) -> str:
    """A flag as it is declared, whichever dashes it is written with; any other word as nothing."""
    return f"--{flag[2:].replace('-', '_')}" if flag.startswith("--") else ""
