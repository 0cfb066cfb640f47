"""Captions as the text encoder gets them."""

import html
import re


def clean_prompt(text: str) -> str:
    """A prompt as the official code feeds it to the tokenizer: mended Unicode, no HTML entities, single spaces.

    >>> clean_prompt("  A  red   fox &amp;amp; a crow ")
    'A red fox & a crow'
    """
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()
