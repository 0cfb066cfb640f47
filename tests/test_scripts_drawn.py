"""Hypothesis draws hostile paths, texts and values for all shells; some dozens are executed for real.

The draws are the same in every run (`derandomize`), so that a run in which nothing changed cannot fail anew.
"""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shells.bash import Site as BashSite
from shells.bash import needs_bash
from shells.bundles import bundle
from shells.drawn import (
    HOSTILE_TEXTS,
    MILD_TEXTS,
    VALUES,
    carried,
    drawn_steps,
    executed,
    refuses,
    refuses_root,
    root_in,
)
from shells.wine import FOLDER, Site, only_with_wine

from wangen.generator.errors import WangenError
from wangen.generator.scripts import Bundle, read_knobs, read_steps, render, untouched

SHELLS = ("sh", "bat", "ps1")
many = settings(max_examples=350, derandomize=True, database=None)
some = settings(many, max_examples=100)
texts_of_a_bundle = st.lists(st.one_of(MILD_TEXTS, MILD_TEXTS, HOSTILE_TEXTS), min_size=1, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
@many
@given(texts=texts_of_a_bundle, values=VALUES, root=st.none() | st.one_of(MILD_TEXTS, HOSTILE_TEXTS))
def test_drawn_bundles_read_back_or_are_refused(shell, texts, values, root):
    chosen = drawn_steps(texts, values)
    refused = any(refuses(shell, word) for step in chosen for word in step.argv())
    refused = refused or bool(root and refuses_root(shell, root))
    try:
        data = render(bundle(shell, chosen, root=root), shell, "train")
    except WangenError:
        assert refused
        return
    assert not refused
    assert read_steps(data, shell) == [step.argv() for step in chosen]
    assert untouched(data)
    if root:
        assert root_in(shell, data.decode("utf-8-sig").replace("\r\n", "\n")) == root


@pytest.mark.parametrize("shell", SHELLS)
@some
@given(
    slug=st.text(max_size=8) | st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True),
    knob=MILD_TEXTS | st.from_regex(r"[A-Za-z0-9._,+-]{1,12}", fullmatch=True),
)
@pytest.mark.slow
def test_drawn_slugs_and_knobs_read_back_or_are_refused(shell, slug, knob):
    made = bundle(shell)
    made = Bundle(**(vars(made) | {"slug": slug}))
    good = re.fullmatch("[a-z0-9_]+", slug) and re.fullmatch("[A-Za-z0-9._,+-]+", knob)
    try:
        data = render(made, shell, "train", {"SEED": knob})
    except WangenError:
        assert not good
        return
    assert good
    assert read_knobs(data)["SEED"] == knob
    (words,) = [words for words in read_steps(data, shell) if words[0] == "train"]
    assert words[words.index("--seed") + 1] == knob


@needs_bash
@executed
@given(texts=carried("sh", 30) | st.lists(HOSTILE_TEXTS, min_size=30, max_size=30), values=VALUES)
@pytest.mark.slow
def test_bash_hands_drawn_words_on_exactly(tmp_path_factory, texts, values):
    chosen = drawn_steps([text for text in texts if not refuses("sh", text)], values)[:10]
    site = BashSite(tmp_path_factory.mktemp("bash"), chosen)
    site.python("venv/bin/python")
    done = site.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert [call["argv"] for call in site.calls] == [step.argv() for step in chosen]


@pytest.mark.wine
@only_with_wine
@executed
@given(texts=carried("bat", 30), values=VALUES)
def test_cmd_hands_drawn_words_on_exactly(tmp_path_factory, texts, values):
    # The training step has all texts; each prompt is one more start of Python.
    chosen = drawn_steps(texts, values)[:8]
    site = Site(tmp_path_factory.mktemp("cmd") / FOLDER, chosen)
    site.python()
    done = site.run()
    assert done.returncode == 0, done.stdout
    assert [call["argv"] for call in site.calls] == [step.argv() for step in chosen]
