"""A finding of the doctor: what was found, where, and what to do."""

from dataclasses import dataclass

from wangen.generator.doctor.catalogue import KINDS, Level
from wangen.generator.errors import printable


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: `problem` stops or spoils the work, a `note` is worth knowing.
        name: of its kind, as docs/doctor.md lists it.
        what: was found.
        where: the file, folder or variable; empty when `what` says it.
        cure: what to do; empty where nothing has to be done.
    """

    level: Level
    name: str
    what: str
    where: str = ""
    cure: str = ""

    def __str__(self) -> str:
        """The level in a column of its own, the fact, and below it where and what to do.

        >>> print(Finding("ok", "system", "Linux"))
          ok       Linux
        """
        lines = [f"  {self.level:8} {printable(self.what)}"]
        lines += [f"{'':11}where: {printable(self.where)}"] if self.where else []
        lines += [f"{'':11}do:    {self.cure}"] if self.cure else []
        return "\n".join(lines)


def found(name: str, what: str, where: str = "", cure: str = "") -> Finding:
    """A finding of a kind: its level is the kind's, and so is its cure unless another one is given.

    Args:
        name: of the kind.
        what: was found.
        where: the file, folder or variable.
        cure: a more precise one than the kind's.
    """
    kind = KINDS[name]
    return Finding(kind.level, name, what, where, cure or kind.cure)
