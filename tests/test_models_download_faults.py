"""`wangen models download` when a connection, a process, bytes or a disk fail on the way; the next run goes on."""

import hashlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers import read_tree
from hub_files import FILES, FP8_NAME, LARGE, MIB, T5_FP8, left
from local_hub import Hub, download, running, start

from wangen.generator.errors import WAS_STOPPED

pytestmark = pytest.mark.slow

pytest_plugins = ("hub_fixtures",)

NUM_CHUNK_BYTES = 10 * MIB
"""huggingface_hub hands on what has arrived in pieces of this size."""


def ranges(hub: Hub) -> list[str | None]:
    return [asked.range for asked in hub.bodies()]


def test_a_connection_that_drops_is_made_anew_and_goes_on(tmp_path, large):
    large.cut_at[T5_FP8] = [12 * MIB, 24 * MIB]
    done = download(large.endpoint, tmp_path, FP8_NAME)
    assert done.returncode == 0, done.stderr
    assert ranges(large) == [None, f"bytes={NUM_CHUNK_BYTES}-", f"bytes={2 * NUM_CHUNK_BYTES}-"]
    assert read_tree(tmp_path / "models") == {FP8_NAME: LARGE}


def test_a_download_that_gave_up_is_gone_on_with_by_the_next_run(tmp_path, large):
    large.cut_at[T5_FP8] = [12 * MIB] + [0] * 50
    process = start(large.endpoint, tmp_path, FP8_NAME)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, out
    assert "the connection to" in err
    assert "run the same line again" in err
    (part,) = left(tmp_path / "models")
    assert part.startswith(f".{FP8_NAME}.")
    assert (tmp_path / "models" / part).read_bytes() == LARGE[:NUM_CHUNK_BYTES]

    large.cut_at.clear()
    large.asked.clear()
    done = download(large.endpoint, tmp_path, FP8_NAME)
    assert done.returncode == 0, done.stderr
    assert "10.5 MB of it are here" in done.stdout
    assert ranges(large) == [f"bytes={NUM_CHUNK_BYTES}-"]
    assert read_tree(tmp_path / "models") == {FP8_NAME: LARGE}


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT"])
def test_a_process_that_is_ended_in_the_middle_goes_on_when_run_again(tmp_path, large, number):
    large.stall_at[T5_FP8] = 21 * MIB
    process = start(large.endpoint, tmp_path, FP8_NAME)
    assert large.stalled.wait(60)
    part = wait_for_part(tmp_path / "models", 2 * NUM_CHUNK_BYTES)
    process.send_signal(getattr(signal, number))
    _, err = process.communicate(timeout=60)
    assert process.returncode == (WAS_STOPPED if number == "SIGINT" else -signal.SIGKILL)
    assert ("run the same line again" in err) == (number == "SIGINT"), err
    assert "Traceback" not in err
    assert part.read_bytes() == LARGE[: 2 * NUM_CHUNK_BYTES]
    assert not (tmp_path / "models" / FP8_NAME).exists()

    large.stall_at.clear()
    large.released.set()
    large.asked.clear()
    done = download(large.endpoint, tmp_path, FP8_NAME)
    assert done.returncode == 0, done.stderr
    assert ranges(large) == [f"bytes={2 * NUM_CHUNK_BYTES}-"]
    assert read_tree(tmp_path / "models") == {FP8_NAME: LARGE}


def wait_for_part(folder: Path, num_bytes: int) -> Path:
    """The partial file, once it has this size."""
    for _ in range(600):
        for part in folder.glob(".*.part"):
            if part.stat().st_size >= num_bytes:
                return part
        time.sleep(0.05)
    raise AssertionError(f"no partial file of {num_bytes} bytes: {left(folder)}")


def test_wrong_bytes_are_refused_and_leave_nothing(tmp_path, large):
    large.sent[T5_FP8] = LARGE[:-1] + b"x"
    done = download(large.endpoint, tmp_path, FP8_NAME)
    assert done.returncode == 1
    assert "arrived wrong" in done.stderr
    assert hashlib.sha256(LARGE).hexdigest() in done.stderr
    assert left(tmp_path / "models") == []


@pytest.mark.parametrize("extra", [-1, 7])
def test_another_length_than_announced_is_refused(tmp_path, large, extra):
    large.sent[T5_FP8] = LARGE[:-1] if extra < 0 else LARGE + b"x" * extra
    done = download(large.endpoint, tmp_path, FP8_NAME)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "models" / FP8_NAME).exists()


def test_a_small_file_is_verified_too(tmp_path):
    name = next(name for name in FILES if name.endswith("special_tokens_map.json"))
    with running(FILES) as hub:
        hub.sent[name] = FILES[name].replace(b"pad", b"bad")
        done = download(hub.endpoint, tmp_path, "tokenizer")
    assert done.returncode == 1
    assert "arrived wrong" in done.stderr
    assert not (tmp_path / "models/google/umt5-xxl/special_tokens_map.json").exists()


def test_a_wrong_beginning_of_an_earlier_run_is_fetched_again(tmp_path, large):
    part = tmp_path / "models" / f".{FP8_NAME}.{hashlib.sha256(LARGE).hexdigest()[:16]}.part"
    part.parent.mkdir()
    part.write_bytes(b"\0" * NUM_CHUNK_BYTES)
    done = download(large.endpoint, tmp_path, FP8_NAME)
    assert done.returncode == 0, done.stderr
    assert "fetching all of it again" in done.stdout
    assert ranges(large) == [f"bytes={NUM_CHUNK_BYTES}-", None]
    assert read_tree(tmp_path / "models") == {FP8_NAME: LARGE}


def test_a_server_that_cannot_go_on_in_the_middle(tmp_path, large):
    large.ignores_ranges = True
    part = tmp_path / "models" / f".{FP8_NAME}.{hashlib.sha256(LARGE).hexdigest()[:16]}.part"
    part.parent.mkdir()
    part.write_bytes(LARGE[:NUM_CHUNK_BYTES])
    done = download(large.endpoint, tmp_path, FP8_NAME)
    assert done.returncode == 0, done.stderr
    assert read_tree(tmp_path / "models") == {FP8_NAME: LARGE}


def test_the_parts_of_an_older_version_are_removed(tmp_path, large):
    old = tmp_path / "models" / f".{FP8_NAME}.0123456789abcdef.part"
    old.parent.mkdir()
    old.write_bytes(b"old")
    other = old.with_name(".another.safetensors.0123456789abcdef.part")
    other.write_bytes(b"other")
    assert download(large.endpoint, tmp_path, FP8_NAME).returncode == 0
    assert left(tmp_path / "models") == [other.name, FP8_NAME]


def test_only_one_download_into_a_folder_at_a_time(tmp_path, large):
    large.stall_at[T5_FP8] = 11 * MIB
    first = start(large.endpoint, tmp_path, FP8_NAME)
    try:
        assert large.stalled.wait(60)
        second = download(large.endpoint, tmp_path, FP8_NAME)
    finally:
        first.kill()
        first.communicate(timeout=60)
    assert second.returncode == 1
    assert "another download into this folder is under way" in second.stderr


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 30 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(folder)]
    if os.name == "nt" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no small file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_too_little_space_is_said_before_anything_is_fetched(tmp_path, large, small_disk):
    (small_disk / "filler").write_bytes(b"x" * 10 * MIB)
    done = download(large.endpoint, tmp_path, FP8_NAME, "--dir", str(small_disk))
    assert done.returncode == 1
    assert "26.2 MB are to be fetched, 21.0 MB are free" in done.stderr
    assert large.bodies() == []


def test_a_disk_that_fills_up_on_the_way_is_said_and_gone_on_with(tmp_path, large, small_disk):
    large.stall_at[T5_FP8] = 11 * MIB
    process = start(large.endpoint, tmp_path, FP8_NAME, "--dir", str(small_disk))
    assert large.stalled.wait(60)
    part = wait_for_part(small_disk, NUM_CHUNK_BYTES)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 12 * MIB)
    large.stall_at.clear()
    large.released.set()  # the connection breaks, and the next one brings more than there is room for
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, out
    assert f"no space is left for {FP8_NAME}" in err
    assert "run the same line again" in err
    assert part.read_bytes() == LARGE[: part.stat().st_size]

    filler.unlink()
    done = download(large.endpoint, tmp_path, FP8_NAME, "--dir", str(small_disk))
    assert done.returncode == 0, done.stderr
    assert (small_disk / FP8_NAME).read_bytes() == LARGE
