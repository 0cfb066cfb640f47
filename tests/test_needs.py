"""Who needs which entry: claims on a cache folder, and the encoder whose entries count."""

import errno
import logging
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, cast

import pytest
from cache_entries import CONTENT, ENCODER, LATENT, TEXT, put, states, tensors

from wangen.runtime.cache import Folder, Verdict
from wangen.runtime.cache.needed import DatasetNeeds, NeedsError, orphans
from wangen.runtime.needs import Need, Waiting
from wangen.runtime.samples import Sample


def needs_of(folder: Path, name: str = "a.toml") -> DatasetNeeds:
    return DatasetNeeds(Folder(folder), folder / name, "latent")


def test_only_what_this_dataset_needed_before_is_removed(tmp_path: Path):
    from wangen.runtime import safetensors_file

    old, kept, text = replace(LATENT, content=CONTENT | {"width": 1}), LATENT, TEXT
    old_path, kept_path, text_path = put(tmp_path, old, kept, text)
    lora = tmp_path / "my_character.safetensors"
    safetensors_file.write(lora, tensors(), {"format": "pt"})
    named = tmp_path / f"mine-{'0' * 20}.latent.safetensors"
    safetensors_file.write(named, tensors(), {})
    (tmp_path / ".other.tmp").write_bytes(b"")
    before = {path: path.read_bytes() for path in (lora, named)}

    needs_of(tmp_path).extend({old.key(ENCODER), kept.key(ENCODER)}, ENCODER)
    assert needs_of(tmp_path).reduce({kept.key(ENCODER)}, ENCODER) == 1
    assert not old_path.exists()
    assert kept_path.exists()
    assert text_path.exists()
    assert {path: path.read_bytes() for path in (lora, named)} == before
    assert len(Folder(tmp_path).all_entries) == 2


def test_a_dataset_that_shares_the_folder_keeps_its_entries(tmp_path: Path):
    mine, shared, theirs = (replace(LATENT, content=CONTENT | {"width": width}) for width in (1, 2, 3))
    paths = put(tmp_path, mine, shared, theirs)
    keys = [recipe.key(ENCODER) for recipe in (mine, shared, theirs)]
    needs_of(tmp_path, "a.toml").extend({keys[0], keys[1]}, ENCODER)
    needs_of(tmp_path, "b.toml").extend({keys[1], keys[2]}, ENCODER)
    assert needs_of(tmp_path, "a.toml").reduce(set(), ENCODER) == 1
    assert [path.exists() for path in paths] == [False, True, True]
    assert needs_of(tmp_path, "b.toml").reduce(set(), ENCODER) == 2


def test_what_nobody_claims_stays(tmp_path: Path):
    (path,) = put(tmp_path, LATENT)
    assert needs_of(tmp_path).reduce(set(), ENCODER) == 0
    for broken in (b"", b"{}", b"[1, 2", b"\xff", b'{"encoder": 1, "keys": []}'):
        needs_of(tmp_path).extend({LATENT.key(ENCODER)}, ENCODER)
        for file in tmp_path.glob(".wangen-needs-*"):
            file.write_bytes(broken)
        assert needs_of(tmp_path).reduce(set(), ENCODER) == 0
    assert path.exists()


def test_waiting_for_another_process_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    need = Need(cast(Sample, None), LATENT, Folder(tmp_path), Verdict("missing"))
    waiting = Waiting()
    with caplog.at_level(logging.INFO, "wangen"):
        waiting.say([need, need])
        waiting.say([need])
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"  waiting for another process that works on 2 entries, {LATENT.name} first; ")


def test_a_second_file_of_one_key_is_removed(tmp_path: Path):
    put(tmp_path, LATENT, replace(LATENT, name="renamed.png"))
    assert len(Folder(tmp_path).all_entries) == 2
    assert needs_of(tmp_path).reduce({LATENT.key(ENCODER)}, ENCODER) == 1
    assert states(tmp_path, LATENT) == "valid"


def test_a_claim_knows_the_encoder_of_the_last_run(tmp_path: Path):
    other = replace(ENCODER, dtype="bfloat16")
    put(tmp_path, LATENT)
    put(tmp_path, LATENT, encoder=other)
    assert needs_of(tmp_path).encoder is None
    for encoder in (ENCODER, other, ENCODER):  # as with --keep_cache: nothing is forgotten, nothing removed
        needs_of(tmp_path).extend({LATENT.key(encoder)}, encoder)
        assert needs_of(tmp_path).encoder == encoder
    assert len(Folder(tmp_path).all_entries) == 2
    assert needs_of(tmp_path).reduce({LATENT.key(other)}, other) == 1
    assert needs_of(tmp_path).encoder == other
    assert states(tmp_path, LATENT, other) == "valid"


def test_nothing_is_removed_while_it_is_open_what_another_dataset_needs(tmp_path: Path):
    old, new = (replace(LATENT, content=CONTENT | {"width": width}) for width in (1, 2))
    paths = put(tmp_path, old, new)
    needs_of(tmp_path).extend({old.key(ENCODER)}, ENCODER)
    other = needs_of(tmp_path, "b.toml")
    other.extend({old.key(ENCODER)}, ENCODER)
    for broken in (b"", b"{}", b"[1, 2", b"\xff"):
        other.path.write_bytes(broken)
        with pytest.raises(NeedsError, match="is damaged") as raised:
            needs_of(tmp_path).reduce({new.key(ENCODER)}, ENCODER)
        assert (raised.value.where, other.path.read_bytes()) == (str(other.path), broken)
    assert "run the caching step of that dataset again" in raised.value.cure
    other.path.unlink()
    other.path.mkdir()
    with pytest.raises(NeedsError, match="cannot be read: "):
        needs_of(tmp_path).reduce({new.key(ENCODER)}, ENCODER)
    assert all(path.exists() for path in paths)
    other.path.rmdir()
    assert needs_of(tmp_path).reduce({new.key(ENCODER)}, ENCODER) == 1, "what was to be removed is not forgotten"


def test_a_claim_that_cannot_be_read_now_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mine = needs_of(tmp_path)
    mine.extend({"a" * 20}, ENCODER)
    before = mine.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", _no_answer)
        for action in (mine.take_back, lambda: mine.extend({"b" * 20}, ENCODER), lambda: mine.reduce(set(), ENCODER)):
            with pytest.raises(NeedsError, match="cannot be read: Input/output error"):
                action()
    assert mine.path.read_bytes() == before


def test_a_toml_that_cannot_be_looked_at_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    needs_of(tmp_path).extend({"a" * 20}, ENCODER)
    assert list(orphans(tmp_path).values()) == ["a.toml"]
    monkeypatch.setattr(Path, "stat", _no_answer)
    assert not orphans(tmp_path)


def _no_answer(path: Path, **_: object) -> NoReturn:
    raise OSError(errno.EIO, "Input/output error", str(path))
