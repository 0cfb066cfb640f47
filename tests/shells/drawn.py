"""Texts, roots and values that hypothesis draws for the scripts, and what each shell cannot carry of them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from shells.bundles import prompts, steps

from wangen.generator.table import Step

executed = settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""For tests whose every example starts shells: few examples with many texts each, and no hunt for a smaller one."""

# What shells give a meaning to, far more often than chance would draw it.
_MEANING = " \t'\"\\`$%!^&|<>()[]{};,=~*?#@:-+/\u2018\u2019\u201a\u201b\u201c\u201d\u00a0\u3000\u180e\u2028é日🦊"
_HARD = "\0\n\r\x01\x1a\x1b\x7f\x85\ud800\udfff"


def _texts(characters: st.SearchStrategy[str], max_size: int) -> st.SearchStrategy[str]:
    words = st.sampled_from(
        ["--%", "~", "~/x", "~\\x", "%PATH%", "%%A", "$(id)", "$HOME", "!x!", "C:\\a b\\", "-x", "rem"]
    )
    return st.lists(st.one_of(words, characters), max_size=max_size).map("".join)


HOSTILE_TEXTS = _texts(
    st.one_of(st.sampled_from(_MEANING), st.sampled_from(_MEANING + _HARD), st.characters()), max_size=20
)
"""Any text, also such as no shell can carry."""

MILD_TEXTS = _texts(st.one_of(st.sampled_from(_MEANING), st.characters(exclude_categories=("Cs", "Cc"))), max_size=20)
"""Texts with few characters that a shell cannot carry."""

VALUES = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**63), 2**63),
        "learning_rate": st.floats(allow_nan=False, allow_infinity=False),
        "network_alpha": st.floats(0, 1e6),
        "network_dim": st.integers(1, 4096),
        "attention": st.sampled_from(["auto", "sdpa", "flash3"]),
        "max_train_epochs": st.none() | st.integers(1, 10**9),
    }
)
"""Values of knobs of the training step."""


def refuses(shell: str, word: str) -> bool:
    """Whether the shell cannot hand this argument on: told from its rules, not from how the scripts quote."""
    if shell == "sh":
        return re.search(r"[\0\ud800-\udfff]", word) is not None
    if re.search(r"[\0-\x08\n-\x1f\x7f\"\ud800-\udfff]", word):
        return True
    if shell == "bat":
        return False
    blank = re.search(r"[\s\u180e]", word) is not None
    home = not blank and re.match(r"~(?![^/\\])", word) is not None
    return word in ("", "--%") or home or (blank and word.endswith("\\"))


def refuses_root(shell: str, root: str) -> bool:
    """Whether the shell cannot hold this path in its own commands."""
    control = re.search(r"[\0-\x08\n-\x1f\x7f\ud800-\udfff\t]", root) is not None
    return control or (shell == "bat" and '"' in root)


def carried(shell: str, count: int) -> st.SearchStrategy[list[str]]:
    """Lists of texts that the shell can carry in every place of a bundle."""
    fit = MILD_TEXTS.filter(lambda text: text != "" and not refuses(shell, text))
    return st.lists(fit, min_size=count, max_size=count)


def drawn_steps(texts: Sequence[str], values: Mapping[str, Any]) -> tuple[Step, ...]:
    """Steps with the texts as paths, as free texts and as repeated values, and a prompt for each."""
    *caching, train = steps(texts[0])
    changed = {name: value for name, value in values.items() if value is not None}
    return (*caching, type(train)(**(vars(train) | changed | {"optimizer_args": tuple(texts)})), *prompts(*texts))


def root_in(shell: str, text: str) -> str:
    """The root that a script goes to, read without the help of the code that wrote it."""
    if shell == "sh":
        pieces = re.search(r"^WG_ROOT=(.*)$", text, re.MULTILINE)
        assert pieces
        return pieces[1] if not pieces[1].startswith("'") else pieces[1][1:-1].replace("'\\''", "'")
    if shell == "bat":
        place = re.search(r'^pushd "(.*)"$', text, re.MULTILINE)
        assert place
        return place[1].replace("%%", "%")
    literal = re.search(r"^\$WgRoot = '(.*)'$", text, re.MULTILINE)
    assert literal
    return re.sub("(['‘’‚‛])['‘’‚‛]", r"\1", literal[1])
