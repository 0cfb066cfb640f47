"""Every kind of finding: how bad it is, what it means, and what to do. The checks and docs/doctor.md share it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]

_SETUP = "run the setup script of the bundle (setup_wangen) again"
_SETUP_HERE = "if training runs on this machine: run the setup script in the bundle's folder (setup_wangen)"
_OTHER_PYTHON = "install Python 3.13 (64-bit) from python.org, delete the environment's folder and run the setup script"


@dataclass(frozen=True)
class Kind:
    """A kind of finding.

    Attributes:
        name: stays the same from version to version, for `--json`.
        level: a `problem` makes `wangen doctor` fail.
        meaning: what is the matter, for the page of the docs.
        cure: what to do.
    """

    name: str
    level: Literal["note", "problem"]
    meaning: str
    cure: str


_PYTHON = (
    Kind("python-fails", "problem", "the Python that the scripts take does not start", _SETUP),
    Kind("python-old", "problem", "that Python is older than 3.11", _OTHER_PYTHON),
    Kind("python-32-bit", "problem", "that Python is a 32-bit one, for which there is no PyTorch", _OTHER_PYTHON),
    Kind(
        "python-store",
        "note",
        "it is made from the Microsoft Store's Python, whose files Windows redirects",
        "where files seem to be missing: " + _OTHER_PYTHON,
    ),
    Kind(
        "no-environment",
        "note",
        "where the workspace's scripts look for an environment, there is none",
        _SETUP_HERE,
    ),
    Kind(
        "no-venv",
        "note",
        "that Python is no environment of its own: what other programs install there changes wangen's",
        "use the environment that the setup script makes, or python -m venv",
    ),
    Kind("library", "problem", "a library is missing, or of a version that wangen does not work with", _SETUP),
    Kind(
        "no-runtime",
        "note",
        "PyTorch and the runtime's libraries are not in the Python that runs wangen: this machine publishes and checks",
        _SETUP_HERE,
    ),
    Kind(
        "environment-old", "problem", "the wangen in that environment is an older one", "publish again, then " + _SETUP
    ),
    Kind(
        "python-variables",
        "note",
        "a variable makes every Python take packages from elsewhere first",
        "unset it, unless you set it on purpose",
    ),
    Kind(
        "shadows",
        "note",
        "a file of the folder you are in has the name of a library: `python -m` takes it there in the library's place",
        "rename it; `wangen` and the scripts do not look there",
    ),
    Kind("library-fails", "problem", "a library that training imports does not start", _SETUP),
    Kind("video-fails", "problem", "PyAV cannot write and read a clip", _SETUP),
    Kind("ffmpeg-fails", "note", "the ffmpeg of imageio-ffmpeg does not run: preprocess and evaluate need it", _SETUP),
    Kind(
        "torch-fails",
        "problem",
        "PyTorch does not start, or takes the process down with it",
        "delete the environment's folder and run the setup script of the bundle",
    ),
)

_CARD = (
    Kind(
        "no-card",
        "note",
        "there is no card that PyTorch can use: all would run on the CPU, far too slow to train",
        "if this machine has an NVIDIA card, install its driver from nvidia.com/drivers (under WSL: in Windows); else "
        "publish here and train on the machine with the card",
    ),
    Kind(
        "driver-silent",
        "problem",
        "the NVIDIA driver is installed and does not answer",
        "restart the machine, as after every update of the driver; then install the driver again from "
        "nvidia.com/drivers",
    ),
    Kind(
        "driver-old",
        "problem",
        "the driver is too old for the CUDA that PyTorch is built with",
        "install the newest driver from nvidia.com/drivers (under WSL: in Windows), or run the setup script again: it "
        "takes the PyTorch that fits the driver",
    ),
    Kind(
        "torch-cpu",
        "problem",
        "PyTorch is built for the CPU alone, and there is a card",
        _SETUP + ": it installs the PyTorch that fits",
    ),
    Kind(
        "torch-other",
        "problem",
        "PyTorch is built for the other maker's cards",
        _SETUP + ": of the platform whose accelerator the card is",
    ),
    Kind("card-hidden", "problem", "a variable hides the card", "unset it, or name the card in it"),
    Kind(
        "card-unseen",
        "problem",
        "there is a card, and PyTorch sees none",
        "restart the machine if its driver was just installed; in a container give it the card (docs/containers.md)",
    ),
    Kind(
        "card-unsupported",
        "problem",
        "this PyTorch has no code for the card: too old a card for a new PyTorch, or "
        "too new a card for an old one (an RTX 50 card needs CUDA 12.8 or newer)",
        _SETUP + ": it takes the PyTorch that has the card's code; docs/install.md has the table",
    ),
    Kind(
        "card-fails",
        "problem",
        "a small calculation on the card fails",
        "restart the machine; end other programs on the card; where it stays so, the driver or the card is broken",
    ),
    Kind(
        "card-in-use",
        "note",
        "other programs hold more than a gigabyte of the card's memory",
        "end them while you train: ComfyUI, browsers, games, other trainings",
    ),
    Kind(
        "card-small",
        "note",
        "the card has less than 8 GB, the least that a preset is made for",
        "train small pictures of t2v-1.3B with --vram 8, --quantize and --blocks_to_swap, docs/memory.md",
    ),
    Kind(
        "card-old",
        "note",
        "the card is older than NVIDIA's 30 series: no units for bfloat16, in which models train",
        "it works and is slow; attention computes in float32 there, so where a preset does not fit take the next "
        "smaller one",
    ),
    Kind(
        "card-slow",
        "note",
        "a large matrix product reaches less than 40 % of what such a card is made for",
        "see with nvidia-smi whether another program computes on it, how hot it is and what its power limit is",
    ),
    Kind(
        "pcie-narrow",
        "note",
        "the card uses few lanes of its slot: block swap copies at that speed",
        "put it into the slot beside the processor; a riser cable or a second drive may take lanes",
    ),
    Kind(
        "shared-memory-of-windows",
        "note",
        "Windows moves what does not fit the card into the host's memory, quietly "
        "and many times slower; no program can see whether it is switched off",
        'NVIDIA control panel, "CUDA - Sysmem Fallback Policy": "Prefer No Sysmem Fallback"',
    ),
    Kind(
        "windows-gpus",
        "note",
        "several cards on Windows itself: one run uses one of them",
        "use WSL for --gpus; or choose a card with CUDA_VISIBLE_DEVICES",
    ),
    Kind("wsl-1", "problem", "this is WSL 1, which knows no cards", "in Windows: wsl --set-version NAME 2"),
    Kind(
        "wsl-driver",
        "note",
        "WSL does not show an NVIDIA driver of Windows",
        "if there is an NVIDIA card: install its newest driver in Windows, then there: wsl --update, wsl --shutdown",
    ),
    Kind(
        "wsl-linux-driver",
        "note",
        "a driver for Linux is installed inside WSL, where it can hide that of Windows",
        "where PyTorch sees no card: sudo apt remove --purge 'libnvidia-*' 'nvidia-driver-*'",
    ),
    Kind(
        "rocm-rights",
        "problem",
        "this user may not use the AMD card",
        "sudo usermod -a -G render,video $LOGNAME, and log in again",
    ),
    Kind(
        "rocm-override",
        "note",
        "HSA_OVERRIDE_GFX_VERSION makes ROCm take the card for another one",
        "where results are wrong or it crashes: unset it, and take a PyTorch with the card's own code, docs/install.md",
    ),
    Kind(
        "blocking",
        "note",
        "a variable for finding errors makes every calculation wait for the one before",
        "unset it before you train",
    ),
    Kind(
        "library-path",
        "note",
        "LD_LIBRARY_PATH names CUDA or ROCm libraries, which win over those that PyTorch brings",
        "where PyTorch does not start or crashes: unset it",
    ),
)

_KERNELS = (
    Kind("attention-fails", "problem", "PyTorch's own attention does not run, forward and backward", _SETUP),
    Kind(
        "attention-package",
        "note",
        "a package with an attention kernel is installed and does not run here: it is built "
        "for another PyTorch, or for other cards; --attention auto passes it over",
        "uninstall it, or install a build for this PyTorch",
    ),
    Kind(
        "attention-crash",
        "problem",
        "a package with an attention kernel takes the process down with it, and so it would a training that tries it",
        "uninstall it with pip, or train with --attention sdpa",
    ),
    Kind(
        "sdpa-no-flash",
        "note",
        "PyTorch has no FlashAttention of its own here, as many builds for Windows: SDPA takes a slower kernel",
        "install a wheel of flash-attn that fits this PyTorch: --attention auto finds it",
    ),
    Kind(
        "no-triton",
        "note",
        "triton is missing or makes no kernels: training works, but clips take some 10 % longer, and --compile "
        "does not work",
        "pip install triton (Windows: triton-windows, the version for this PyTorch); on Linux it also needs a C "
        "compiler and Python's headers: sudo apt install gcc python3-dev",
    ),
    Kind(
        "vae-wrong",
        "problem",
        "a convolution as the VAE has it gives wrong, zero or non-finite values on the card",
        "encode with --vae_dtype float32; where that is wrong, too, take another PyTorch or driver",
    ),
    Kind(
        "vae-without-cudnn",
        "note",
        "PyTorch 2.9 leaves cuDNN before 9.15 out of convolutions over frames in half precision: the VAE takes up to "
        "three times the memory, and is slower",
        "install PyTorch 2.10 or newer; beside 2.9.1 it is enough to pip install 'nvidia-cudnn-cu12>=9.15' "
        "(CUDA 13: nvidia-cudnn-cu13)",
    ),
    Kind(
        "memory-not-locked",
        "note",
        "the system does not lock a gigabyte of the host's memory: block swap copies more "
        "slowly, and not beside the computation",
        "raise the limits of the container or WSL, swap fewer blocks, or quantise them",
    ),
)

_SYSTEM = (
    Kind(
        "macos",
        "note",
        "on macOS wangen publishes and checks; nobody has trained with it there",
        "train on the machine with the card",
    ),
    Kind("file-names", "problem", "Python cannot write every file name here", "set LC_ALL=C.UTF-8 or PYTHONUTF8=1"),
    Kind(
        "code-page",
        "note",
        "the console is not in UTF-8: letters that it lacks are shown as escapes. Scripts of wangen "
        "switch it themselves",
        "chcp 65001, for this window",
    ),
    Kind(
        "long-paths",
        "note",
        "Windows opens no path of 260 characters and more",
        "keep the root short (C:\\AI), or as administrator in PowerShell: Set-ItemProperty "
        "HKLM:\\SYSTEM\\CurrentControlSet\\Control\\FileSystem LongPathsEnabled 1",
    ),
    Kind(
        "page-file",
        "note",
        "Windows has hardly a page file: loading a large model can fail though memory is free",
        'Windows, "Performance options", "Virtual memory": let the system manage its size',
    ),
    Kind(
        "memory-low",
        "note",
        "less than 16 GiB of memory: block swap and the idle one of two experts have no room",
        "close other programs, train t2v-1.3B or ti2v-5B, and quantise rather than swap",
    ),
    Kind(
        "memory-limit",
        "note",
        "the container or the job may use only a part of the machine's memory",
        "where it is too little: docker run --memory, sbatch --mem, or systemd's MemoryMax",
    ),
    Kind("memory-taken", "note", "other programs have left less than 4 GiB of memory", "close them"),
    Kind(
        "wsl-memory",
        "note",
        "WSL has less than 32 GiB of memory: half of the machine's, unless .wslconfig says more",
        "where it is too little: memory=48GB below [wsl2] in C:\\Users\\NAME\\.wslconfig; in Windows: wsl --shutdown",
    ),
    Kind(
        "shared-memory",
        "note",
        "/dev/shm is small, and several cards meet there, as --gpus wants it",
        "docker run --ipc=host or --shm-size=1g",
    ),
    Kind(
        "locked-memory",
        "note",
        "there is InfiniBand or RoCE, and little memory may be locked: NCCL falls back to sockets",
        "ulimit -l unlimited; docker run --ulimit memlock=-1",
    ),
)

_PLACES = (
    Kind("workspace-wrong", "problem", "wangen.toml cannot be read", "mend it as the message says"),
    Kind(
        "read-only",
        "problem",
        "the file system is mounted read-only",
        "mount it for writing, or choose another folder; a Linux disk turns so after errors: see dmesg",
    ),
    Kind("not-writable", "problem", "this user may not write there", "fix the folder's rights, or choose another"),
    Kind("disk-full", "problem", "less than 2 GB are free", "free space, or move the folder to another disk"),
    Kind(
        "disk-low",
        "note",
        "less than 20 GB are free; the weights of t2v-1.3B take 15 GB, those of a 14B model 40",
        "free space, or put models and datasets onto another disk (wangen.toml)",
    ),
    Kind(
        "disk-fat",
        "problem",
        "this file system (FAT32) holds no file of 4 GB and more, as weights are",
        "take a disk with NTFS, exFAT or a file system of Linux",
    ),
    Kind(
        "disk-slow",
        "note",
        "the disk is slow: training waits for its cache",
        "put models and datasets onto an SSD of this machine",
    ),
    Kind(
        "cloud",
        "note",
        "a cloud service keeps this folder: it copies every cache entry and checkpoint, and locks files while it does",
        "choose a folder outside, such as C:\\AI, or pause the service while you train",
    ),
    Kind(
        "wsl-drive",
        "note",
        "a drive of Windows, seen from WSL: many times slower than WSL's own disk",
        "keep datasets, caches and models in WSL's own file system (below your home), or train in Windows",
    ),
    Kind(
        "network-drive",
        "note",
        "a network drive: as fast as the network, and gone with it",
        "keep the caches on a disk of this machine, unless it is a cluster's own file system",
    ),
    Kind(
        "long-root",
        "note",
        "the bundle's root is so long that paths below it come near Windows' 260 characters",
        "take a shorter root, such as C:\\AI",
    ),
)

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (*_PYTHON, *_CARD, *_KERNELS, *_SYSTEM, *_PLACES)}
