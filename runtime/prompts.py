"""Captions as the text encoder gets them."""

import html
import re

_PLAIN = re.compile(r"[\t\n\r -%'-~]*")
"""Printable ASCII without `&`: there is nothing to mend, and mending it takes most of the time of judging a text."""


def clean_prompt(text: str) -> str:
    """A prompt as the official code feeds it to the tokenizer: mended Unicode, no HTML entities, single spaces.

    >>> clean_prompt("  A  red   fox &amp;amp; a crow ")
    'A red fox & a crow'
    """
    if not _PLAIN.fullmatch(text):
        import ftfy

        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()
