"""The caching steps when they are killed, interrupted, refused by the disk or given bad files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_bundle import CLIP, Bundle, entry_files, uncached

from wangen.generator.cli import main
from wangen.runtime.cache import Folder

pytest_plugins = ("bundle_fixtures",)
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
    assert bundle.latents()["computed"] + bundle.text()["computed"] == 141 - kept
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
