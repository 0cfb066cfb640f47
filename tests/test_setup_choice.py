"""Which PyTorch a machine gets, what its drivers say, and what failures of pip mean."""

import os

import pytest

from wangen.generator.errors import WangenError
from wangen.generator.setup.hardware import Hardware, look
from wangen.generator.setup.installing import explain
from wangen.generator.setup.torch_choice import Build, Installed, Wanted, choose
from wangen.profiles import platform, platform_names

BUILDS = [Build.parse(text) for text in ("cu130=13.0", "cu128=12.8", "cu126=12.0")]
CPU = Installed("2.12.0+cpu", "cpu")
CUDA = Installed("2.11.0+cu128", "cuda", (12, 8))


def nvidia(cuda, capability=None):
    return Hardware(driver="1", cuda=cuda, cards=("card",), capability=capability)


@pytest.mark.parametrize("name", platform_names())
def test_the_builds_of_every_platform_are_understood(name):
    builds = platform(name).torch_builds
    assert builds[0].tag != "cpu"
    for build in builds:
        made = Build.parse(f"{build.tag}={build.driver}" if build.driver else build.tag)
        assert made.index.endswith(build.tag)
        assert ".".join(map(str, made.driver or ())) == build.driver


@pytest.mark.parametrize(
    ("hardware", "index", "kind"),
    [
        (nvidia((13, 2), (12, 0)), "cu130", "cuda"),
        (nvidia((13, 0)), "cu130", "cuda"),
        (nvidia((12, 9), (9, 0)), "cu128", "cuda"),
        (nvidia((12, 2), (8, 0)), "cu126", "cuda"),
        (nvidia((13, 0), (7, 0)), "cu126", "cuda"),
        (nvidia(None), "cu130", "cuda"),
        (Hardware(), "cpu", ""),
        (Hardware(trouble="no driver"), "cpu", ""),
    ],
)
def test_cuda(hardware, index, kind):
    wanted = choose(BUILDS, "cuda", "linux", hardware, "")
    assert (wanted.index.rpartition("/")[2], wanted.kind) == (index, kind)


def test_who_has_no_nvidia_card_is_told_what_to_do():
    reasons = [
        choose(BUILDS, "cuda", "linux", hardware, "").reason for hardware in (Hardware(), Hardware(amd="gfx1100"))
    ]
    assert "nvidia.com/drivers" in reasons[0]
    assert "--platform linux-rocm" in reasons[1]
    assert "nvidia" not in reasons[1]


@pytest.mark.parametrize(
    ("index", "hardware", "kind"),
    [
        ("https://mirror/whl/cu121/", Hardware(), "cuda"),
        ("https://mirror/whl/cpu", nvidia((13, 0)), "cpu"),
        ("https://mirror/whl/rocm6.4", Hardware(), "rocm"),
        ("https://mirror/simple", nvidia((11, 0)), "cuda"),
        ("https://mirror/simple", Hardware(), ""),
    ],
)
def test_an_index_of_the_users(index, hardware, kind):
    wanted = choose(BUILDS, "cuda", "slurm", hardware, index)
    assert (wanted.index, wanted.kind) == (index, kind)


@pytest.mark.parametrize("hardware", [nvidia((11, 8)), nvidia((12, 0), (12, 0)), nvidia((13, 0), (3, 5))])
def test_no_build_fits(hardware):
    with pytest.raises(WangenError):
        choose(BUILDS, "cuda", "linux", hardware, "")


@pytest.mark.parametrize(
    ("found", "hardware", "kind", "why"),
    [
        (CUDA, nvidia((12, 8)), "cuda", ""),
        (CUDA, nvidia((12, 4), (8, 9)), "cuda", ""),
        (CUDA, Hardware(), "", ""),
        (CPU, Hardware(), "", ""),
        (CPU, nvidia((12, 8)), "cuda", "built for cpu"),
        (CUDA, Hardware(), "rocm", "built for cuda"),
        (CUDA, nvidia((13, 0), (6, 1)), "cuda", "no code for this card"),
        (Installed("2.9.0+cu130", "cuda", (13, 0)), nvidia((12, 8)), "cuda", "driver for CUDA 13.0"),
        (Installed("2.5.1+cu124", "cuda", (12, 4)), nvidia((12, 8)), "cuda", "needs 2.6"),
        (Installed("2.10.0", "rocm"), Hardware(), "rocm", ""),
    ],
)
def test_what_is_installed_stays_while_it_will_do(found, hardware, kind, why):
    said = Wanted("https://x", kind, hardware, "").against(found, (2, 6))
    assert (why in said) if why else (said == "")


def test_version_files_of_real_builds():
    text = "from typing import Optional\n\n__all__ = ['__version__', 'cuda']\n__version__ = '2.9.1+rocm6.4'\n"
    text += (
        "cuda: Optional[str] = None\ngit_version = 'abc'\nhip: Optional[str] = '6.4.43482'\nxpu: Optional[str] = None\n"
    )
    assert Installed.read("2.9.1+rocm6.4", text) == Installed("2.9.1+rocm6.4", "rocm")
    assert Installed.read("2.9.1", "") is None


@pytest.mark.skipif(os.name == "nt", reason="the tools are scripts")
@pytest.mark.parametrize(
    ("table", "code", "seen"),
    [
        ("| NVIDIA-SMI 552.22   Driver Version: 552.22   CUDA Version: 12.6 |", 0, ("552.22", (12, 6), "")),
        ("| NVIDIA-SMI 610.47   KMD Version: 610.47   CUDA UMD Version: 13.3 |", 0, ("610.47", (13, 3), "")),
        ("| NVIDIA-SMI 552.22   Driver Version: 552.22   CUDA Version: N/A |", 0, ("552.22", None, "")),
        ("NVIDIA-SMI has failed", 9, ("", None, "NVIDIA-SMI has failed")),
    ],
)
def test_the_tables_of_nvidia_smi(tmp_path, monkeypatch, table, code, seen):
    cards = "NVIDIA GeForce GTX 1080, 6.1\nNVIDIA GeForce RTX 5090, 12.0"
    script = f"#!/bin/sh\n[ $# -eq 0 ] && echo '{table}' || echo '{cards}'\nexit {code}\n"
    for name, text in (("nvidia-smi", script), ("rocminfo", "#!/bin/sh\necho '  Name:  gfx1201'\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hardware = look()
    assert (hardware.driver, hardware.cuda, hardware.trouble) == seen
    assert hardware.amd == "gfx1201"
    assert hardware.capability == (None if code else (12, 0))
    assert len(hardware.cards) == (0 if code else 2)


@pytest.mark.parametrize(
    ("errors", "cure"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("NewConnectionError(...)\nERROR: No matching distribution found for torch", "index cannot be reached"),
        ("ERROR: No matching distribution found for torch>=2.9", "there is no PyTorch for this Python"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate in chain", "PIP_CERT"),
        ("[WinError 5] Access is denied: 'c:\\\\venv\\\\torch_cpu.dll'", "a file is in use"),
        ('OSError: [WinError 126] Error loading "c10.dll"', "Visual C++"),
        ("ERROR: No matching distribution found for torchao", ""),
    ],
)
def test_failures_are_explained(errors, cure):
    assert (cure in explain(errors)) if cure else (explain(errors) == "")
