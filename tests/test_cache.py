"""The cache itself: keys, files, the judge, the writer, claims."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wangen.generator.errors import WangenError
from wangen.runtime import cache, cache_writer
from wangen.runtime.cache import CorruptEntryError, Encoder, Folder, Recipe, digest, load, read_entry
from wangen.runtime.cache_writer import Writer, judge_values
from wangen.runtime.needs import Claim

ENCODER = Encoder("ab" * 32, "float32")
CONTENT = {"source": "cd" * 32, "width": 64, "height": 48, "resize": "lanczos, cover, centre", "frames": 1}
LATENT = Recipe("latent", CONTENT, "Ärger mit [cat].jpg")
TEXT = Recipe("text_encoder_output", {"caption": "a cat"}, "cat.jpg")


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"latent": torch.arange(1, 25, dtype=torch.float32).reshape(2, 1, 3, 4) * value}


def put(folder: Path, *recipes: Recipe, encoder: Encoder = ENCODER) -> list[Path]:
    with Writer(folder) as writer:
        for recipe in recipes:
            writer.put(recipe, encoder, tensors())
    return [folder / recipe.file_name(encoder) for recipe in recipes]


def states(folder: Path, recipe: Recipe, encoder: Encoder = ENCODER, *, deep: bool = False) -> str:
    return Folder(folder, deep=deep).judge(recipe, encoder).state


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
    monkeypatch.setattr(cache, "RECIPE_VERSIONS", {"latent": 2, "text_encoder_output": 1})
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
    "latent": "2df6775cb60805cd791ab92fbea3dcb4f34554b405f31e7f4c13ebc883d2fb65",
    "text": "5da37975707d3caaec67ffd130e5bb4d694ae27dcbbe302afae12a9b8c535ce2",
}
"""Change these only together with `RECIPE_VERSIONS` or `FORMAT`: caches on disk would silently differ."""


def golden_files(folder: Path) -> dict[str, str]:
    with Writer(folder) as writer:
        writer.put(LATENT, ENCODER, tensors())
        embedding = torch.arange(1, 7, dtype=torch.bfloat16).reshape(3, 2)
        writer.put(TEXT, ENCODER, {"mask": torch.ones(3, dtype=torch.bool), "embedding": embedding})
    files = {"latent": folder / LATENT.file_name(ENCODER), "text": folder / TEXT.file_name(ENCODER)}
    return {kind: hashlib.sha256(path.read_bytes()).hexdigest() for kind, path in files.items()}


def test_golden_bytes(tmp_path: Path):
    assert golden_files(tmp_path) == GOLDEN


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": "ef" * 32}, "the file's content changed"),
        ({"width": 128}, "width changed from 64 to 128"),
        ({"frames": 17}, "frames changed from 1 to 17"),
        ({"resize": "box"}, "the resizing recipe changed"),
        ({"start": 4}, "the clip's first frame changed"),
        ({"source_fps": 30.0}, "source_fps changed from None to 30.0"),
    ],
)
def test_stale_says_what_changed(tmp_path: Path, change: dict[str, Any], words: str):
    put(tmp_path, LATENT)
    verdict = Folder(tmp_path).judge(replace(LATENT, content=CONTENT | change), ENCODER)
    assert (verdict.state, verdict.reason) == ("stale", words)


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
    monkeypatch.setattr(cache, "RECIPE_VERSIONS", {"latent": 2, "text_encoder_output": 1})
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


def test_an_entry_under_the_name_of_another_is_corrupt(tmp_path: Path):
    (path,) = put(tmp_path, LATENT)
    other = replace(LATENT, content=CONTENT | {"width": 128})
    path.rename(tmp_path / other.file_name(ENCODER))
    verdict = Folder(tmp_path).judge(other, ENCODER)
    assert (verdict.state, verdict.reason) == ("corrupt", "the header does not belong to the file name")


def test_a_damaged_header_is_corrupt(tmp_path: Path):
    from wangen.runtime import safetensors_file

    (path,) = put(tmp_path, LATENT)
    entry = read_entry(path)
    assert entry
    good = {"format": cache.FORMAT, "recipe_version": "1", "name": "a", "content": json.dumps(CONTENT),
            "encoder": ENCODER.identity, "encoder_dtype": ENCODER.dtype, "payload": entry.payload}  # fmt: skip
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


# Foreign files and claims


def claim(folder: Path, name: str = "a.toml") -> Claim:
    return Claim(Folder(folder), folder / name, "latent")


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

    claim(tmp_path).extend({old.key(ENCODER), kept.key(ENCODER)})
    assert claim(tmp_path).reduce({kept.key(ENCODER)}) == 1
    assert not old_path.exists()
    assert kept_path.exists()
    assert text_path.exists()
    assert {path: path.read_bytes() for path in (lora, named)} == before
    assert len(Folder(tmp_path).all_entries) == 2


def test_a_dataset_that_shares_the_folder_keeps_its_entries(tmp_path: Path):
    mine, shared, theirs = (replace(LATENT, content=CONTENT | {"width": width}) for width in (1, 2, 3))
    paths = put(tmp_path, mine, shared, theirs)
    keys = [recipe.key(ENCODER) for recipe in (mine, shared, theirs)]
    claim(tmp_path, "a.toml").extend({keys[0], keys[1]})
    claim(tmp_path, "b.toml").extend({keys[1], keys[2]})
    assert claim(tmp_path, "a.toml").reduce(set()) == 1
    assert [path.exists() for path in paths] == [False, True, True]
    assert claim(tmp_path, "b.toml").reduce(set()) == 2


def test_what_nobody_claims_stays(tmp_path: Path):
    (path,) = put(tmp_path, LATENT)
    assert claim(tmp_path).reduce(set()) == 0
    for broken in (b"", b"{}", b"[1, 2", b"\xff"):
        claim(tmp_path).extend({LATENT.key(ENCODER)})
        for file in tmp_path.glob(".wangen-needs-*"):
            file.write_bytes(broken)
        assert claim(tmp_path).reduce(set()) == 0
    assert path.exists()


def test_a_second_file_of_one_key_is_removed(tmp_path: Path):
    put(tmp_path, LATENT, replace(LATENT, name="renamed.png"))
    assert len(Folder(tmp_path).all_entries) == 2
    assert claim(tmp_path).reduce({LATENT.key(ENCODER)}) == 1
    assert states(tmp_path, LATENT) == "valid"


# Values


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "all zero")]
)
def test_values_that_would_train_garbage_are_refused_with_the_remedy(tmp_path: Path, value: float, words: str):
    bad = {"latent": torch.full((2, 2), value)}
    with pytest.raises(WangenError, match=words) as raised, Writer(tmp_path) as writer:
        writer.put(LATENT, replace(ENCODER, dtype="bfloat16"), bad)
    assert LATENT.name in raised.value.found
    assert "--vae_dtype float32" in raised.value.cure
    with pytest.raises(WangenError) as raised:
        judge_values(TEXT, replace(ENCODER, dtype="float16"), bad)
    assert "--t5_dtype float32" in raised.value.cure
    with pytest.raises(WangenError) as raised:
        judge_values(LATENT, ENCODER, bad)
    assert "damaged" in raised.value.cure
    assert list(tmp_path.iterdir()) == []


def test_a_mask_may_hold_anything():
    tensors = {"embedding": torch.ones(2, 3), "mask": torch.zeros(2, dtype=torch.bool)}
    judge_values(TEXT, ENCODER, tensors)


# The writer


def recipes(count: int) -> list[Recipe]:
    return [replace(LATENT, content=CONTENT | {"width": number}, name=f"{number}.jpg") for number in range(count)]


def test_an_error_commits_what_is_whole(tmp_path: Path):
    def interrupted() -> None:
        with Writer(tmp_path) as writer:
            for recipe in recipes(3):
                writer.put(recipe, ENCODER, tensors())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [states(tmp_path, recipe, deep=True) for recipe in recipes(3)] == ["valid"] * 3
    assert not list(tmp_path.glob(".*"))


def test_nothing_is_visible_before_the_commit_and_groups_are_bounded(tmp_path: Path):
    with Writer(tmp_path) as writer:
        for number, recipe in enumerate(recipes(40), 1):
            writer.put(recipe, ENCODER, tensors())
            writer.commit_if_due()
            assert len(list(tmp_path.glob("*.safetensors"))) == number // 32 * 32
    assert writer.num_written == 40


def test_a_file_is_synced_before_it_is_moved_and_the_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    fsync, move = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink() if sys.platform == "linux" else tmp_path / "x"
        calls.append("folder" if target == tmp_path else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", lambda self, target: (calls.append("move"), move(self, target))[1])
    put(tmp_path, *recipes(2))
    if sys.platform == "linux":
        assert calls == ["file", "file", "move", "move", "folder"]


@pytest.mark.parametrize("at", range(7))
def test_ctrl_c_inside_a_commit_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int):
    """The interrupt strikes before or after any of the calls; leaving the writer finishes the work."""
    count = iter(range(100))
    fsync, move = os.fsync, Path.replace

    def strike() -> None:
        if next(count) == at:
            raise KeyboardInterrupt

    def noted_move(self: Path, target: Path) -> Path:
        strike()
        moved = move(self, target)
        strike()
        return moved

    monkeypatch.setattr(os, "fsync", lambda descriptor: (strike(), fsync(descriptor))[1])
    monkeypatch.setattr(Path, "replace", noted_move)

    def interrupted() -> None:
        with Writer(tmp_path) as writer:
            for recipe in recipes(2):
                writer.put(recipe, ENCODER, tensors())
            writer.commit()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [states(tmp_path, recipe, deep=True) for recipe in recipes(2)] == ["valid"] * 2
    assert not list(tmp_path.glob(".*"))


def test_ctrl_c_inside_a_write_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> Any:
        yield b"half"
        raise KeyboardInterrupt

    def write() -> None:
        with Writer(tmp_path) as writer:
            writer.put(recipes(1)[0], ENCODER, tensors())
            calls = iter([cache_writer.serialize, interrupted])
            monkeypatch.setattr(cache_writer, "serialize", lambda *given: next(calls)(*given))
            writer.put(recipes(2)[1], ENCODER, tensors())

    with pytest.raises(KeyboardInterrupt):
        write()
    assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]


def test_left_temporary_files_go_after_an_hour_and_only_ours(tmp_path: Path):
    ours, young, foreign = f".{'a' * 20}-{'b' * 16}.tmp", f".{'c' * 20}-{'d' * 16}.tmp", ".document.tmp"
    for name in (ours, young, foreign):
        (tmp_path / name).write_bytes(b"half")
    for name in (ours, foreign):
        os.utime(tmp_path / name, (time.time() - 4000,) * 2)
    put(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {young, foreign}


def test_a_file_in_place_of_the_folder_is_one_message(tmp_path: Path):
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(WangenError, match="cannot make the cache folder") as raised:
        put(tmp_path / "cache", LATENT)
    assert raised.value.cure


def test_a_folder_that_vanishes_is_one_message(tmp_path: Path):
    def write() -> None:
        with Writer(tmp_path / "a") as writer:
            (tmp_path / "a").rmdir()
            writer.put(LATENT, ENCODER, tensors())

    with pytest.raises(WangenError, match="cannot write the cache entry"):
        write()


WRITE_ALL = """
import sys, pathlib, test_cache as t
for _ in range(3):
    t.put(pathlib.Path(sys.argv[1]), *t.recipes(60))
"""


def test_two_processes_may_write_one_folder_at_once(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", WRITE_ALL, str(tmp_path)]
    running = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    folder = Folder(tmp_path, deep=True)
    assert len(folder.all_entries) == 60
    assert not folder.corrupt
    assert not list(tmp_path.glob(".*"))


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_writer_killed_at_any_moment_leaves_whole_entries(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", WRITE_ALL, str(tmp_path)], env=environment)
    while not list(tmp_path.glob("*.safetensors")) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder = Folder(tmp_path, deep=True)
    assert folder.all_entries
    assert not folder.corrupt
