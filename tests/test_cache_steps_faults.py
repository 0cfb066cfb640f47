"""The caching steps when they are killed, interrupted, refused by the disk or given bad files."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_bundle import CLIP, Bundle, entry_files, uncached
from tiny_set import CACHES, copy, kept, leftovers, lines_of, make_set, run_all

from wangen.generator.cli import main
from wangen.generator.errors import WAS_STOPPED
from wangen.runtime import encoding
from wangen.runtime.cache import Folder
from wangen.runtime.media import target_frames
from wangen.runtime.samples import Sample

pytest_plugins = ("bundle_fixtures", "tiny_set_fixtures")
pytestmark = pytest.mark.usefixtures("one_thread")
LINUX_ROOT = sys.platform == "linux" and os.geteuid() == 0


# Killed, interrupted, refused by the disk

KILL_AT_COMMIT = """
import os, signal, sys
from wangen.generator.cli import main
from wangen.runtime.cache.writer import Writer
commit, left = Writer.commit, [int(sys.argv[1])]
def killing(self):
    if self._pending and not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= bool(self._pending)
    commit(self)
Writer.commit = killing
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.slow
def test_killed_before_a_commit_it_loses_that_group_and_ends_with_the_same_bytes(unbroken: Bundle, tmp_path: Path):
    bundle = uncached(unbroken, tmp_path / "bundle")
    for line in (bundle.latents_line(), bundle.text_line()):
        killed = subprocess.run([sys.executable, "-c", KILL_AT_COMMIT, "1", *line], capture_output=True)
        assert killed.returncode == -signal.SIGKILL
    left = len(bundle.entries())
    assert 2 <= left <= 32 + 64  # the first group of each kind
    assert bundle.latents()["computed"] + bundle.text()["computed"] == 141 - left
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
        assert process.returncode == WAS_STOPPED, message
        assert message.count("stopped.") == 1
        assert "Traceback" not in message
        assert 7 <= len(bundle.entries()) <= 70  # of the eight files that were seen the last may not be whole
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
    assert bundle.latents()["computed"] + bundle.text()["computed"] == 141 - kept
    assert bundle.check("--deep") == 0


def fill_but(disk: Path, num_pages: int) -> Path:
    """Fill a disk but for so many pages; returns the file to remove again."""
    ballast = disk / "ballast"
    ballast.write_bytes(bytes((os.statvfs(disk).f_bavail - num_pages) * os.sysconf("SC_PAGE_SIZE")))
    return ballast


def full_at(bundle: Bundle, disk: Path, num_pages: int, capsys: pytest.CaptureFixture[str]) -> bool:
    """Run both steps with so much room, then with enough; returns whether a step failed for want of it."""
    ballast = fill_but(disk, num_pages)
    codes = []
    for line in lines_of(bundle, ()):
        capsys.readouterr()
        codes.append(main(line))
        message = capsys.readouterr().err
        assert message.count("No space left on device") == codes[-1]
        assert codes[-1] == 0 or "free space" in message
        assert leftovers(bundle) == []
        for cache in CACHES:
            assert not Folder(bundle.folder / cache, deep=True).damaged
    kept_so_far = len(bundle.files())
    ballast.unlink()
    bundle.latents()
    bundle.text()
    assert len(bundle.files()) >= kept_so_far
    assert bundle.check("--deep") == 0
    return any(codes)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("points", [(0, 13, 21), pytest.param(range(60), marks=pytest.mark.slow)])
def test_a_disk_that_is_full_at_any_moment(
    small_disk: Path,
    weights: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    points: Sequence[int],
):
    """For the first notes, in the middle of a group, for the last notes and the index: what was made stays."""
    whole = make_set(tmp_path / "whole", weights)
    assert run_all(lines_of(whole, ()))() == 0
    bundle = copy(whole, tmp_path / "bundle")
    failed = []
    for num_pages in points:
        for cache in CACHES:
            shutil.rmtree(small_disk / cache, ignore_errors=True)
            (small_disk / cache).mkdir()
            if not (bundle.folder / cache).is_symlink():
                shutil.rmtree(bundle.folder / cache)
                (bundle.folder / cache).symlink_to(small_disk / cache, target_is_directory=True)
        failed.append(full_at(bundle, small_disk, num_pages, capsys))
        assert kept(bundle) == kept(whole)
        assert leftovers(bundle) == []
    assert failed[0]
    assert len(points) < 10 or not failed[-1]


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
        (b"", "the file is empty"),
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


def test_what_is_refused_before_its_first_entry_leaves_the_cache_as_it_was(bundle: Bundle, capsys):
    bundle.latents()
    bundle.text()
    check = ["check_cache", "--dataset_config", str(bundle.toml)]
    assert main(check) == 0
    assert main(bundle.latents_line("--decoder", "pynvvideocodec")) == 2
    assert "pynvvideocodec" in capsys.readouterr().err
    assert main(check) == 0, capsys.readouterr().out


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


def test_a_picture_that_is_none_is_answered_with_the_cure(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    (bundle.photos / "coffee.jpg").write_bytes(b"\xff\xd8\xff" + bytes(100))
    assert main(bundle.latents_line()) == 1
    assert "coffee.jpg: cannot be read as an image; replace it or take it out\n" in capsys.readouterr().err


def test_a_clip_too_short_is_named(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    bundle.toml.write_text(bundle.toml.read_text().replace("[5]", "[801]"))
    assert main(bundle.latents_line()) == 1
    message = capsys.readouterr().err
    assert f"{CLIP}.mp4: has" in message
    assert "801" in message


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.slow
def test_a_picture_that_is_edited_under_way_never_gets_the_entry_of_what_it_was(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], same: bool
):
    cat = bundle.photos / "cat.jpg"
    before = cat.read_bytes()

    def edited(sample: Sample, **more: Any) -> Any:
        if sample.item.path == cat:
            cat.write_bytes(before if same else (bundle.photos / "coffee.jpg").read_bytes())
        return target_frames(sample, **more)

    with monkeypatch.context() as patch:
        patch.setattr(encoding, "target_frames", edited)
        assert main(bundle.latents_line()) == (0 if same else 1)
    assert ("the file changed while it was being encoded" in capsys.readouterr().err) != same
    cat.write_bytes(before)
    bundle.latents()
    assert bundle.check("--deep") == 1  # no texts yet
    made = bundle.files()
    bundle.latents("--recache")
    assert bundle.files() == made
