"""`check_cache`: its verdicts, and that it judges what training takes."""

import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_bundle import Bundle, entry_files, uncached, write_toml
from helpers import make_image
from parity import VAE22
from tiny_weights import write_tiny_wan

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.errors import WAS_STOPPED, WangenError
from wangen.generator.steps import Train
from wangen.runtime import encoding
from wangen.runtime.cache import Folder
from wangen.runtime.cache.index import INDEX
from wangen.runtime.check_cache import _say_how_deep
from wangen.runtime.loader import find_entries
from wangen.runtime.needs import foreign_latents, judge
from wangen.runtime.samples import by_cache_folder, read_samples

pytest_plugins = ("bundle_fixtures",)
pytestmark = pytest.mark.usefixtures("one_thread")


MODEL = profiles.model("t2v-1.3B")
WHOLE = {"latent": [4, 0, 0, 0], "text_encoder_output": [4, 0, 0, 0], "empty_text_encoder_output": [2, 0, 0, 0]}


def table(message: str) -> dict[str, list[int]]:
    """Kind -> numbers of valid, stale, missing and corrupt entries, from the printed table, all datasets together."""
    found: dict[str, Counter[int]] = {}
    for line in message.splitlines():
        words = line.split()
        if line.endswith(("bytes", "kB")) and "%" in words:
            numbers = words[3 : words.index("%") - 1]
            found.setdefault(words[2], Counter()).update(dict(enumerate(map(int, numbers))))
    return {kind: [counter[place] for place in range(4)] for kind, counter in found.items()}


def report(bundle: Bundle) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((bundle.folder / "check_cache.report.json").read_text(encoding="utf-8"))
    return content


def test_check_cache_prints_what_is_missing_stale_and_corrupt(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    assert bundle.check() == 1
    assert table(capsys.readouterr().err) == {kind: [0, 0, sum(row), 0] for kind, row in WHOLE.items()}
    bundle.latents()
    bundle.text()
    capsys.readouterr()
    assert bundle.check("--deep") == 0
    assert table(capsys.readouterr().err) == WHOLE

    (bundle.photos / "coffee.txt").write_text("a cup", encoding="utf-8")
    latents = [path for path in entry_files(bundle.folder) if ".latent." in path.name]
    latents[0].write_bytes(latents[0].read_bytes()[:-5])
    latents[1].unlink()
    flipped = bytearray(latents[2].read_bytes())
    flipped[-2] ^= 4
    latents[2].write_bytes(flipped)
    assert bundle.check() == 1
    message = capsys.readouterr().err
    assert table(message) == WHOLE | {"latent": [2, 0, 1, 1], "text_encoder_output": [3, 1, 0, 0]}
    assert "coffee.jpg: text_encoder_output is stale, the caption changed" in message
    assert bundle.check("--deep") == 1
    assert table(capsys.readouterr().err)["latent"] == [1, 0, 1, 2]
    bundle.latents()
    bundle.text()
    assert bundle.check("--deep") == 1  # the step itself judges headers alone and kept the flipped payload
    assert "run check_cache again with --deep --repair, then run cache_latents again" in capsys.readouterr().err
    assert bundle.check("--deep", "--repair") == 1
    assert "not: run cache_latents again" in capsys.readouterr().err
    bundle.latents()
    assert bundle.check("--deep") == 0


def test_each_dataset_has_its_lines_and_every_cause_its_count(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    bundle.latents()
    bundle.text()
    capsys.readouterr()
    write_toml(bundle, 96)
    (bundle.photos / "coffee.txt").write_text("a cup", encoding="utf-8")
    entry_files(bundle.folder / "clips_cache")[0].unlink()
    assert bundle.check() == 1
    message = capsys.readouterr().err
    rows = {(row["dataset"], row["kind"]): row for row in report(bundle)["result"]["datasets"]}
    assert len(rows) == 6
    photos = rows["photos 96x96", "text_encoder_output"]
    assert (photos["valid"], photos["stale"], photos["coverage"]) == (2, 1, 66.7)
    assert photos["bytes"] > 0
    assert rows["photos 96x96", "latent"]["coverage"] == rows["photos 96x96", "latent"]["bytes"] == 0
    assert any(line.split()[:2] == ["photos", "96x96"] and "66.7 %" in line for line in message.splitlines())
    assert "  1 text embeddings stale: the caption changed" in message
    assert "latents stale: the size changed from" in message
    assert report(bundle)["result"]["why"]["text embeddings stale: the caption changed"] == 1
    assert "run cache_latents and cache_text again" in message
    bundle.latents()
    capsys.readouterr()
    assert bundle.check() == 1
    assert "run cache_text again" in capsys.readouterr().err


def test_what_two_blocks_share_counts_once_in_the_whole(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    write_toml(bundle, clips=False)
    bundle.toml.write_text(
        bundle.toml.read_text() + bundle.toml.read_text().split("[[datasets]]")[1].join(["[[datasets]]", ""])
    )
    bundle.latents()
    bundle.text()
    capsys.readouterr()
    assert bundle.check() == 0
    assert table(capsys.readouterr().err)["latent"] == [6, 0, 0, 0]
    assert report(bundle)["counts"]["latent"]["valid"] == 3


def test_images_and_clips_of_one_folder_are_told_apart(bundle: Bundle):
    for path in (bundle.folder / "clips").iterdir():
        path.rename(bundle.photos / path.name)
    bundle.toml.write_text(bundle.toml.read_text().replace("/clips'", "/photos'"))
    assert bundle.check() == 1
    names = {row["dataset"] for row in report(bundle)["result"]["datasets"]}
    assert names == {"bundle/photos/images 64x64", "bundle/photos/videos 64x64"}


# Repair


def test_repair_removes_what_is_damaged_or_left_and_nothing_else(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    bundle.latents()
    bundle.text()
    cache = bundle.folder / "photos_cache"
    good = bundle.files()
    torn, flipped = sorted(cache.glob("*.latent.safetensors"))[:2]
    torn.write_bytes(torn.read_bytes()[:-5])
    content = bytearray(flipped.read_bytes())
    content[-2] ^= 4
    flipped.write_bytes(content)
    key = "ab" * 10
    left = [f".claim-{key}", f".{key}-{'0' * 16}.tmp"]
    theirs = ["my_wan.safetensors", f"mine-{key}.other.safetensors", "notes.txt"]
    for name in (*left, *theirs):
        (cache / name).write_bytes(b"x")
        os.utime(cache / name, (1e9, 1e9))
    (cache / INDEX).write_bytes(b"nonsense")
    capsys.readouterr()
    assert bundle.check("--repair") == 1
    assert "photos_cache: removed 1 corrupt entry and 2 files of killed writers" in capsys.readouterr().err
    assert not torn.exists()
    assert not [name for name in left if (cache / name).exists()]
    assert (cache / INDEX).read_bytes() != b"nonsense"
    assert bundle.check("--repair", "--deep") == 1
    assert table(capsys.readouterr().err)["latent"] == [2, 0, 2, 0]
    assert not flipped.exists()
    assert [(cache / name).read_bytes() for name in theirs] == [b"x"] * 3
    bundle.latents()
    assert bundle.check("--deep") == 0
    assert {name: content for name, content in bundle.files().items() if Path(name).name not in theirs} == good


@pytest.mark.parametrize(
    ("system", "deep", "words"),
    [
        ("nt", False, "an edit that keeps both is seen only with --deep"),
        ("nt", True, "the only way to see an edit that keeps size and time"),
        ("posix", True, "on Windows the only way"),
        ("posix", False, ""),
    ],
)
def test_windows_users_are_told_what_only_deep_sees(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, system: str, deep: bool, words: str
):
    monkeypatch.setattr("wangen.runtime.check_cache.os", type("os", (), {"name": system}))
    with caplog.at_level(logging.INFO):
        _say_how_deep(deep)
    assert words in caplog.text
    assert bool(words) == bool(caplog.text)


# Which encoder


def test_check_cache_judges_by_the_weights_it_is_given(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bundle.latents()
    bundle.text()
    other = write_tiny_wan(tmp_path / "other", ["x"], seed=9)
    assert bundle.check("--vae", str(bundle.models["vae"]), "--t5", str(bundle.models["t5"])) == 0
    assert bundle.check("--vae", str(other["vae"])) == 1
    assert "encoded with another VAE" in capsys.readouterr().err
    assert bundle.check("--t5", str(other["t5"])) == 1
    assert "another text encoder or tokenizer" in capsys.readouterr().err
    assert bundle.check("--vae_dtype", "bfloat16") == 1
    assert "encoded in float32, wanted in bfloat16" in capsys.readouterr().err


@pytest.mark.slow
def test_entries_of_two_precisions_are_not_all_it_needs(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    """Training takes the last run's encoder; a half-finished change of precision must not pass."""
    bundle.latents()
    entry_files(bundle.folder / "clips_cache")[0].unlink()
    bundle.text()
    assert main([*bundle.latents_line("--keep_cache")[:-2], "bfloat16", "--keep_cache"]) == 0
    for path in entry_files(bundle.folder / "clips_cache"):
        if ".latent." in path.name:
            path.unlink()
    for entry in Folder(bundle.folder / "photos_cache").all_entries:
        if entry.kind == "latent" and (entry.encoder.dtype == "float32") == (entry.name == "cat.jpg"):
            entry.path.unlink()
    capsys.readouterr()
    assert bundle.check() == 1
    assert table(capsys.readouterr().err)["latent"] == [1, 2, 1, 0]


def both_precisions(bundle: Bundle) -> None:
    """Every text and every latent, the latents in float32 and, from the last run, in bfloat16."""
    bundle.text()
    bundle.latents()
    bundle.latents("--vae_dtype", "bfloat16", "--keep_cache")


def trained_dtypes(bundle: Bundle) -> set[str]:
    options = Train(dataset_config=bundle.toml, dit=bundle.folder / "dit", output_dir=bundle.folder, output_name="x")
    cached = find_entries(options, MODEL, read_samples(options, MODEL))
    folders = [Folder(bundle.folder / name) for name in ("photos_cache", "clips_cache")]
    entries = {entry.key: entry for folder in folders for entry in folder.all_entries}
    return {entries[sample.latent.key].encoder.dtype for sample in cached}


def test_training_takes_what_the_last_caching_run_made(bundle: Bundle):
    both_precisions(bundle)
    assert bundle.check("--vae_dtype", "bfloat16") == 0
    assert trained_dtypes(bundle) == {"bfloat16"}
    bundle.latents("--keep_cache")
    assert bundle.counts("cache_latents")["computed"] == 0
    assert bundle.check("--vae_dtype", "float32") == 0
    assert trained_dtypes(bundle) == {"float32"}


def test_entries_that_training_would_not_take_do_not_pass(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    both_precisions(bundle)
    capsys.readouterr()
    assert bundle.check("--vae_dtype", "float32") == 1
    message = capsys.readouterr().err
    assert table(message)["latent"] == [4, 0, 0, 0]
    assert "in float32 is there, but training takes those of the last caching run" in message


def test_two_encoders_without_a_claim_are_refused_with_the_cure(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    both_precisions(bundle)
    for claim in bundle.folder.rglob(".wangen-needs-*.latent.json"):
        claim.unlink()
    with pytest.raises(WangenError, match=r"[0-9a-f]{8} in bfloat16, [0-9a-f]{8} in float32") as raised:
        trained_dtypes(bundle)
    assert "run the caching step again without --keep_cache" in raised.value.cure
    capsys.readouterr()
    assert bundle.check() == bundle.check("--vae_dtype", "bfloat16") == 1
    assert capsys.readouterr().err.count("it is open which to take") == 2
    bundle.latents()
    assert bundle.check() == 0
    assert trained_dtypes(bundle) == {"float32"}


def test_a_run_that_was_killed_before_it_wrote_counts_as_the_last(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    bundle.text()
    bundle.latents()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(encoding, "encode", stop)
    assert main(bundle.latents_line("--vae_dtype", "bfloat16")) == WAS_STOPPED
    with pytest.raises(WangenError, match="encoded in float32, wanted in bfloat16"):
        trained_dtypes(bundle)


@pytest.mark.slow
def test_a_long_list_of_problems_is_cut(unbroken: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bundle = uncached(unbroken, tmp_path / "bundle")
    assert bundle.check() == 1
    message = capsys.readouterr().err
    assert message.count("is missing, not encoded yet") == 20
    assert "… and 121 more" in message
    with pytest.raises(WangenError, match="… and 120 more"):
        trained_dtypes(bundle)


# ROCm


def test_on_rocm_both_steps_mean_float32(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Scripts pass `--vae_dtype bfloat16` to both steps on every platform."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    bundle.text()
    bundle.latents("--vae_dtype", "bfloat16")
    assert "ROCm: the VAE runs in float32; bfloat16 gives" in capsys.readouterr().err
    assert bundle.check("--vae_dtype", "bfloat16") == 0
    assert trained_dtypes(bundle) == {"float32"}
    bundle.latents()
    assert "ROCm" not in capsys.readouterr().err


def test_latents_of_another_models_vae_are_no_cache_of_this_one(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    write_toml(bundle, clips=False)
    for number, path in enumerate(sorted(bundle.photos.glob("*.jpg"))):
        make_image(path, (64, 64), seed=number)
    bundle = Bundle(bundle.folder, bundle.models | {"vae": VAE22})
    bundle.latents("--task", "ti2v-5B")
    bundle.text()
    capsys.readouterr()
    assert bundle.check("--task", "ti2v-5B") == 0
    assert bundle.check("--task", "t2v-1.3B") == 1
    words = "the latents have 48 channels, where t2v-1.3B takes 16"
    assert words in capsys.readouterr().err
    assert words in report(bundle)["result"]["problems"][0]
    options = Train(dataset_config=bundle.toml, task="t2v-1.3B", output_dir=bundle.folder, output_name="none")
    with pytest.raises(WangenError, match=words) as error:
        find_entries(options, MODEL, read_samples(options, MODEL))
    assert error.value.cure == "run cache_latents with --task t2v-1.3B"


def test_latents_of_the_vae_with_the_same_tensors_are_known_by_the_last_caching_run(bundle: Bundle, capsys):
    """Wan 2.1's and Qwen-Image's both give 16 channels."""
    write_toml(bundle, clips=False)
    bundle.latents("--task", "t2v-1.3B")
    qwen, wan = (Train(dataset_config=bundle.toml, task=task, output_dir=bundle.folder, output_name="none")
                 for task in ("qwen-image", "t2v-1.3B"))  # fmt: skip
    words = "the latents are of Wan 2.1's VAE by the last caching run, where qwen-image takes Qwen-Image's"

    def foreign(options: Train) -> str:
        model = profiles.model(options.task)
        samples = read_samples(options, model)
        folders = [Folder(path) for path in by_cache_folder(samples)]
        return foreign_latents(judge(folders, samples, "latent", None), model, options.dataset)

    assert (foreign(qwen), foreign(wan)) == (words, "")
    bundle.latents("--task", "i2v-14B", "--keep_cache")
    assert (foreign(qwen), foreign(wan)) == (words, ""), "which has the same"
    bundle.latents()
    assert foreign(qwen) == words, "a run that does not say it changes nothing"
    capsys.readouterr()
    assert bundle.check("--task", "qwen-image") == 1
    assert words in capsys.readouterr().err
    bundle.latents("--task", "qwen-image")
    assert (foreign(qwen), foreign(wan) != "") == ("", True)
