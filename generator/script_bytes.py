"""Line ends and byte order marks of a script: what an editor makes wrong where every line looks right."""

from typing import NamedTuple

_UTF8 = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Spoilt(NamedTuple):
    """What is wrong with the bytes, in which line it begins, and what to do."""

    line: int
    found: str
    cure: str


def wrong_line_ends(data: bytes, shell: str, name: str) -> Spoilt | None:
    """LF in a .bat, CRLF in a .sh; `name` is the file's."""
    if data.startswith(_UTF16):
        data = data[:2] + data.decode("utf-16", "replace").encode()
    if shell == "bat" and data.count(b"\n") > data.count(b"\r\n"):
        found = "this .bat file has LF line ends; cmd needs CRLF, and misses labels without"
        return Spoilt(1, found, "save it with Windows (CRLF) line ends")
    converted = data.split(b"\n")[0].endswith(b"\r") or (not data.startswith(b"#!") and b"\r\n" in data)
    if shell == "sh" and converted:
        found = "this .sh file has CRLF line ends, which bash takes for part of the words"
        return Spoilt(1, found, f"save it with Unix (LF) line ends: sed -i 's/\\r$//' {name}")
    return None


def wrong_mark(data: bytes, shell: str) -> Spoilt | None:
    """A byte order mark that the shell stumbles over; none where Windows PowerShell needs it."""
    if shell != "ps1" and data.startswith((_UTF8, *_UTF16)):
        found = "this file begins with a byte order mark, which spoils its first line"
        return Spoilt(1, found, "save it as UTF-8 without a byte order mark")
    foreign = next((n for n, line in enumerate(data.split(b"\n"), 1) if not line.isascii()), 0)
    if shell == "ps1" and foreign and not data.startswith((_UTF8, *_UTF16)):
        found = "Windows PowerShell reads this file in another code page, because it has no byte order mark"
        return Spoilt(foreign, found, "save it as UTF-8 with BOM")
    return None
