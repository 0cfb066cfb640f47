"""Whether what is held out now was trained on before: what parts of a training tell of their data decides it."""

import json
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_validation import cached, clips_of, digests

from wangen import profiles
from wangen.generator.errors import UsageError
from wangen.generator.headers import read_header
from wangen.runtime import train
from wangen.runtime.evaluation.trained import Seen, said_of, seen_sources
from wangen.runtime.loader import find_entries
from wangen.runtime.report.run_files import read_run
from wangen.runtime.report.verdict import judge
from wangen.runtime.samples import read_samples
from wangen.runtime.trained_on import HELD_OUT, fingerprints, may_have_seen
from wangen.runtime.training.held_out import MOST_TOLD, as_told, clip_key, doubted, held_out
from wangen.runtime.training.plan import dataset_aspects
from wangen.runtime.training.resuming import _other_data

MODEL = profiles.model("t2v-1.3B")
WORDS = "what is held out now may have been trained on before"


def part(samples, count=3, seed=42):
    """What a training on these samples tells, what it trained on and what it held out."""
    trained, judged = held_out(samples, count, seed, tell=False)
    told = {"seed": str(seed), HELD_OUT: as_told(judged, trained, SimpleNamespace(seed=seed, validation_items=count))}
    return told, trained, judged


def drawn(chance, numbers):
    """Some of many pictures."""
    return [cached(f"content {number}") for number in numbers if chance.random() < 0.7]


@pytest.mark.parametrize("trial", range(40))
def test_it_is_never_said_to_be_unseen_where_it_was_trained_on(trial):
    chance = random.Random(trial)
    kinds = (lambda: drawn(chance, range(30)), lambda: [*drawn(chance, range(20)), *clips_of(1, 4), *clips_of(2, 3)],
             lambda: [*drawn(chance, range(20)), cached("content 1", reg=True), cached("content 5", reg=True)],
             lambda: clips_of(1, 12))  # fmt: skip
    before, trained, _ = part(chance.choice(kinds)(), chance.randint(1, 4))
    now, _, judged = part(chance.choice(kinds)(), chance.randint(1, 4))
    if set(map(clip_key, trained)) & set(map(clip_key, judged)) or digests(trained) & digests(judged):
        assert may_have_seen(now, [before])


@pytest.mark.parametrize("trial", range(20))
def test_files_that_were_added_are_known_to_be_new(trial):
    chance = random.Random(trial)
    samples = drawn(chance, range(30))
    before, *_ = part(samples)
    now, *_ = part([*samples, *drawn(chance, range(100, 130))])
    assert not may_have_seen(now, [before])
    moved = now[HELD_OUT] != before[HELD_OUT]
    assert may_have_seen(before, [now]) == moved, "without them, what they had taken the place of is held out again"


def test_more_items_held_out_than_before_were_trained_on():
    samples = [cached(f"content {number}") for number in range(20)]
    assert may_have_seen(part(samples, 4)[0], [part(samples, 3)[0]])
    assert not may_have_seen(part(samples, 2)[0], [part(samples, 3)[0]])
    assert may_have_seen(part(samples, 2)[0], [part(samples, 3)[0], part(samples, 1)[0]]), "in one part of two"
    assert may_have_seen(part(samples, seed=43)[0], [part(samples)[0]]), "numbers of another seed say nothing"


def test_what_was_in_a_regularisation_set_was_trained_on_however_low_its_number():
    samples = [cached(f"content {number}") for number in range(20)]
    told, _, judged = part(samples)
    (lowest,) = part(judged, 1)[2]
    others = [sample for sample in samples if sample is not lowest]
    assert not may_have_seen(told, [part(others)[0]]), "it was added"
    before, trained, _ = part([*others, cached(lowest.sample.source.digest, reg=True)])
    assert digests([lowest]) <= digests(trained)
    assert may_have_seen(told, [before])


def test_of_a_dataset_that_changed_what_was_held_out_or_added_is_no_doubt():
    samples = [cached(f"content {number}") for number in range(20)]
    before, trained, judged = part(samples)
    assert doubted(judged, samples, before) == []
    assert doubted(samples, samples, before) == trained
    others = [cached(f"other {number}") for number in range(20)]
    assert doubted(others, others, before) == [], "another dataset"
    more = [*samples, *others]
    _, _, now = part(more)
    assert doubted(now, more, before) == []
    beyond = [one for one in doubted(more, more, before) if one in others]
    assert 0 < len(beyond) < len(others), "those of low numbers were not there"
    fewer = [one for one in samples if one is not judged[0]]
    (moved,) = doubted(part(fewer)[2], fewer, before)
    assert moved in trained
    reg = [*samples, cached("content 3", reg=True)]
    assert set(map(clip_key, doubted(others, [*reg, *others], before))) == set(map(clip_key, others))


def test_where_little_is_told_everything_may_have_been_seen():
    told, trained, judged = part([cached(f"content {number}") for number in range(20)])
    assert not may_have_seen(told, [told])
    assert not may_have_seen(told, [])
    for other in ({}, {"seed": "42"}, {**told, HELD_OUT: {}}, {**told, HELD_OUT: {"draws": 3, "lowest": True}},
                  {**told, HELD_OUT: [1]}, {**told, HELD_OUT: {"draws": ["a"], "lowest": True}}):  # fmt: skip
        assert may_have_seen(told, [other])
        assert may_have_seen(other, [told]) or other.get(HELD_OUT) == {"draws": ["a"], "lowest": True}
    own = SimpleNamespace(seed=42, validation_items=0)
    assert as_told(judged, trained, own) == {}, "of a dataset of its own, of which some may be trained on"
    many = [cached(str(number)) for number in range(MOST_TOLD + 1)]
    own.validation_items = len(many)
    assert as_told(many, trained, own) == {}
    assert len(as_told(many[1:], trained, own)["draws"]) == MOST_TOLD


def test_a_header_tells_of_all_parts_and_of_foreign_texts_nothing():
    held = {"draws": [1], "lowest": True}
    texts = {"wangen.trained_before": '[{"seed": "1"}, 3]', "wangen.fingerprint": '{"seed": "2"}',
             "wangen.held_out": json.dumps(held)}  # fmt: skip
    assert fingerprints(texts) == [{"seed": "1"}, {"seed": "2", HELD_OUT: held}]
    for foreign in ("", "{", "[" * 9999, "3", '"a"'):
        assert fingerprints(texts | {"wangen.held_out": foreign}) == [{"seed": "1"}, {"seed": "2"}]
        assert fingerprints(dict.fromkeys(texts, foreign)) == []


@pytest.mark.slow
def test_a_run_that_goes_on_with_the_same_files_does_not_doubt_its_held_out_loss(tiny_run, tmp_path, caplog):
    """Other repeats are another dataset; which files are held out stays."""
    twice = tmp_path / "twice.toml"
    text = tiny_run.dataset_config.read_text(encoding="utf-8")
    twice.write_text(text.replace("enable_bucket = true", "enable_bucket = true\nnum_repeats = 2"), encoding="utf-8")
    options = tiny_run.options(tmp_path / "run", max_train_steps=2, validation_items=1, validate_every_n_steps=1)
    train.run(options)
    more = replace(options, dataset_config=twice, max_train_steps=4, resume_changed=True)
    train.run(more)
    lora = tmp_path / "run" / "lora.safetensors"
    first, last = fingerprints(read_header(lora).metadata)
    assert first[HELD_OUT] == last[HELD_OUT]
    assert first["dataset"] != last["dataset"]
    train.run(replace(more, output_dir=tmp_path / "from", network_weights=lora, resume_changed=False))
    assert "trained on before" not in caplog.text
    for folder in ("run", "from"):
        assert not any("may have been trained on" in line for line in judge(read_run(tmp_path / folder, None)).against)
    items = find_entries(more, MODEL, read_samples(more, MODEL))
    old = tmp_path / "run" / "lora-kept-step00000002.safetensors"
    seen = seen_sources([old], items, items, more, MODEL)
    assert seen.surely == set(), "of other repeats"
    assert len(seen.perhaps) == 2
    (line,) = said_of(items, seen)
    assert line.startswith("2 files that are judged by may have been trained on, for the dataset has changed since")
    assert seen_sources([old], held_out(items, 1, more.seed)[1], items, more, MODEL) == Seen(set(), set())
    train.run(replace(more, max_train_steps=6, validation_items=2))
    assert WORDS in caplog.text
    assert any("may have been trained on" in line for line in judge(read_run(tmp_path / "run", None)).against)


def test_a_refusal_says_what_of_the_dataset_is_other(tiny_run, tmp_path):
    media, config = tmp_path / "media", tmp_path / "tiny.toml"
    shutil.copytree(tiny_run.folder / "media", media)
    text = tiny_run.dataset_config.read_text(encoding="utf-8")
    text = text.replace((tiny_run.folder / "media").as_posix(), media.as_posix())
    config.write_text(text, encoding="utf-8")
    options = tiny_run.options(tmp_path / "run", max_train_steps=1, dataset_config=config)
    train.run(options)

    def refused(**changes):
        with pytest.raises(UsageError) as error:
            train.run(replace(options, max_train_steps=2, **changes))
        return [line.removeprefix("  - ") for line in error.value.found.splitlines()[1:]]

    config.write_text(text.replace("enable_bucket = true", "enable_bucket = true\nnum_repeats = 2\nbatch_size = 2"))
    assert refused() == ["dataset: other num_repeats, batch_size"]
    config.write_text(text)
    assert refused(caption_dropout=0.1) == ["caption_dropout: 0.0 -> 0.1", "dataset: other empty prompt"]
    (media / "red.txt").write_text((media / "blue.txt").read_text(encoding="utf-8"), encoding="utf-8")
    assert refused() == ["dataset: other captions"]
    (media / "blue.png").unlink()
    assert refused() == ["dataset: other samples (3 -> 2)"]


def test_the_same_files_with_other_latents_are_said_to_be_the_same(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=1)
    own = train.make_plan(options, MODEL, *train.read_training_samples(options, MODEL))
    before = dataset_aspects(own.samples)
    assert _other_data(before, before | {"samples": "other"}).startswith("the same files, encoded otherwise")
    assert _other_data(before, before | {"samples": "other", "files": "other"}) == "other samples (3 -> 3)"
    assert _other_data({}, before) == "other samples, captions, num_repeats, batch_size or is_reg"


def test_the_log_and_the_report_name_what_is_held_out(tiny_run, tmp_path, caplog):
    with caplog.at_level("INFO"):
        report = train.run(tiny_run.options(tmp_path, max_train_steps=1, validation_items=2, validate_every_n_steps=9))
    names = report.inputs["held_out"]
    assert len(names) == 2
    assert f"held out: {', '.join(names)}" in caplog.text
