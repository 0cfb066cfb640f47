"""A part of the caching work for each of several processes, fixed by the entries' keys: they need not talk."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from wangen.generator.errors import UsageError
from wangen.runtime.cache import Recipe

ARRAY = "SLURM_ARRAY_TASK_"
"""How the environment variables of a Slurm array begin."""
_FROM = ((f"{ARRAY}ID", f"{ARRAY}COUNT", f"{ARRAY}MIN", f"{ARRAY}STEP"), ("RANK", "WORLD_SIZE", "", ""))
"""Environment variables that hold a process's number, how many there are, the first number (0 where none) and the
distance from number to number (1 where none)."""


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str | None, environment: Mapping[str, str] = os.environ) -> "Shard":
        """`2/8`, `auto` (from Slurm's array or torchrun's variables), or None for all the work.

        Raises:
            UsageError: it is neither, or `auto` finds no such variable.

        >>> Shard.parse("2/8"), Shard.parse("auto", {"RANK": "1", "WORLD_SIZE": "4"})
        (Shard(index=2, count=8), Shard(index=1, count=4))
        """
        if text is None:
            return cls()
        if text == "auto":
            text = _from_environment(environment)
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if not match or int(match[1]) >= int(match[2]):
            raise UsageError(f"--shard {text} is no part of a whole", cure="write 0/4, 1/4, 2/4 and 3/4 for four parts")
        return cls(int(match[1]), int(match[2]))

    def has(self, recipe: Recipe) -> bool:
        """Whether an entry belongs to this part; all entries of one media file belong to the same one."""
        if self.count == 1:
            return True
        return int(unit_of(recipe)[:15], 16) % self.count == self.index


def unit_of(recipe: Recipe) -> str:
    """What belongs together when work is divided, in hex digits: the entries of one media file, or of one text."""
    return str(recipe.content.get("source") or recipe.content_key)


def _from_environment(environment: Mapping[str, str]) -> str:
    for number, count, first, distance in _FROM:
        if number in environment and count in environment:
            try:
                start, step = int(environment.get(first, 0)), max(1, int(environment.get(distance, 1)))
                return f"{(int(environment[number]) - start) // step}/{environment[count]}"
            except ValueError:
                told = ", ".join(f"{name}={environment[name]}" for name in (number, count))
                raise UsageError(f"--shard auto: {told} are no numbers", cure="write the part yourself: 0/4") from None
    raise UsageError(
        "--shard auto: there is no SLURM_ARRAY_TASK_ID with SLURM_ARRAY_TASK_COUNT, and no RANK with WORLD_SIZE",
        cure="start it from a Slurm array or with torchrun, or write the part yourself: 0/4",
    )
