"""The caching steps from the command line: what they encode, skip, keep and remove."""

import io
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_bundle import CLIP, PHOTOS, Bundle, entry_files, uncached, write_toml
from helpers import make_image
from PIL import Image
from tiny_weights import write_tiny_wan

from wangen.generator.cli import main
from wangen.runtime.cache import Entry, Folder, load, payload_digest
from wangen.runtime.media import load_clip
from wangen.runtime.models.wan_vae import encode_video
from wangen.runtime.progress import progress
from wangen.runtime.safetensors_file import write
from wangen.runtime.weights.text_encoder import encode_prompts, load_text_encoder
from wangen.runtime.weights.tokenizer import load_tokenizer
from wangen.runtime.weights.vae import load_vae

pytest_plugins = ("bundle_fixtures",)
pytestmark = pytest.mark.usefixtures("one_thread")


# What is encoded


def test_the_photos_and_the_clip_are_what_is_encoded(bundle: Bundle):
    assert bundle.latents()["computed"] == 4
    vae = load_vae(bundle.models["vae"], dtype=torch.float32)
    cached = bundle.entries() | bundle.entries("clips_cache")
    for stem in PHOTOS:
        entry = cached[f"latent {stem}.jpg"]
        size = (entry.content["width"], entry.content["height"])
        with Image.open(bundle.photos / f"{stem}.jpg") as image:
            scale = max(size[0] / image.width, size[1] / image.height)
            covering = (max(size[0], round(image.width * scale)), max(size[1], round(image.height * scale)))
            left, top = (covering[0] - size[0]) // 2, (covering[1] - size[1]) // 2
            photo = image.convert("RGB").resize(covering, Image.Resampling.LANCZOS)
            photo = photo.crop((left, top, left + size[0], top + size[1]))
        pixels = torch.frombuffer(bytearray(photo.tobytes()), dtype=torch.uint8).reshape(1, size[1], size[0], 3)
        compare(vae, entry, pixels.permute(3, 0, 1, 2)[None])
    entry = cached[f"latent {CLIP}.mp4:0+5"]
    size = (entry.content["width"], entry.content["height"])
    frames = load_clip(bundle.folder / "clips" / f"{CLIP}.mp4", size, 0, 5, 16)
    compare(vae, entry, torch.from_numpy(frames.copy())[None])


def compare(vae: Any, entry: Entry, video: torch.Tensor) -> None:
    """The cached latent equals encoding (1, 3, T, H, W) uint8 pixels with diffusers' module, to rounding."""
    direct = encode_video(vae, video.float() / 127.5 - 1)
    assert (load(entry)["latent"][None] - direct).abs().max() <= 1e-5 * direct.abs().max()


def test_captions_are_what_is_encoded_and_a_shared_one_is_encoded_once(bundle: Bundle):
    counts = bundle.text()
    assert (counts["computed"], counts["found"]["missing"]) == (4, 6)  # with the empty prompt, in both folders
    encoder = load_text_encoder(bundle.models["t5"], dtype=torch.float32)
    tokenizer = load_tokenizer(bundle.models["t5"])
    for cache in ("photos_cache", "clips_cache"):
        for entry in bundle.entries(cache).values():
            tensors = load(entry)
            (direct,) = encode_prompts(encoder, tokenizer, [entry.content["caption"]])
            assert tensors["embedding"].shape == direct.shape
            assert tensors["mask"].all()
            assert len(tensors["mask"]) == len(direct)
            assert (tensors["embedding"] - direct).abs().max() <= 1e-4 * direct.abs().max()
    shared = [entry for cache in ("photos_cache", "clips_cache") for entry in bundle.entries(cache).values()
              if entry.content == {"caption": "a cat"}]  # fmt: skip
    assert len(shared) == 2
    assert len({payload_digest(entry.held_by, entry.span) for entry in shared}) == 1


def test_a_text_that_is_valid_in_one_folder_is_copied_to_the_other(bundle: Bundle):
    bundle.text()
    before = bundle.files()
    shutil.rmtree(bundle.folder / "clips_cache")
    counts = bundle.text()
    assert (counts["computed"], counts["from_cache"]) == (0, 4)
    assert bundle.files() == before


# What is skipped

NOTHING = """
import sys
from wangen.generator.cli import main
code = main(sys.argv[1:])
print(code, sorted({"torch", "av", "numpy", "PIL"} & set(sys.modules)))
"""


def test_a_second_run_computes_nothing_imports_no_torch_and_opens_no_media(bundle: Bundle):
    bundle.latents()
    bundle.text()
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in entry_files(bundle.folder)}
    time.sleep(2.05)  # for a process whose memo trusts old files only
    for line in (bundle.latents_line(), bundle.text_line(), ["check_cache", "--dataset_config", str(bundle.toml)]):
        run = subprocess.run([sys.executable, "-c", NOTHING, *line], capture_output=True, text=True, check=True)
        assert run.stdout.split() == ["0", "[]"], run.stdout + run.stderr
    assert bundle.counts("cache_latents")["computed"] == bundle.counts("cache_text")["computed"] == 0
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in entry_files(bundle.folder)} == before


def test_a_new_caption_encodes_one_text_and_no_latent(bundle: Bundle):
    bundle.latents()
    bundle.text()
    (bundle.photos / "coffee.txt").write_text("a cup", encoding="utf-8")
    assert bundle.latents()["computed"] == 0
    counts = bundle.text()
    assert (counts["computed"], counts["removed"], counts["why"]) == (
        1,
        1,
        {"text_encoder_output: the caption changed": 1},
    )
    (bundle.photos / "coffee.txt").write_text("  a \t cup \n\n", encoding="utf-8")  # the encoder sees the same
    assert bundle.text()["computed"] == 0


def test_a_new_picture_under_the_old_name_encodes_one_latent_and_no_text(bundle: Bundle):
    bundle.latents()
    bundle.text()
    shutil.copyfile(bundle.photos / "cat.jpg", bundle.photos / "coffee.jpg")
    counts = bundle.latents()
    assert (counts["computed"], counts["removed"]) == (0, 1)  # it is the cat's picture now, which is there already
    make_image(bundle.photos / "coffee.jpg", (300, 200))
    counts = bundle.latents()
    assert counts["computed"] == 1
    assert bundle.text()["computed"] == 0


def test_moving_and_renaming_encode_nothing(bundle: Bundle, tmp_path: Path):
    bundle.latents()
    bundle.text()
    (tmp_path / "elsewhere").mkdir()
    moved = Bundle(bundle.folder.rename(tmp_path / "elsewhere" / "moved"), bundle.models)
    for suffix in (".jpg", ".txt"):
        (moved.photos / f"cat{suffix}").rename(moved.photos / f"Mein Kätzchen{suffix}")
    os.utime(moved.photos / "coffee.jpg")
    write_toml(moved)
    before = moved.files()
    assert moved.latents()["computed"] == moved.text()["computed"] == 0
    assert moved.files() == before
    assert moved.check("--deep") == 0


@pytest.mark.slow
def test_another_resolution_precision_or_vae_says_why(bundle: Bundle, models: dict[str, Path], tmp_path: Path):
    bundle.latents()
    write_toml(bundle, 96)
    why = bundle.latents()["why"]
    assert sum(why.values()) == 4
    assert all("changed from" in reason for reason in why)
    line = [*bundle.latents_line()[:-1], "bfloat16"]
    assert main(line) == 0
    assert bundle.counts("cache_latents")["why"] == {"latent: encoded in float32, wanted in bfloat16": 4}
    other = write_tiny_wan(tmp_path / "other", ["x"], seed=9)
    bundle.models = models | {"vae": other["vae"]}
    assert set(bundle.latents()["why"]) == {"latent: encoded with another VAE"}


def test_recache_and_keep_cache(bundle: Bundle):
    bundle.latents()
    before = bundle.files()
    assert bundle.latents("--recache")["computed"] == 4
    assert bundle.files() == before
    (bundle.photos / "cat.jpg").unlink()
    (bundle.photos / "cat.txt").unlink()
    assert bundle.latents("--keep_cache")["removed"] == 0
    assert bundle.files() == before
    assert bundle.latents()["removed"] == 1
    assert len(bundle.files()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("packed", [(), ("--packed",)])
@pytest.mark.parametrize("name", ["a.jpg", "z.jpg"])
def test_what_recache_encodes_takes_the_place_of_a_damaged_entry_of_the_items_old_name(
    bundle: Bundle, name: str, packed: tuple[str, ...]
):
    bundle.latents()
    (damaged,) = (bundle.folder / "photos_cache").glob("cat*")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    for path in (bundle.photos / "cat.jpg", bundle.photos / "cat.txt"):
        path.rename(path.with_name(name).with_suffix(path.suffix))
    assert bundle.latents("--recache", *packed)["computed"] == 4
    assert bundle.latents()["removed"] == 0
    assert set(bundle.entries()) == {"latent astronaut.jpg", "latent coffee.jpg", f"latent {name}"}
    assert not Folder(bundle.folder / "photos_cache", deep=True).damaged


def test_no_skip_existing_encodes_again(bundle: Bundle):
    bundle.latents()
    bundle.text()
    counts = bundle.latents("--no_skip_existing")
    assert (counts["computed"], counts["from_cache"]) == (4, 0)
    assert bundle.text("--no_skip_existing")["computed"] == 4
    assert bundle.latents("--skip_existing")["computed"] == 0


def test_a_lora_in_the_cache_folder_is_never_touched(bundle: Bundle):
    lora = bundle.folder / "photos_cache" / "my_character.safetensors"
    lora.parent.mkdir()
    write(lora, {"a": torch.ones(3)}, {"ss_network_dim": "4"})
    before = (lora.read_bytes(), lora.stat().st_mtime_ns)
    for _ in range(2):
        bundle.latents()
        bundle.text()
        (bundle.photos / "cat.txt").write_text("another", encoding="utf-8")
        (bundle.photos / "coffee.jpg").unlink(missing_ok=True)
        (bundle.photos / "coffee.txt").unlink(missing_ok=True)
    assert bundle.check() == 0 or bundle.text()["computed"] == 1
    assert (lora.read_bytes(), lora.stat().st_mtime_ns) == before


def test_two_datasets_in_one_cache_folder_leave_each_other_alone(bundle: Bundle):
    small, large = bundle, Bundle(bundle.folder, bundle.models)
    large.toml = bundle.folder / "large.toml"
    write_toml(large, 96)
    small.latents()
    large.latents()
    assert small.latents()["computed"] == large.latents()["computed"] == 0
    assert len(bundle.files()) == 8


def test_resolutions_that_are_left_out_keep_their_entries_in_a_shared_folder(tmp_path: Path, models: dict[str, Path]):
    make_image(tmp_path / "photos" / "a.png", (64, 64))
    (tmp_path / "photos" / "a.txt").write_text("a")
    bundle = Bundle(tmp_path, models)
    place = f"image_directory = '{tmp_path.as_posix()}/photos'\ncache_directory = '{tmp_path.as_posix()}/cache'\n"
    bundle.toml.write_text("".join(f"[[datasets]]\n{place}resolution = {side}\n" for side in (64, 96)))
    assert bundle.latents()["computed"] == 2
    assert bundle.latents("--resolution", "64")["removed"] == 0
    assert bundle.latents()["computed"] == 0
    bundle.toml.write_text(f"[[datasets]]\n{place}resolution = 64\n")
    assert bundle.latents("--resolution", "64")["removed"] == 1


def test_blocks_that_spell_their_cache_folder_in_two_ways_share_it(tmp_path: Path, models: dict[str, Path]):
    bundle, root = Bundle(tmp_path, models), tmp_path.as_posix()
    blocks = []
    for name, cache in (("a", f"{root}/cache"), ("b", f"{root}/sub/../cache")):
        make_image(tmp_path / name / f"{name}.png", (64, 64), seed=ord(name))
        (tmp_path / name / f"{name}.txt").write_text(name)
        folders = f"image_directory = '{root}/{name}'\ncache_directory = '{cache}'\n"
        blocks.append(f"[[datasets]]\n{folders}resolution = 64\n")
    bundle.toml.write_text("".join(blocks))
    assert [bundle.latents()["computed"], bundle.text()["computed"]] == [2, 3]
    assert [bundle.latents()["computed"], bundle.text()["computed"]] == [0, 0]
    bundle.toml.write_text(blocks[0] + blocks[1].replace("resolution = 64", "resolution = 96"))
    assert bundle.latents()["computed"] == 1
    assert bundle.latents("--resolution", "64")["removed"] == 0
    assert bundle.check() == 0


@pytest.mark.parametrize("words", [("--batch_size", "0"), ("--batch_size", "-1"), ("--num_workers", "-1")])
def test_numbers_that_no_run_can_have_are_refused(bundle: Bundle, capsys: pytest.CaptureFixture[str], words: Any):
    assert main(bundle.latents_line(*words)) == 2
    assert f"{words[0]} must be" in capsys.readouterr().err


# What they say


@pytest.mark.slow
def test_progress_lines_are_sparse_and_end_complete(unbroken: Bundle, tmp_path: Path):
    bundle = uncached(unbroken, tmp_path / "bundle")
    log = tmp_path / "log.txt"
    bundle.latents("--log_file", str(log))
    lines = [line for line in log.read_text().splitlines() if " latents " in line and "/70" in line]
    assert 1 <= len(lines) <= 4
    assert "70/70" in lines[-1]
    assert "left" not in lines[-1]


def test_the_bar_of_a_terminal_shows_any_file_name(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    caplog.set_level(logging.INFO, logger="wangen")
    with progress("latents", 1) as advance:
        advance(1, "a[/b] [red].jpg")
    assert "1/1" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "a[/b] [red].jpg" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_the_report_counts_what_came_from_the_cache(bundle: Bundle):
    counts = bundle.latents()
    assert counts["found"] == {"valid": 0, "stale": 0, "missing": 4, "corrupt": 0}
    assert counts["why"] == {"latent: not encoded yet": 4}
    counts = bundle.latents()
    assert (counts["from_cache"], counts["computed"], counts["why"]) == (4, 0, {})
