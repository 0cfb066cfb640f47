"""The caching steps from the command line: what they encode, skip, keep, refuse, and leave behind."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_image
from PIL import Image

from wangen.generator.cli import main
from wangen.runtime import weights
from wangen.runtime.cache import Entry, Folder, load
from wangen.runtime.media import load_clip
from wangen.runtime.models import wan
from wangen.runtime.progress import progress
from wangen.runtime.safetensors_file import write
from wangen.runtime.tiny import write_tiny_wan

PHOTOS = ("astronaut", "cat", "coffee")
CLIP = "big-buck-bunny"
LINUX_ROOT = sys.platform == "linux" and os.geteuid() == 0


class Bundle:
    """A dataset folder with its TOML, and the tiny weights."""

    def __init__(self, folder: Path, models: dict[str, Path]) -> None:
        self.folder = folder
        self.models = models
        self.toml = folder / "set.toml"

    @property
    def photos(self) -> Path:
        return self.folder / "photos"

    def latents_line(self, *more: str) -> list[str]:
        line = ["cache_latents", "--dataset_config", str(self.toml), "--vae", str(self.models["vae"])]
        return [*line, "--vae_dtype", "float32", *more]

    def text_line(self, *more: str) -> list[str]:
        line = ["cache_text", "--dataset_config", str(self.toml), "--t5", str(self.models["t5"])]
        return [*line, "--t5_dtype", "float32", *more]

    def latents(self, *more: str) -> dict[str, Any]:
        assert main(self.latents_line(*more)) == 0
        return self.counts("cache_latents")

    def text(self, *more: str) -> dict[str, Any]:
        assert main(self.text_line(*more)) == 0
        return self.counts("cache_text")

    def check(self, *more: str) -> int:
        return main(["check_cache", "--dataset_config", str(self.toml), *more])

    def counts(self, step: str) -> dict[str, Any]:
        report = json.loads((self.toml.parent / f"{step}.report.json").read_text(encoding="utf-8"))
        counts: dict[str, Any] = report["counts"]
        return counts

    def entries(self, cache: str = "photos_cache") -> dict[str, Entry]:
        folder = Folder(self.folder / cache, deep=True)
        assert not folder.corrupt if folder.all_entries else True
        return {f"{entry.kind} {entry.name}": entry for entry in folder.all_entries}

    def files(self) -> dict[str, bytes]:
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in entry_files(self.folder)}


def entry_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def write_toml(bundle: Bundle, resolution: int = 64, *, clips: bool = True) -> None:
    text = f"[general]\nresolution = [{resolution}, {resolution}]\nenable_bucket = true\n"
    text += f"[[datasets]]\nimage_directory = '{bundle.photos.as_posix()}'\n"
    text += f"cache_directory = '{bundle.folder.as_posix()}/photos_cache'\n"
    if clips:
        text += f"[[datasets]]\nvideo_directory = '{bundle.folder.as_posix()}/clips'\n"
        text += f"cache_directory = '{bundle.folder.as_posix()}/clips_cache'\ntarget_frames = [5]\n"
    bundle.toml.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for two threads, which on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_tiny_wan(tmp_path_factory.mktemp("models"), ["a photo of a cat and a rocket", "red green blue"])


@pytest.fixture
def bundle(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """Three photos and a clip of the example; the cat and the clip have one caption in common."""
    monkeypatch.setattr("wangen.runtime.sources.YOUNG_NS", 0)
    bundle = Bundle(tmp_path / "bundle", models)
    example = files("wangen.examples").joinpath("dataset")
    for folder, stem, suffix in (*(("photos", stem, ".jpg") for stem in PHOTOS), ("clips", CLIP, ".mp4")):
        (bundle.folder / folder).mkdir(parents=True, exist_ok=True)
        (bundle.folder / folder / f"{stem}{suffix}").write_bytes(example.joinpath(f"{stem}{suffix}").read_bytes())
        caption = "a cat" if stem in ("cat", CLIP) else f"a photo of {stem}"
        (bundle.folder / folder / f"{stem}.txt").write_text(caption + "\n", encoding="utf-8")
    write_toml(bundle)
    return bundle


def make_many(folder: Path, models: dict[str, Path], count: int) -> Bundle:
    """Many tiny pictures of one shape, each with a caption of its own."""
    bundle = Bundle(folder, models)
    for number in range(count):
        make_image(bundle.photos / f"{number:03}.png", (32, 32), seed=number + 1)
        (bundle.photos / f"{number:03}.txt").write_text(f"picture {number} of many", encoding="utf-8")
    write_toml(bundle, 32, clips=False)
    return bundle


# What is encoded


def test_the_photos_and_the_clip_are_what_is_encoded(bundle: Bundle):
    assert bundle.latents()["computed"] == 4
    vae = weights.load_vae(bundle.models["vae"], dtype=torch.float32)
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
    """The cached latent, and what it decodes to, equal encoding and decoding (1, 3, T, H, W) uint8 pixels directly."""
    direct = wan.encode_video(vae, video.float() / 127.5 - 1)
    cached = load(entry)["latent"][None]
    assert torch.equal(cached, direct)
    assert torch.equal(wan.decode_latents(vae, cached), wan.decode_latents(vae, direct))


def test_captions_are_what_is_encoded_and_a_shared_one_is_encoded_once(bundle: Bundle):
    counts = bundle.text()
    assert (counts["computed"], counts["found"]["missing"]) == (3, 4)
    encoder = weights.load_text_encoder(bundle.models["t5"], dtype=torch.float32)
    tokenizer = weights.load_tokenizer(bundle.models["t5"])
    for cache in ("photos_cache", "clips_cache"):
        for entry in bundle.entries(cache).values():
            tensors = load(entry)
            (direct,) = wan.encode_prompts(encoder, tokenizer, [entry.content["caption"]])
            assert tensors["embedding"].shape == direct.shape
            assert tensors["mask"].all()
            assert len(tensors["mask"]) == len(direct)
            assert (tensors["embedding"] - direct).abs().max() <= 1e-4 * direct.abs().max()
    shared = [entry for cache in ("photos_cache", "clips_cache") for entry in bundle.entries(cache).values()
              if entry.content == {"caption": "a cat"}]  # fmt: skip
    assert len(shared) == 2
    assert shared[0].payload == shared[1].payload


def test_a_text_that_is_valid_in_one_folder_is_copied_to_the_other(bundle: Bundle):
    bundle.text()
    before = bundle.files()
    shutil.rmtree(bundle.folder / "clips_cache")
    counts = bundle.text()
    assert (counts["computed"], counts["from_cache"]) == (0, 3)
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
    assert (counts["computed"], counts["removed"], counts["why"]) == (1, 1, {"the caption changed": 1})
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


def test_another_resolution_precision_or_vae_says_why(bundle: Bundle, models: dict[str, Path], tmp_path: Path):
    bundle.latents()
    write_toml(bundle, 96)
    why = bundle.latents()["why"]
    assert sum(why.values()) == 4
    assert all("changed from" in reason for reason in why)
    line = [*bundle.latents_line()[:-1], "bfloat16"]
    assert main(line) == 0
    assert bundle.counts("cache_latents")["why"] == {"encoded in float32, wanted in bfloat16": 4}
    other = write_tiny_wan(tmp_path / "other", ["x"], seed=9)
    bundle.models = models | {"vae": other["vae"]}
    assert set(bundle.latents()["why"]) == {"encoded with another VAE"}


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


# Killed, interrupted, refused by the disk

KILL_AT_COMMIT = """
import os, signal, sys
from wangen.generator.cli import main
from wangen.runtime.cache_writer import Writer
commit, left = Writer.commit, [int(sys.argv[1])]
def killing(self):
    if self._pending and not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= bool(self._pending)
    commit(self)
Writer.commit = killing
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Bundle:
    """Seventy pictures, cached without a break; tests must not change it."""
    bundle = make_many(tmp_path_factory.mktemp("unbroken") / "bundle", models, 70)
    bundle.latents()
    bundle.text()
    return bundle


def uncached(unbroken: Bundle, folder: Path) -> Bundle:
    shutil.copytree(unbroken.photos, folder / "photos")
    bundle = Bundle(folder, unbroken.models)
    write_toml(bundle, 32, clips=False)
    return bundle


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.slow
def test_killed_before_a_commit_it_loses_that_group_and_ends_with_the_same_bytes(unbroken: Bundle, tmp_path: Path):
    bundle = uncached(unbroken, tmp_path / "bundle")
    for line in (bundle.latents_line(), bundle.text_line()):
        killed = subprocess.run([sys.executable, "-c", KILL_AT_COMMIT, "1", *line], capture_output=True)
        assert killed.returncode == -signal.SIGKILL
    left = len(bundle.entries())
    assert 2 <= left <= 64  # the first group of each kind
    assert bundle.latents()["computed"] + bundle.text()["computed"] == 140 - left
    assert bundle.check("--deep") == 0
    assert bundle.files() == unbroken.files()


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_stopped_from_outside_it_keeps_what_is_whole(unbroken: Bundle, tmp_path: Path, number: signal.Signals):
    bundle = uncached(unbroken, tmp_path / "bundle")
    command = [sys.executable, "-m", "wangen.runtime", *bundle.latents_line()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    cache = bundle.folder / "photos_cache"
    while process.poll() is None and len(list(cache.glob(".*.tmp"))) < 8:
        time.sleep(0.005)
    process.send_signal(number)
    message = process.communicate(timeout=60)[1]
    if number != signal.SIGKILL:
        assert process.returncode == 1, message
        assert message.count("stopped.") == 1
        assert "Traceback" not in message
        assert 8 <= len(bundle.entries()) <= 70
        assert not list(cache.glob(".*.tmp"))
    bundle.latents()
    assert bundle.check("--deep") == 1  # the texts are missing
    latents = {name: content for name, content in unbroken.files().items() if ".latent." in name}
    assert bundle.files() == latents


def test_a_file_in_place_of_the_cache_folder_is_one_message(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    (bundle.folder / "photos_cache").write_bytes(b"")
    for line in (bundle.latents_line(), bundle.text_line()):
        assert main(line) == 1
        message = capsys.readouterr().err
        assert message.count("cannot make the cache folder") == 1
        assert "do:" in message


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    if not LINUX_ROOT:
        pytest.skip("mounting a tiny file system needs Linux and root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_message_and_keeps_what_was_cached(
    unbroken: Bundle, tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
):
    bundle = uncached(unbroken, tmp_path / "bundle")
    cache = bundle.folder / "photos_cache"
    cache.symlink_to(small_disk, target_is_directory=True)
    for line in (bundle.latents_line(), bundle.text_line()):
        capsys.readouterr()
        assert main(line) == 1
        message = capsys.readouterr().err
        assert message.count("No space left on device") == 1
        assert "free space" in message
        assert not list(small_disk.glob(".*.tmp"))
    kept = len(Folder(cache, deep=True).all_entries)
    assert kept >= 16
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert bundle.latents()["computed"] + bundle.text()["computed"] == 140 - kept
    assert bundle.check("--deep") == 0


def test_a_read_only_cache_folder_is_one_message_unless_nothing_is_to_do(
    unbroken: Bundle, tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
):
    bundle = uncached(unbroken, tmp_path / "bundle")
    (bundle.folder / "photos_cache").symlink_to(small_disk, target_is_directory=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert main(bundle.latents_line()) == 1
    message = capsys.readouterr().err
    assert message.count("Read-only file system") == 1
    assert "do:" in message
    subprocess.run(["mount", "-o", "remount,rw,size=8m", str(small_disk)], check=True)
    bundle.latents()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert bundle.latents()["computed"] == 0


# Bad input


class Evil:
    """Unpickling it would make a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_a_vae_with_code_in_it_is_refused_and_never_executed(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bundle.models = bundle.models | {"vae": tmp_path / "Wan2.1_VAE.pth"}
    torch.save({"encoder.conv1.weight": Evil(tmp_path / "executed")}, bundle.models["vae"])
    assert main(bundle.latents_line()) == 1
    assert "refused, not executed" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


def test_damaged_and_wrong_weights_are_one_message(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = bundle.models
    whole = good["vae"].read_bytes()
    cases = [
        (whole[: len(whole) // 2], "incomplete or damaged"),
        (b"", "not a"),
        (b"PK\x03\x04 nothing more", "incomplete or damaged"),
    ]
    for content, words in cases:
        bundle.models = good | {"vae": tmp_path / "Wan2.1_VAE.pth"}
        bundle.models["vae"].write_bytes(content)
        assert main(bundle.latents_line()) == 1
        message = capsys.readouterr().err
        assert words in message
        assert "Traceback" not in message
    bundle.models = good | {"vae": good["dit"], "t5": good["vae"]}
    assert main(bundle.latents_line()) == 1
    message = capsys.readouterr().err
    assert "transformer" in message
    assert "--vae" in message
    assert main(bundle.text_line()) == 1
    assert "--t5" in capsys.readouterr().err
    bundle.models = good | {"vae": tmp_path / "absent.pth"}
    assert main(bundle.latents_line()) == 1
    assert "absent.pth" in capsys.readouterr().err
    assert not entry_files(bundle.folder)


def test_payload_damage_that_the_header_cannot_show_never_gives_an_entry(bundle: Bundle, tmp_path: Path):
    """A byte flipped inside the weights of a .pth breaks a checksum of its zip or makes another VAE; never a crash."""
    content = bytearray(bundle.models["vae"].read_bytes())
    content[len(content) // 2] ^= 0xFF
    bundle.models = bundle.models | {"vae": tmp_path / "Wan2.1_VAE.pth"}
    bundle.models["vae"].write_bytes(content)
    assert main(bundle.latents_line()) in (0, 1)


def test_an_unknown_key_is_a_usage_error(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    bundle.toml.write_text(bundle.toml.read_text().replace("enable_bucket", "enable_buckets"))
    for line in (bundle.latents_line(), bundle.text_line()):
        assert main(line) == 2
        assert "did you mean enable_bucket?" in capsys.readouterr().err


def test_bad_media_and_captions_are_all_named_at_once(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    (bundle.photos / "cat.jpg").write_bytes(b"no picture")
    (bundle.photos / "coffee.txt").unlink()
    (bundle.photos / "astronaut.txt").write_text(" \n")
    assert main(bundle.latents_line()) == 1
    message = capsys.readouterr().err
    for name in ("cat.jpg", "coffee.jpg", "astronaut.txt"):
        assert name in message
    assert not entry_files(bundle.folder)


def test_a_truncated_picture_is_named_and_the_others_stay(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    content = (bundle.photos / "coffee.jpg").read_bytes()
    (bundle.photos / "coffee.jpg").write_bytes(content[: len(content) // 2])
    assert main(bundle.latents_line("--num_workers", "1")) == 1
    message = capsys.readouterr().err
    assert "coffee.jpg" in message
    assert "cannot be decoded" in message
    (bundle.photos / "coffee.jpg").write_bytes(content)
    assert bundle.latents()["computed"] < 4


def test_a_clip_too_short_is_named(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    bundle.toml.write_text(bundle.toml.read_text().replace("[5]", "[801]"))
    assert main(bundle.latents_line()) == 1
    message = capsys.readouterr().err
    assert f"{CLIP}.mp4: has" in message
    assert "801" in message


# check_cache


def table(message: str) -> dict[str, list[int]]:
    """Kind -> numbers of valid, stale, missing and corrupt entries, from the printed table."""
    rows = [line.split() for line in message.splitlines() if line.startswith(("  latent ", "  text_encoder"))]
    return {row[0]: [int(number) for number in row[1:]] for row in rows}


def test_check_cache_prints_what_is_missing_stale_and_corrupt(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    assert bundle.check() == 1
    assert table(capsys.readouterr().err) == {"latent": [0, 0, 4, 0], "text_encoder_output": [0, 0, 4, 0]}
    bundle.latents()
    bundle.text()
    capsys.readouterr()
    assert bundle.check("--deep") == 0
    assert table(capsys.readouterr().err) == {"latent": [4, 0, 0, 0], "text_encoder_output": [4, 0, 0, 0]}

    (bundle.photos / "coffee.txt").write_text("a cup", encoding="utf-8")
    latents = [path for path in entry_files(bundle.folder) if ".latent." in path.name]
    latents[0].write_bytes(latents[0].read_bytes()[:-5])
    latents[1].unlink()
    flipped = bytearray(latents[2].read_bytes())
    flipped[-2] ^= 4
    latents[2].write_bytes(flipped)
    assert bundle.check() == 1
    message = capsys.readouterr().err
    assert table(message) == {"latent": [2, 0, 1, 1], "text_encoder_output": [3, 1, 0, 0]}
    assert "coffee.jpg: text_encoder_output is stale, the caption changed" in message
    assert bundle.check("--deep") == 1
    assert table(capsys.readouterr().err)["latent"] == [1, 0, 1, 2]
    bundle.latents()
    bundle.text()
    assert bundle.check("--deep") == 1  # the step itself judges headers alone and kept the flipped payload
    bundle.latents("--recache")
    assert bundle.check("--deep") == 0


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


def test_entries_of_two_precisions_are_not_all_it_needs(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    """Training takes one encoder's entries; a half-finished change of precision must not pass."""
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
    assert table(capsys.readouterr().err)["latent"] == [2, 1, 1, 0]


def test_progress_lines_are_sparse_and_end_complete(unbroken: Bundle, tmp_path: Path):
    bundle = uncached(unbroken, tmp_path / "bundle")
    log = tmp_path / "log.txt"
    bundle.latents("--log_file", str(log))
    lines = [line for line in log.read_text().splitlines() if " latents " in line and "/70" in line]
    assert 1 <= len(lines) <= 4
    assert "70/70" in lines[-1]
    assert "left" not in lines[-1]


def test_the_bar_of_a_terminal_shows_any_file_name(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with progress("latents", 1) as advance:
        advance(1, "a[/b] [red].jpg")
    assert "1/1" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "a[/b] [red].jpg" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_the_report_counts_what_came_from_the_cache(bundle: Bundle):
    counts = bundle.latents()
    assert counts["found"] == {"valid": 0, "stale": 0, "missing": 4, "corrupt": 0}
    assert counts["why"] == {"not encoded yet": 4}
    counts = bundle.latents()
    assert (counts["from_cache"], counts["computed"], counts["why"]) == (4, 0, {})
