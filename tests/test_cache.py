"""The cache itself: keys, bytes, and the judge."""

import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_entries import CONTENT, ENCODER, LATENT, TEXT, put, states, tensors

from wangen.generator.formats.safetensors import read_safetensors
from wangen.runtime.cache import (
    FORMAT,
    KINDS,
    NO_ENCODER,
    TEXT_KINDS,
    CorruptEntryError,
    Encoder,
    Folder,
    Kind,
    Recipe,
    digest,
    in_tiles,
    load,
    payload_digest,
    read_entry,
    recipes,
)
from wangen.runtime.cache.writer import Writer

# Keys


def test_the_key_depends_on_content_and_encoder_alone():
    key = LATENT.key(ENCODER)
    assert len(key) == 20
    assert replace(LATENT, name="another.png").key(ENCODER) == key
    assert replace(LATENT, content=dict(reversed(CONTENT.items()))).key(ENCODER) == key
    assert digest({"b": [1, 2], "a": "ü"}) == digest({"a": "ü", "b": [1, 2]})


def test_the_key_changes_with_every_part(monkeypatch: pytest.MonkeyPatch):
    keys = {LATENT.key(ENCODER)}
    for name in CONTENT:
        keys.add(replace(LATENT, content={**CONTENT, name: "other"}).key(ENCODER))
    keys.add(replace(LATENT, content={**CONTENT, "more": 1}).key(ENCODER))
    keys.add(LATENT.key(replace(ENCODER, identity="00")))
    keys.add(LATENT.key(replace(ENCODER, dtype="bfloat16")))
    keys.add(replace(LATENT, kind="text_encoder_output").key(ENCODER))
    monkeypatch.setattr(recipes, "RECIPE_VERSIONS", dict.fromkeys(KINDS, 2))
    keys.add(Recipe("latent", CONTENT, "a").key(ENCODER))
    assert len(keys) == len(CONTENT) + 6


def test_file_names_hold_at_most_40_harmless_characters():
    name = Recipe("latent", CONTENT, "x" * 90 + ".jpg").file_name(ENCODER)
    assert name.startswith("x" * 40 + "-")
    assert LATENT.file_name(ENCODER).isascii()
    assert not set(LATENT.file_name(ENCODER)) & set('[]{}<>:"/\\|?* ')
    assert TEXT.file_name(ENCODER).startswith("text-")


# Bytes

GOLDEN = {
    "latent": "5ccc7b324436e62c2cd83135483f7f9f59bab12effc9b09c1b1b676f620db54e",
    "text": "a135b793e52e90645eeac946b962880b6d60441683c7f01620ed8bf37152e5ab",
}
"""Change these only together with `RECIPE_VERSIONS` or `FORMAT`: caches on disk would silently differ. (Since the
first version the header also names the source, which follows from the recipe; the payloads are as they were.)"""


def golden_files(folder: Path) -> dict[str, str]:
    with Writer(folder) as writer:
        writer.put(LATENT, ENCODER, tensors())
        embedding = torch.arange(1, 7, dtype=torch.bfloat16).reshape(3, 2)
        writer.put(TEXT, ENCODER, {"mask": torch.ones(3, dtype=torch.bool), "embedding": embedding})
    files = {"latent": folder / LATENT.file_name(ENCODER), "text": folder / TEXT.file_name(ENCODER)}
    return {kind: hashlib.sha256(path.read_bytes()).hexdigest() for kind, path in files.items()}


def test_golden_bytes(tmp_path: Path):
    assert golden_files(tmp_path) == GOLDEN


@pytest.mark.slow
def test_another_process_writes_the_golden_bytes(tmp_path: Path):
    code = (
        "import sys, json, pathlib, test_cache; print(json.dumps(test_cache.golden_files(pathlib.Path(sys.argv[1]))))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": "7"}
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, check=True)
    assert json.loads(out.stdout) == GOLDEN


def test_what_was_put_is_loaded(tmp_path: Path):
    (path,) = put(tmp_path, LATENT)
    entry = read_entry(path, deep=True)
    assert entry is not None
    assert torch.equal(load(entry)["latent"], tensors()["latent"])
    assert (entry.kind, entry.name, entry.encoder, entry.content) == ("latent", LATENT.name, ENCODER, CONTENT)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


# The judge


def test_missing_and_valid(tmp_path: Path):
    assert states(tmp_path / "none", LATENT) == "missing"
    put(tmp_path, LATENT)
    assert states(tmp_path, LATENT, deep=True) == "valid"
    assert Folder(tmp_path).judge(LATENT, None).state == "valid"
    assert states(tmp_path, TEXT) == "missing"


CLIP_CONTENT = CONTENT | {"start": 0, "frames": 17, "fps": 16, "source_fps": None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": "ef" * 32}, "the file's content changed"),
        ({"width": 128}, "the size changed from 64x48 to 128x48"),
        ({"width": 48, "height": 64}, "the size changed from 64x48 to 48x64"),
        ({"frames": 33}, "the number of frames changed from 17 to 33"),
        ({"resize": "box"}, "the resizing recipe changed"),
        ({"start": 4}, "the clip's first frame changed from 0 to 4"),
        ({"fps": 24}, "the model's frame rate changed from 16 to 24 fps"),
        ({"source_fps": 30.0}, "source_fps changed from the file's own to 30.0"),
        ({"background": "#808080"}, "the background behind transparent pixels changed from white to #808080"),
        ({"condition": "first frame, then grey"}, "the way the condition is made changed"),
        ({"crop": "left"}, "crop changed from unset to left"),
        ({"source": "ef" * 32, "frames": 5}, "the file's content changed; the number of frames changed from 17 to 5"),
    ],
)
def test_stale_says_what_changed(tmp_path: Path, change: dict[str, Any], words: str):
    recipe = Recipe("latent", CLIP_CONTENT, "walk.mp4:0+17")
    put(tmp_path, recipe)
    verdict = Folder(tmp_path).judge(replace(recipe, content=CLIP_CONTENT | change), ENCODER)
    assert (verdict.state, verdict.reason) == ("stale", words)


def test_the_nearest_of_several_older_entries_is_compared_with(tmp_path: Path):
    """Another VAE's entry differs least, but one of the same VAE says what the user did."""
    other = replace(ENCODER, identity="ff")
    far = replace(LATENT, content=CONTENT | {"width": 16, "resize": "box", "frames": 5})
    put(tmp_path, far, replace(LATENT, content=CONTENT | {"width": 32, "source": "ef" * 32}))
    put(tmp_path, replace(LATENT, content=CONTENT | {"width": 80}), encoder=other)
    verdict = Folder(tmp_path).judge(LATENT, ENCODER)
    assert verdict.reason == "the size changed from 32x48 to 64x48; the file's content changed"
    put(tmp_path, LATENT, encoder=other)
    put(tmp_path, LATENT, encoder=replace(ENCODER, dtype="bfloat16"))
    assert Folder(tmp_path).judge(LATENT, ENCODER).reason == "encoded in bfloat16, wanted in float32"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_entry_and_its_words(tmp_path: Path, kind: Kind):
    recipe = Recipe(kind, {"caption": ""} if kind in TEXT_KINDS else CONTENT, "cat.jpg")
    maker = NO_ENCODER if kind == "mask" else ENCODER
    (path,) = put(tmp_path, recipe, encoder=maker)
    assert path.name.startswith("text-" if kind in TEXT_KINDS else "cat_jpg-")
    assert path.name.endswith(f".{kind}.safetensors")
    verdict = Folder(tmp_path).judge(recipe, maker)
    assert verdict.state == "valid"
    assert verdict.entry
    assert (verdict.entry.kind, verdict.entry.encoder, verdict.entry.source) == (kind, maker, recipe.source)
    words = {"clip": "another CLIP", **dict.fromkeys(TEXT_KINDS, "another text encoder or tokenizer")}
    reason = Folder(tmp_path).judge(recipe, Encoder("00", maker.dtype)).reason
    assert reason == f"encoded with {words.get(kind, 'another VAE')}"
    assert [states(tmp_path, replace(recipe, kind=other), maker) for other in KINDS if other != kind] == ["missing"] * 6


def test_other_tiles_of_a_vae_are_not_another_vae(tmp_path: Path):
    put(tmp_path, LATENT)
    tiled = replace(ENCODER, identity=in_tiles(ENCODER.identity, 256))
    reason = Folder(tmp_path).judge(LATENT, tiled).reason
    assert reason == "encoded with another VAE tile (none, wanted --vae_tile 256)"
    put(tmp_path / "tiled", LATENT, encoder=tiled)
    reason = Folder(tmp_path / "tiled").judge(LATENT, ENCODER).reason
    assert reason == "encoded with another VAE tile (--vae_tile 256, wanted without)"


def test_tiles_are_tried_once_for_many_entries_of_another_vae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried: list[int] = []

    def noted(identity: str, tile: int) -> str:
        tried.append(tile)
        return identity * 2

    monkeypatch.setattr("wangen.runtime.cache.words.in_tiles", noted)
    recipes = [Recipe("latent", {**CONTENT, "source": name}, f"{name}.png") for name in "ab"]
    put(tmp_path, *recipes)
    other = replace(ENCODER, identity="a VAE that no other test has")
    reasons = {Folder(tmp_path).judge(recipe, other).reason for recipe in recipes}
    assert reasons == {"encoded with another VAE"}
    assert len(tried) == 2 * len(set(tried))


def test_the_header_names_the_source(tmp_path: Path):
    latent, text = put(tmp_path, LATENT, TEXT)
    for path, source in ((latent, CONTENT["source"]), (text, hashlib.sha256(b"a cat").hexdigest())):
        entry = read_entry(path)
        assert entry
        assert entry.source == source == read_safetensors(path).metadata["source"]


def test_stale_by_caption_encoder_precision_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path, LATENT, TEXT)
    folder = Folder(tmp_path)
    reasons = [
        folder.judge(replace(TEXT, content={"caption": "a dog"}), ENCODER).reason,
        folder.judge(LATENT, replace(ENCODER, identity="ff")).reason,
        folder.judge(TEXT, replace(ENCODER, identity="ff")).reason,
        folder.judge(TEXT, replace(ENCODER, dtype="bfloat16")).reason,
    ]
    assert reasons == [
        "the caption changed",
        "encoded with another VAE",
        "encoded with another text encoder or tokenizer",
        "encoded in float32, wanted in bfloat16",
    ]
    monkeypatch.setattr(recipes, "RECIPE_VERSIONS", dict.fromkeys(KINDS, 2))
    verdict = Folder(tmp_path).judge(Recipe("latent", CONTENT, LATENT.name), ENCODER)
    assert (verdict.state, verdict.reason) == ("stale", "made by an older version of the encoding code")


def test_a_renamed_item_and_a_moved_folder_stay_valid(tmp_path: Path):
    put(tmp_path / "here", LATENT)
    (tmp_path / "here").rename(tmp_path / "there")
    assert states(tmp_path / "there", replace(LATENT, name="renamed.png"), deep=True) == "valid"


def test_another_window_of_a_clip_is_missing_not_stale(tmp_path: Path):
    clip = CONTENT | {"start": 0, "frames": 17}
    put(tmp_path, Recipe("latent", clip, "walk.mp4:0+17"))
    assert states(tmp_path, Recipe("latent", clip | {"start": 17}, "walk.mp4:17+17")) == "missing"


def test_damage_is_corrupt(tmp_path: Path):
    (path,) = put(tmp_path, LATENT)
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"x", whole[:50], whole[:4], b"", b"\0" * 500):
        path.write_bytes(content)
        assert states(tmp_path, LATENT) == "corrupt", len(content)
        with pytest.raises(CorruptEntryError):
            read_entry(path)
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    assert states(tmp_path, LATENT) == "valid"  # headers alone cannot see it
    verdict = Folder(tmp_path, deep=True).judge(LATENT, ENCODER)
    assert (verdict.state, verdict.reason) == ("corrupt", "the payload is not what was written")


def test_a_payload_that_rotted_since_it_was_judged_is_never_loaded(tmp_path: Path):
    (path,) = put(tmp_path, LATENT)
    entry = Folder(tmp_path).find(LATENT.key(ENCODER))
    assert entry is not None
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptEntryError, match="the payload is not what was written") as caught:
        load(entry)
    assert "check_cache --deep --repair" in str(caught.value)


def test_an_entry_under_the_name_of_another_is_corrupt(tmp_path: Path):
    (path,) = put(tmp_path, LATENT)
    other = replace(LATENT, content=CONTENT | {"width": 128})
    path.rename(tmp_path / other.file_name(ENCODER))
    verdict = Folder(tmp_path).judge(other, ENCODER)
    assert (verdict.state, verdict.reason) == ("corrupt", "the header does not belong to the file name")


def test_a_damaged_header_is_corrupt(tmp_path: Path):
    from wangen.runtime import safetensors_file

    (path,) = put(tmp_path, LATENT)
    good = {"format": FORMAT, "recipe_version": "1", "name": "a", "content": json.dumps(CONTENT),
            "encoder": ENCODER.identity, "encoder_dtype": ENCODER.dtype, "payload": payload_digest(path)}  # fmt: skip
    for name, value in (("content", "{"), ("content", "3"), ("recipe_version", "x"), ("encoder", "other")):
        safetensors_file.write(path, tensors(), good | {name: value})
        assert states(tmp_path, LATENT) == "corrupt", (name, value)
    for name in ("encoder", "payload", "name", "content"):
        safetensors_file.write(path, tensors(), {key: text for key, text in good.items() if key != name})
        assert states(tmp_path, LATENT) == "corrupt", name


def test_an_entry_that_vanishes_or_breaks_before_loading_is_one_message(tmp_path: Path):
    (path,) = put(tmp_path, LATENT)
    entry = read_entry(path)
    assert entry
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptEntryError, match="cannot be read"):
        load(entry)
    path.unlink()
    with pytest.raises(CorruptEntryError, match="cannot be read"):
        load(entry)


def test_a_payload_is_hashed_in_pieces(tmp_path: Path):
    """A damaged header may claim any size, and a sparse file have it."""
    path, size = tmp_path / "large", 1 << 26
    with path.open("wb") as file:
        file.truncate(8 + size)
    tracemalloc.start()
    try:
        found = payload_digest(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == hashlib.sha256(bytes(size)).hexdigest()
    assert payload_digest(path, (0, 1008)) == hashlib.sha256(bytes(1000)).hexdigest()
    assert peak < size // 8
