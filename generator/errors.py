"""The one error type for everything that a user can cause and mend."""

import errno
import os
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from wangen.generator.early import WAS_STOPPED as WAS_STOPPED

WRONG_USAGE = 2
"""The exit code of a wrong command line: as it is, it will never do."""


class WangenError(Exception):
    """A problem in words: what was found, where, and what to do.

    Raised anywhere, caught at one edge (`cli.main` and `session`), where it becomes one message
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
        lines = [shortened(line, _LINE) for line in self.found.split("\n")]
        if self.where:
            lines.append(f"  where: {printable(shortened(self.where))}")
        if self.cure:
            lines.append(f"  do:    {self.cure}")
        return "\n".join(lines)


def in_line(error: WangenError | OSError) -> str:
    """The message in one line, as a log takes it.

    >>> in_line(WangenError("no caption", where="a.jpg", cure="write a.txt"))
    'a.jpg: no caption; write a.txt'
    """
    if isinstance(error, WangenError):
        return "; ".join(filter(None, (": ".join(filter(None, (error.where, error.found))), error.cure)))
    return str(error)


class UsageError(WangenError):
    """A wrong command line or configuration file: exit code 2."""

    def __init__(self, found: str, *, where: str = "", cure: str = "") -> None:
        super().__init__(found, where=where, cure=cure, exit_code=WRONG_USAGE)


class TakenOverError(WangenError):
    """Another run has what this one works on, or wanted to; its files, its report among them, stay as they are."""


_DISK = {errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""Errors that only the user can mend: a full or read-only disk, and missing rights."""
_NO_ANSWER = {getattr(errno, name, errno.EIO) for name in ("EIO", "ESTALE", "ENODEV", "ENXIO", "EHOSTDOWN")}
"""A disk, a network drive or a terminal is gone."""


_FILES = "close what holds many files open, or raise the limit of open files (ulimit -n)"
_ANSWERS = "see whether the disk or network drive answers"
_CURES = {
    **dict.fromkeys(_NO_ANSWER, _ANSWERS),
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOTDIR: "give another path: a file is where a folder would have to be",
    errno.EEXIST: "give another path: a file is where a folder would have to be",
    errno.EISDIR: "give another path: a folder has this name",
    errno.ELOOP: "give another path: this is a link that leads to itself",
}
"""What to do when no room and no rights would help."""


def write_cure(error: OSError) -> str:
    """What to do when a file cannot be written.

    >>> write_cure(OSError(errno.ENAMETOOLONG, "File name too long"))
    'give a shorter name'
    >>> write_cure(OSError(errno.ENOSPC, "No space left on device"))
    'free space or fix the rights'
    """
    return _CURES.get(error.errno or 0, "free space or fix the rights")


def read_cure(error: OSError) -> str:
    """What to do when a file cannot be read.

    >>> read_cure(PermissionError(errno.EACCES, "Permission denied"))
    'fix its rights'
    >>> read_cure(OSError(errno.EIO, "Input/output error"))
    'see whether the disk or network drive answers'
    """
    if error.errno == errno.ENOENT:
        return "see whether it is there"
    return "fix its rights" if isinstance(error, PermissionError) else _CURES.get(error.errno or 0, _ANSWERS)


def unreadable(path: Path, error: OSError) -> WangenError:
    """The error of a file that is there and cannot be read."""
    return WangenError(f"cannot be read: {error.strerror or error}", where=str(path), cure=read_cure(error))


def in_words(error: OSError | MemoryError) -> WangenError | None:
    """What the system says of a file of the user's, a disk or its memory; None when it is about none, and our bug."""
    again = ", then run the same line again: nothing saved is lost"
    if isinstance(error, MemoryError):
        return WangenError("the memory of this machine is full", cure=f"close what else needs memory{again}")
    if error.errno == errno.ENOENT and error.filename is None and _is_nowhere():
        return WangenError("the working folder is gone", cure="change to a folder that is there")
    if error.errno not in _DISK | _NO_ANSWER and error.filename is None:
        return None
    cure = "look at this path"
    if error.errno in _DISK:
        cure = f"free space or fix the rights{again}"
    elif error.errno in _NO_ANSWER:
        what = "disk or network drive" if error.filename else "disk, network drive or terminal"
        cure = f"see whether the {what} answers{again}"
    return WangenError(error.strerror or str(error), where=shortened(os.fsdecode(error.filename or "")), cure=cure)


def _is_nowhere() -> bool:
    try:
        return not os.getcwd()  # noqa: PTH109 - Path.cwd() asks the same
    except FileNotFoundError:
        return True


_SHOWN = 400
"""So many characters of a path are shown."""
_LINE = 1000
"""So many of a line that says a fact, which may repeat what a user wrote."""


def shortened(text: str, most: int = _SHOWN) -> str:
    """A text of at most a few lines: a path can have thousands of characters.

    >>> shortened("a" * 500) == "a" * 200 + "…" + "a" * 100
    True
    """
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


_SHOW_NOTHING = {"Cc", "Cf", "Zs", "Zl", "Zp"}
"""Categories of Unicode: control and format characters, blanks."""
_NAMED = 5
"""So many of many names are."""


def printable(text: str) -> str:
    r"""Text of anybody's, such as a file's name, on one line and without what would steer a terminal.

    >>> print(printable("a\x1b[31m\nb"))
    a\x1b[31m\nb
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def is_blank(text: str) -> bool:
    r"""Whether a text has nothing but blanks and characters that show nothing, such as a zero-width space.

    >>> is_blank(" \u200b\ufeff\n"), is_blank("\u200bcat")
    (True, False)
    """
    return all(unicodedata.category(letter) in _SHOW_NOTHING for letter in text)


def many(number: int, what: str, plural: str = "") -> str:
    """A number of things in words.

    >>> many(1, "image"), many(2, "clip"), many(0, "entry", "entries")
    ('1 image', '2 clips', '0 entries')
    """
    return f"{number} {what if number == 1 else plural or what + 's'}"


def some(names: Sequence[str]) -> str:
    """The first names of many.

    >>> some("abc"), some("abcdefg")
    ('a, b, c', 'a, b, c, d, e …')
    """
    return ", ".join(names[:_NAMED]) + (" …" if len(names) > _NAMED else "")


def bytes_text(number: int) -> str:
    """A size for people.

    >>> bytes_text(999), bytes_text(12_345), bytes_text(3_000_000_000)
    ('999 bytes', '12.3 kB', '3.0 GB')
    """
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} bytes"


def duration_text(seconds: float) -> str:
    """A time for people.

    >>> duration_text(4.25), duration_text(200), duration_text(7300)
    ('4.2 s', '3 min 20 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def did_you_mean(name: str, names: Iterable[str], otherwise: str, *, form: str = "{}", cutoff: float = 0.6) -> str:
    """The cure of a word that is not known: the nearest that is, or else what `otherwise` says.

    Args:
        name: the word.
        names: the known ones.
        otherwise: where none is near.
        form: how a name is written.
        cutoff: how near it has to be, from 0 to 1.

    >>> did_you_mean("lerning_rate", ["learning_rate"], "take it off", form="--{}")
    'did you mean --learning_rate?'
    """
    from difflib import get_close_matches  # a step that has nothing to do does not wait for it

    near = get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
    return f"did you mean {form.format(near[0])}?" if near else otherwise


def one_of(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """All known words as a cure, and first the one that was probably meant.

    >>> one_of("adam", ["AdamW", "Lion"])
    'did you mean AdamW? one of AdamW, Lion'
    """
    known = list(names)
    return " ".join(filter(None, (did_you_mean(name, known, "", cutoff=cutoff), f"one of {', '.join(known)}")))
