"""The line in the leading comment of a TOML file or of sample prompts by which an edit by hand is seen later."""

import hashlib
import re

_DIGEST = re.compile(r"^# wangen-digest: ([0-9a-f]{32})\n", re.MULTILINE)


def signed(text: str) -> str:
    r"""A TOML text with a line in its leading comment by which an edit by hand is seen later.

    >>> print(signed("# cats\na = 1\n"))
    # cats
    # wangen-digest: de8afd98252a6eca2ad473ead7ad84c5
    a = 1
    <BLANKLINE>
    """
    text = _DIGEST.sub("", text)
    head = re.match(r"(#.*\n)*", text)
    place = head.end() if head else 0
    return f"{text[:place]}# wangen-digest: {_digest(text)}\n{text[place:]}"


def unedited(data: bytes) -> bool:
    """Whether a TOML file on disk is what `signed` made; line ends that an editor changed are no edit."""
    text = _plain(data)
    found = _DIGEST.search(text)
    return found is not None and found[1] == _digest(_DIGEST.sub("", text, count=1))


def same_text(data: bytes, text: str) -> bool:
    """Whether a TOML file on disk says what `text` says, the line with the digest aside."""
    return _DIGEST.sub("", _plain(data), count=1) == _DIGEST.sub("", text, count=1)


def _plain(data: bytes) -> str:
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").replace("\r\n", "\n")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
