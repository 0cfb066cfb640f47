"""The cache for notebooks."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_entries import CONTENT, ENCODER, put, tensors

from wangen.generator.errors import UsageError, WangenError
from wangen.runtime.cache import (
    EDIT_NAMES,
    KINDS,
    RECIPE_VERSIONS,
    EmbeddingCache,
    EmbeddingCacheManager,
    Folder,
    Recipe,
    read_entry,
)

PICTURE = b"not really a picture"
SOURCE = hashlib.sha256(PICTURE).hexdigest()


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "cat.jpg"
    path.write_bytes(PICTURE)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> EmbeddingCache:
    return EmbeddingCache(str(tmp_path / "cache"))


def test_what_is_saved_is_found_and_loaded(cache: EmbeddingCache):
    assert cache.load_cache("latent", SOURCE) is None
    assert not cache.cache_exists("latent", SOURCE)
    path = cache.save_cache("latent", SOURCE, tensors(), name="cat.jpg")
    entry = read_entry(path, deep=True)
    assert entry
    assert (entry.kind, entry.source, entry.name) == ("latent", SOURCE, "cat.jpg")
    assert cache.cache_exists("latent", SOURCE)
    assert not cache.cache_exists("clip", SOURCE)
    loaded = cache.load_cache("latent", SOURCE)
    assert loaded
    assert torch.equal(loaded["latent"], tensors()["latent"])
    assert cache.save_cache("latent", SOURCE, tensors(3.0), name="cat.jpg") == path
    again = cache.load_cache("latent", SOURCE)
    assert again
    assert torch.equal(again["latent"], tensors(3.0)["latent"])
    assert EmbeddingCacheManager is EmbeddingCache


def test_what_is_saved_under_another_name_replaces_the_entry_of_its_encoder_alone(cache: EmbeddingCache):
    before = cache.save_cache("latent", SOURCE, tensors(), name="z.jpg")
    other = cache.save_cache("latent", SOURCE, tensors(), encoder=replace(ENCODER, dtype="bfloat16"), name="z.jpg")
    path = cache.save_cache("latent", SOURCE, tensors(3.0), name="a.jpg")
    assert set(cache.folder.glob("*.safetensors")) == {path, other}
    assert before != path
    assert value(cache) == 3.0


def test_the_newest_whole_entry_is_loaded(cache: EmbeddingCache):
    """Of two recipes of one source the younger, unless its payload is damaged."""
    folder = cache.folder
    old, new = (Recipe("latent", CONTENT | {"source": SOURCE, "width": width}, "cat.jpg") for width in (64, 128))
    (old_path,) = put(folder, old)
    (new_path,) = put(folder, new, encoder=replace(ENCODER, dtype="bfloat16"))
    cache.save_cache("latent", SOURCE, tensors(5.0))
    by_age = {old_path: 1e9, new_path: 1.1e9}
    for path in folder.glob("*.safetensors"):
        os.utime(path, (by_age.get(path, 1.2e9),) * 2)
    assert value(cache) == 5.0
    (third,) = set(folder.glob("*.safetensors")) - {old_path, new_path}
    third.write_bytes(third.read_bytes()[:-1] + b"\x01")
    os.utime(third, (1.2e9,) * 2)
    assert value(cache) == 1.0
    for path in (old_path, new_path):
        path.unlink()
    assert cache.load_cache("latent", SOURCE) is None


def value(cache: EmbeddingCache) -> float:
    loaded = cache.load_cache("latent", SOURCE)
    assert loaded
    return float(loaded["latent"].flatten()[0])


def test_digests_are_those_of_the_headers(cache: EmbeddingCache, picture: Path):
    assert cache.get_file_hash_for_image(picture) == SOURCE
    plain = cache.get_file_hash_for_prompt(None, " a  cat\n&amp; a dog ")
    assert plain == hashlib.sha256(b"a cat & a dog").hexdigest()
    assert plain == Recipe("text_encoder_output", {"caption": "a cat & a dog"}, "cat.jpg").source
    edit = cache.get_file_hash_for_prompt(picture, "a cat & a dog")
    assert edit == Recipe("text_encoder_output", {"caption": "a cat & a dog", "controls": [SOURCE]}, "").source != plain
    with pytest.raises(WangenError, match="cannot be read"):
        cache.get_file_hash_for_image(picture.with_name("dog.jpg"))


def test_which_kinds_there_are_of_a_picture(cache: EmbeddingCache, picture: Path):
    assert cache.check_cache_exists(picture) == ()
    cache.save_cache("clip", SOURCE, tensors())
    cache.save_cache("latent", SOURCE, tensors())
    put(cache.folder, Recipe("text_encoder_output", {"caption": "a cat"}, "cat.jpg"))
    assert cache.check_cache_exists(picture) == ("latent", "clip")
    picture.with_suffix(".txt").write_text("a cat\n")
    assert cache.check_cache_exists(str(picture)) == ("latent", "clip", "text_encoder_output")
    picture.write_bytes(b"another picture")
    assert cache.check_cache_exists(picture) == ("text_encoder_output",)


def test_counts_and_clearing(cache: EmbeddingCache):
    assert set(cache.get_cache_stats().values()) == {0}
    cache.save_cache("latent", SOURCE, tensors())
    cache.save_cache("latent", "ab" * 32, tensors())
    cache.save_cache("mask", SOURCE, {"mask": torch.zeros(1, 1, 2, 2)})
    lora = cache.folder / "my_wan.safetensors"
    lora.write_bytes(b"theirs")
    counts = dict.fromkeys((*KINDS, *EDIT_NAMES), 0) | {"latent": 2, "mask": 1, "pixel_latent": 2}
    assert cache.get_cache_stats() == counts
    assert cache.clear_cache("latent") == 2
    assert cache.get_cache_stats()["latent"] == 0
    assert cache.clear_cache() == 1
    assert cache.clear_cache() == 0
    assert [path.name for path in cache.folder.glob("*.safetensors")] == [lora.name]


def test_an_entry_of_an_earlier_recipe_version_is_not_valid(cache: EmbeddingCache, monkeypatch: pytest.MonkeyPatch):
    cache.save_cache("latent", "ab" * 32, {"latent": torch.ones(2)})
    monkeypatch.setitem(RECIPE_VERSIONS, "latent", RECIPE_VERSIONS["latent"] + 1)  # type: ignore[index]
    assert not cache.cache_exists("latent", "ab" * 32)
    assert cache.load_cache("latent", "ab" * 32) is None


def test_an_entry_without_tensors_replaces_nothing(cache: EmbeddingCache):
    cache.save_cache("latent", "ab" * 32, {"latent": torch.ones(2)})
    with pytest.raises(WangenError, match="has no tensors"):
        cache.save_cache("latent", "ab" * 32, {})
    for wrong in ({"latent": [1.0]}, torch.ones(2)):
        with pytest.raises(UsageError, match="names with tensors"):
            cache.save_cache("latent", "ab" * 32, wrong)  # type: ignore[arg-type]
    assert cache.load_cache("latent", "ab" * 32) is not None


def test_what_is_wrong_is_said(cache: EmbeddingCache):
    with pytest.raises(UsageError, match="there is no kind 'latents'"):
        cache.cache_exists("latents", SOURCE)  # type: ignore[arg-type]
    with pytest.raises(WangenError, match="all zero"):
        cache.save_cache("latent", SOURCE, {"latent": torch.zeros(3)})
    assert not cache.cache_exists("latent", SOURCE)


def test_what_another_process_adds_and_removes_is_seen(cache: EmbeddingCache):
    recipe = Recipe("latent", CONTENT | {"source": SOURCE}, "cat.jpg")
    assert not cache.cache_exists("latent", SOURCE)
    (path,) = put(cache.folder, recipe)
    assert cache.cache_exists("latent", SOURCE)
    path.unlink()
    assert not cache.cache_exists("latent", SOURCE)


def test_training_does_not_take_what_was_saved_by_hand(cache: EmbeddingCache):
    cache.save_cache("latent", SOURCE, tensors(), name="cat.jpg", encoder=ENCODER)
    recipe = Recipe("latent", CONTENT | {"source": SOURCE}, "cat.jpg")
    assert Folder(cache.folder).judge(recipe, ENCODER).state == "stale"
    assert Folder(cache.folder).judge(recipe, None).state == "stale"


def test_importing_it_imports_no_torch():
    code = "import sys; from wangen.runtime.cache import EmbeddingCache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
