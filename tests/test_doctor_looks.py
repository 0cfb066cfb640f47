"""How the doctor reads what a machine says: the drivers' tools, control groups, mounts, folders of cloud services."""

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

import psutil
import pytest
from helpers import write_tree

from wangen.generator.doctor import places
from wangen.generator.doctor.facts import Place
from wangen.generator.doctor.places import Mount, cloud_of, cloud_of_names, mount_of
from wangen.generator.doctor.system import look_at_memory, memory_limit
from wangen.generator.setup import hardware
from wangen.generator.setup.hardware import Card

MIB, GIB = 2**20, 2**30
posix = pytest.mark.skipif(os.name == "nt", reason="the tools are scripts, the paths Linux's")


def nvidia_smi(folder, monkeypatch, cards, programs, code=0):
    """An `nvidia-smi` that answers the two questions with these texts."""
    tool = folder / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\ncase $1 in\n--query-gpu=*) cat <<'END'\n{cards}\nEND\n;;\n"
        f"*) cat <<'END'\n{programs}\nEND\n;;\nesac\nexit {code}\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@posix
@pytest.mark.parametrize(
    ("line", "card"),
    [
        (
            "NVIDIA GeForce RTX 4090, 8.9, 24564, 1187, WDDM, 16, 16",
            Card("NVIDIA GeForce RTX 4090", (8, 9), 24564 * MIB, 1187 * MIB, "WDDM", 16, 16),
        ),
        (
            "NVIDIA H100 80GB HBM3, 9.0, 81559, 4, [N/A], 16, 16",
            Card("NVIDIA H100 80GB HBM3", (9, 0), 81559 * MIB, 4 * MIB, "", 16, 16),
        ),
        ("NVIDIA GB10, 12.1, [N/A], [N/A], [N/A], [N/A], [N/A]", Card("NVIDIA GB10", (12, 1))),
        (
            "Quadro, of 1999, [Not Supported], 512, 3, [N/A], 1, 16",
            Card("Quadro, of 1999", None, 512 * MIB, 3 * MIB, "", 1, 16),
        ),
    ],
)
def test_cards_as_nvidia_smi_lists_them(tmp_path, monkeypatch, line, card):
    nvidia_smi(tmp_path, monkeypatch, line, "")
    assert hardware.cards() == (card,)


@posix
def test_programs_on_the_card(tmp_path, monkeypatch):
    text = "C:\\Program Files\\ComfyUI\\python.exe, [N/A]\n/home/ann/venv/bin/python, 9216\n[Not Found], 12"
    nvidia_smi(tmp_path, monkeypatch, "", text)
    assert hardware.programs() == (("python.exe", None), ("python", 9216 * MIB), ("[Not Found]", 12 * MIB))


@posix
@pytest.mark.parametrize(
    "said",
    [
        'Field "compute_cap" is not a valid field to query.',
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "Unable to determine the device handle for GPU0000:01:00.0: Unknown Error",
        "",
    ],
)
def test_a_tool_that_fails_lists_nothing(tmp_path, monkeypatch, said):
    nvidia_smi(tmp_path, monkeypatch, said, said, code=6)
    assert (hardware.cards(), hardware.programs()) == ((), ())


@pytest.mark.parametrize(
    ("tree", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "17179869184\n"}, 16 * GIB),
        (
            {
                "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
                "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/memory.max": "34359738368",
                "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/memory.max": "max",
            },
            32 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "12:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n0::/system.slice\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "8589934592\n",
            },
            8 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/user.slice\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/user.slice/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "nonsense\n0::/../..\n", "sys/fs/cgroup/memory.max": "x"}, None),
    ],
    ids=["none", "unlimited", "docker", "slurm", "docker of the first version", "no limit of it", "nonsense"],
)
def test_limits_of_control_groups(tmp_path, tree, limit):
    assert memory_limit(write_tree(tmp_path / "root", tree)) == limit


def test_memory_that_the_system_does_not_tell(monkeypatch):
    def fails():
        raise KeyError(b"MemTotal:")

    monkeypatch.setattr(psutil, "virtual_memory", fails)
    assert look_at_memory().total == 0
    assert look_at_memory().processors > 0


WSL = [
    Mount("/", "ext4", ("rw", "relatime", "discard", "errors=remount-ro", "data=ordered")),
    Mount("/usr/lib/wsl/drivers", "9p", ("ro", "dirsync", "nosuid", "nodev", "noatime", "aname=drivers")),
    Mount("/mnt/c", "9p", ("rw", "noatime", "dirsync", r"aname=drvfs;path=C:\;uid=1000;gid=1000;symlinkroot=/mnt/")),
    Mount("/mnt/wsl", "tmpfs", ("rw", "relatime")),
]


@posix
def test_mounts_of_wsl():
    assert mount_of("/mnt/c/AI/cats", WSL).file_system == "9p"
    assert mount_of("/home/ann", WSL).file_system == "ext4"
    assert mount_of("/home", [*WSL, Mount("/", "overlay", ("rw",))]).file_system == "overlay"
    assert mount_of("/home", []) == Mount("", "", ())


def test_drives_and_shares_of_windows():
    drives = [Mount("C:\\", "ntfs", ("rw", "fixed")), Mount("D:\\", "fat32", ("rw", "removable"))]
    assert mount_of(r"d:\AI\cats", drives, windows=True).file_system == "fat32"
    share = mount_of(r"\\nas\photos\cats", drives, windows=True)
    assert (share.point, share.file_system) == ("\\\\nas\\photos\\", "network")


@pytest.mark.parametrize(
    ("path", "service"),
    [
        (PureWindowsPath(r"C:\Users\Ann\OneDrive\cats"), "OneDrive"),
        (PureWindowsPath(r"C:\Users\Ann\OneDrive - Contoso Ltd\cats"), "OneDrive"),
        (PureWindowsPath(r"C:\Users\Ann\iCloudDrive\cats"), "iCloud Drive"),
        (PureWindowsPath(r"C:\Users\Ann\Dropbox (Personal)"), "Dropbox"),
        (PureWindowsPath(r"G:\My Drive\cats"), "Google Drive"),
        (PurePosixPath("/home/ann/Nextcloud/cats"), "Nextcloud"),
        (PurePosixPath("/mnt/c/Users/Ann/OneDrive/cats"), "OneDrive"),
        (PurePosixPath("/home/ann/onedriveless/boxes/mega"), ""),
    ],
)
def test_folders_of_cloud_services_by_name(path, service):
    assert cloud_of_names(path) == service


def test_a_folder_that_syncthing_keeps_or_that_onedrive_has_under_another_name(tmp_path, monkeypatch):
    folder = tmp_path / "shared" / "cats"
    folder.mkdir(parents=True)
    assert cloud_of(folder) == ""
    monkeypatch.setenv("OneDriveCommercial", str(tmp_path / "shared"))
    assert cloud_of(folder) == "OneDrive"
    monkeypatch.delenv("OneDriveCommercial")
    (tmp_path / "shared" / ".stfolder").mkdir()
    assert cloud_of(folder) == "Syncthing"


def test_measuring_a_disk_leaves_nothing(tmp_path, monkeypatch):
    write, read = places.measure(tmp_path)
    assert write
    assert write > 1e6
    assert read is None or read > 1e6
    assert not list(tmp_path.iterdir())

    def fails(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    assert places.measure(tmp_path) == (None, None)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = places.look(Place(what="bundle", path=tmp_path, wanted=tmp_path / "published" / "linux"))
    assert (found.writable, found.write_rate, found.path) == (False, None, tmp_path)


def test_nothing_is_written_where_a_cloud_service_looks(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "measure", lambda folder: 1 / 0)
    folder = tmp_path / "Dropbox"
    folder.mkdir()
    found = places.look(Place(what="bundle", path=folder, wanted=folder))
    assert (found.cloud, found.write_rate) == ("Dropbox", None)


def test_a_disk_is_measured_once(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(places, "measure", lambda folder: measured.append(folder) or (1e9, 2e9))
    rated = {}
    for name in ("a", "b"):
        place = places.look(Place(what=name, path=tmp_path / name, wanted=tmp_path / name), rated)
        assert (place.write_rate, place.read_rate) == (1e9, 2e9)
    assert measured == [Path(tmp_path)]
