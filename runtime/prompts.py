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


def text_of(caption: str, *, template: bool) -> str:
    """What of a caption the text encoder gets, by which its embedding is known in the cache.

    Args:
        caption: or any prompt, as it was written; captions are read without spaces around them.
        template: the model is a language model that is asked through a template: it reads a caption as it is.

    >>> text_of("A  red fox &amp; a crow", template=False), text_of("A  red fox &amp; a crow", template=True)
    ('A red fox & a crow', 'A  red fox &amp; a crow')
    """
    return caption if template else clean_prompt(caption)
