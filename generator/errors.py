"""The one error type for everything that a user can cause and mend."""

WRONG_USAGE = 2
"""The exit code of a wrong command line: as it is, it will never do."""


class WangenError(Exception):
    """A problem in words: what was found, where, and what to do.

    Raised anywhere, caught at one edge (`cli.main` and `runtime.session`), where it becomes one message
    and the exit code.

    Args:
        found: what is wrong, as a fact.
        where: the file, key or argument it was found in; empty when the fact already says it.
        cure: what the user can do now.
        exit_code: 1 for a failure, 2 for wrong usage.
    """

    def __init__(self, found: str, *, where: str = "", cure: str = "", exit_code: int = 1) -> None:
        super().__init__(found)
        self.found = found
        self.where = where
        self.cure = cure
        self.exit_code = exit_code

    def __str__(self) -> str:
        """The message as the user reads it: at most three lines.

        >>> print(WangenError("no caption", where="a.jpg", cure="write a.txt"))
        no caption
          where: a.jpg
          do:    write a.txt
        """
        lines = [self.found]
        if self.where:
            lines.append(f"  where: {printable(self.where)}")
        if self.cure:
            lines.append(f"  do:    {self.cure}")
        return "\n".join(lines)


class UsageError(WangenError):
    """A wrong command line or configuration file: exit code 2."""

    def __init__(self, found: str, *, where: str = "", cure: str = "") -> None:
        super().__init__(found, where=where, cure=cure, exit_code=WRONG_USAGE)


def printable(text: str) -> str:
    r"""Text of anybody's, such as a file's name, on one line and without what would steer a terminal.

    >>> print(printable("a\x1b[31m\nb"))
    a\x1b[31m\nb
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def many(number: int, what: str, plural: str = "") -> str:
    """A number of things in words.

    >>> many(1, "image"), many(2, "clip"), many(0, "entry", "entries")
    ('1 image', '2 clips', '0 entries')
    """
    return f"{number} {what if number == 1 else plural or what + 's'}"


def bytes_text(number: int) -> str:
    """A size for people.

    >>> bytes_text(999), bytes_text(12_345), bytes_text(3_000_000_000)
    ('999 bytes', '12.3 kB', '3.0 GB')
    """
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} bytes"
