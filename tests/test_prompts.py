"""Captions as the text encoder gets them."""

import html
import re

import ftfy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wangen.runtime.prompts import clean_prompt


def official(text: str) -> str:
    """As the model's own code does it."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(text)))).strip()


@pytest.mark.slow
@given(st.one_of(st.text(), st.text(st.characters(max_codepoint=127))))
def test_the_short_way_for_plain_text_changes_nothing(text: str):
    assert clean_prompt(text) == official(text)


@pytest.mark.parametrize("letter", [chr(number) for number in range(128)])
def test_every_ascii_letter_is_treated_alike(letter: str):
    assert clean_prompt(f"a {letter}[31m cat{letter}") == official(f"a {letter}[31m cat{letter}")
