"""Which build of PyTorch a machine gets, and whether the one that it has will do."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wangen.generator.errors import WangenError
from wangen.generator.setup.hardware import Hardware, Version
from wangen.profiles import TORCH_INDEX

_TAG = re.compile(r"(cu|rocm|cpu)([0-9.]*)")
_KINDS = {"cu": "cuda", "rocm": "rocm", "cpu": "cpu"}
_DRIVER_CURE = (
    "install the newest driver from nvidia.com/drivers (under WSL: in Windows) and run this script again, or set"
    " WANGEN_TORCH_INDEX to the index of a build that fits"
)


@dataclass(frozen=True)
class Build:
    """A build that the platform's profile offers.

    Attributes:
        index: its wheel index.
        driver: least CUDA version that the driver must offer; None where none is asked.
    """

    index: str
    driver: Version | None = None

    @classmethod
    def parse(cls, text: str) -> "Build":
        """The build that `cu128=12.8`, `rocm7.2` or `https://…/` names.

        >>> Build.parse("cu128=12.8")
        Build(index='https://download.pytorch.org/whl/cu128', driver=(12, 8))
        """
        found = re.fullmatch(r"(.*)=(\d+)\.(\d+)", text)
        tag = found[1] if found else text
        index = tag if "://" in tag else f"{TORCH_INDEX}/{tag}"
        return cls(index, (int(found[2]), int(found[3])) if found else None)


@dataclass(frozen=True)
class Installed:
    """An installed PyTorch: its version as pip knows it, and what it was built for."""

    version: str
    kind: str
    cuda: Version | None = None

    @classmethod
    def read(cls, version: str, text: str) -> "Installed | None":
        """From its version and the text of its `torch/version.py`; None when one of them is missing.

        pip's version can lack the build: what PyPI's 2.9.1 calls itself is 2.9.1+cu128.

        >>> Installed.read("2.9.1", "cuda: Optional[str] = '12.8'; hip: Optional[str] = None")
        Installed(version='2.9.1', kind='cuda', cuda=(12, 8))
        """
        if not version or not text:
            return None
        values = dict(re.findall(r"\b(cuda|hip)\b[^=\n;]*= *['\"]([^'\"]+)['\"]", text))
        cuda = re.match(r"(\d+)\.(\d+)", values.get("cuda", ""))
        kind = "cuda" if cuda else "rocm" if "hip" in values else "cpu"
        return cls(version, kind, (int(cuda[1]), int(cuda[2])) if cuda else None)


@dataclass(frozen=True)
class Wanted:
    """The PyTorch that a machine shall have.

    Attributes:
        index: where it comes from: an index, or a folder of wheels.
        kind: `cuda`, `rocm` or `cpu`; empty when one that is installed will do, whatever it was built for.
        hardware: the machine.
        reason: what is said about it.
    """

    index: str
    kind: str
    hardware: Hardware
    reason: str

    @property
    def words(self) -> list[str]:
        """The options for the index, as pip takes them."""
        if self.index.startswith("file:") or Path(self.index).is_dir():
            return ["--no-index", "--find-links", self.index]
        return ["--index-url", self.index]

    @property
    def name(self) -> str:
        """What pip is asked for. In AMD's own index the kernels of each card are packages of their own."""
        return "torch[device-all]" if self.kind == "rocm" and not _tag(self.index) else "torch"

    def against(self, found: Installed, minimum: Version) -> str:
        """Why an installed PyTorch will not do; empty when it will."""
        version = re.match(r"(\d+)\.(\d+)", found.version)
        if not version or (int(version[1]), int(version[2])) < minimum:
            return "wangen needs {}.{} or newer".format(*minimum)
        if self.kind and found.kind != self.kind:
            return f"it is built for {found.kind}, and {self.kind} is wanted here"
        if found.cuda and self.hardware.cuda and found.cuda[0] > self.hardware.cuda[0]:
            return "it needs a driver for CUDA {}.{}".format(*found.cuda)
        if found.cuda and not _serves(found.cuda, self.hardware.capability):
            return "it has no code for this card"
        return ""


def choose(builds: Sequence[Build], accelerator: str, kind: str, hardware: Hardware, own_index: str) -> Wanted:
    """The PyTorch for a machine.

    Args:
        builds: what the profile offers, newest first.
        accelerator: `cuda`, `rocm` or `cpu`, as the profile says.
        kind: the platform's kind; on a cluster (`slurm`) this may be a machine without the cards.
        hardware: what the machine has.
        own_index: an index or a folder that the user names instead; empty for none.

    Raises:
        WangenError: the driver is too old for every build, no build serves the card, or no card can be seen from here.
    """
    card = hardware.driver if accelerator == "cuda" else accelerator == "rocm"
    if own_index:
        named = _tag(own_index)
        built_for = _KINDS[named[1]] if named else accelerator if card else ""
        return Wanted(own_index, built_for, hardware, f"PyTorch comes from {own_index} (WANGEN_TORCH_INDEX)")
    if accelerator == "cpu" or not card:
        return _without_card(accelerator, kind, hardware)
    if accelerator == "rocm":
        return Wanted(builds[0].index, "rocm", hardware, f"PyTorch for ROCm comes from {builds[0].index}")
    runs = [b for b in builds if not b.driver or not hardware.cuda or b.driver <= hardware.cuda]
    fits = [b for b in runs if _serves(_cuda_of(b.index), hardware.capability)]
    if not fits:
        raise _unfit(builds, runs, hardware)
    return Wanted(fits[0].index, "cuda", hardware, f"PyTorch for this driver and card comes from {fits[0].index}")


def _without_card(accelerator: str, kind: str, hardware: Hardware) -> Wanted:
    index = f"{TORCH_INDEX}/cpu"
    if accelerator == "cpu":
        return Wanted(index, "", hardware, f"PyTorch for the CPU comes from {index}")
    if kind == "slurm":
        raise WangenError(
            "no NVIDIA driver here, so that the right PyTorch cannot be chosen",
            cure="run this script on a node that has the cards, e.g. srun --gpus=1 bash setup_wangen.sh, or set"
            f" WANGEN_TORCH_INDEX, e.g. {TORCH_INDEX}/cu128",
        )
    if hardware.amd:
        cure = "For the AMD card publish with --platform linux-rocm (Windows: windows-rocm) and set up in that bundle"
    else:
        cure = (
            "If this machine has an NVIDIA card: install its driver from nvidia.com/drivers (under WSL: in Windows)"
            " and run this script again"
        )
    slow = "PyTorch for the CPU is taken, which is far too slow for real training"
    return Wanted(index, "", hardware, f"{slow}. {cure}")


def _unfit(builds: Sequence[Build], runs: Sequence[Build], hardware: Hardware) -> WangenError:
    if runs:
        names = ", ".join(hardware.cards)
        return WangenError(f"no build of PyTorch for this driver has code for the card {names}", cure=_DRIVER_CURE)
    least = min(build.driver for build in builds if build.driver)
    offers = "{}.{}".format(*hardware.cuda) if hardware.cuda else "no known version"
    return WangenError(
        "the NVIDIA driver {} offers CUDA {}; PyTorch needs {}.{} or newer".format(hardware.driver, offers, *least),
        cure=_DRIVER_CURE,
    )


def _tag(index: str) -> re.Match[str] | None:
    return _TAG.fullmatch(index.rstrip("/").rpartition("/")[2])


def _cuda_of(index: str) -> Version | None:
    """CUDA version in the name of a folder of PyTorch's index: (12, 8) for cu128."""
    named = _tag(index)
    return (int(named[2][:-1]), int(named[2][-1])) if named and re.fullmatch(r"\d{3,}", named[2]) else None


def _serves(cuda: Version | None, capability: Version | None) -> bool:
    """Whether PyTorch's build for a CUDA version has code for a card; True when either is unknown.

    From CUDA 12.8 on the builds begin with Turing (7.5); the older ones go from Maxwell (5.0) to Hopper (9.0), without
    Blackwell (PyTorch's RELEASE.md, "PyTorch CUDA Support Matrix").

    >>> _serves((12, 6), (12, 0)), _serves((13, 0), (6, 1)), _serves((12, 8), (12, 0))
    (False, False, True)
    """
    if cuda is None or capability is None:
        return True
    return capability >= (7, 5) if cuda >= (12, 8) else (5, 0) <= capability < (10, 0)
