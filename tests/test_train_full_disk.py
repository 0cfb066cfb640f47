"""A disk that fills up while a run saves: one message, nothing lost, and with room again the same bytes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from train_cases import Cases, at_step, contents, make_cases, measured

from wangen.generator.errors import WangenError
from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.training import checkpoint

LINUX_ROOT = sys.platform == "linux" and os.geteuid() == 0
DISK = 16 << 20
KIB_OF_ROOM = (0, 300)
MORE_KIB_OF_ROOM = (4, 16, 60, 120, 180, 240, 360, 420, 480, 540, 600, 660, 720, 800, 900)
"""A state of this run takes about 0.9 MiB: weights, two moments and averages, each 0.2; so does each of two LoRAs."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return make_cases(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real file system of 16 MiB."""
    if not LINUX_ROOT:
        pytest.skip("mounting a tiny file system needs Linux and root")
    folder = tmp_path_factory.mktemp("disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this container may not mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="module")
def whole(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train.run(options_of(cases, folder))
    return folder


def options_of(cases: Cases, folder: Path) -> Train:
    return cases.options(folder, max_train_steps=6, save_every_n_steps=2, keep_last=1, ema_decay=0.9)


def fill_but(disk: Path, room: int) -> None:
    """Fill a disk but for so many bytes."""
    (disk / "ballast").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - room))


def fails_and_goes_on(cases: Cases, disk: Path, whole: Path, kib: int) -> bool:
    """Let the disk be full from the fourth step on; returns whether the run stopped for it."""
    options = options_of(cases, disk / f"run-{kib}")
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 3, lambda: fill_but(disk, kib << 10))
        said = ""
        try:
            train.run(options)
        except WangenError as error:
            said = str(error)
    assert not said or ("No space left on device" in said and "free space" in said)
    assert sorted(disk.rglob(".*")) == [], "nothing half written stays"
    newest = checkpoint.newest(options.output_dir / "lora-state")
    assert newest
    kept = checkpoint.read(newest).step
    assert kept >= 2, "what was saved before is there"
    (disk / "ballast").unlink()
    report = train.run(options)
    assert report.result.get("steps_this_run", 0) == 6 - kept
    assert contents(options.output_dir) == contents(whole)
    assert measured(options.output_dir) == measured(whole)
    subprocess.run(["rm", "-r", options.output_dir], check=True)
    return bool(said)


@pytest.mark.parametrize("kib", KIB_OF_ROOM)
@pytest.mark.slow
def test_a_disk_that_fills_up_loses_nothing(cases: Cases, disk: Path, whole: Path, kib: int):
    assert fails_and_goes_on(cases, disk, whole, kib)


@pytest.mark.slow
def test_a_disk_that_fills_up_at_any_place_loses_nothing(cases: Cases, disk: Path, whole: Path):
    failed = [fails_and_goes_on(cases, disk, whole, kib) for kib in MORE_KIB_OF_ROOM]
    assert sum(failed) >= 12


def test_a_disk_too_small_for_the_checkpoints_is_refused_before_the_model_loads(
    cases: Cases, disk: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("wangen.runtime.train.load_trainee", lambda *_words: pytest.fail("the model was loaded"))
    options = replace(options_of(cases, disk / "small"), network_dim=64)
    with pytest.raises(WangenError, match=r"the checkpoints need up to .* [GM]B"):
        train.run(options)
