"""Machines that the doctor's tests have not: their facts as the tools of such machines tell them."""

from dataclasses import replace
from pathlib import Path, PureWindowsPath

from wangen.generator.doctor.facts import TOLD_WHY, Facts, Interpreter, Memory, Place, System, Trial
from wangen.generator.interpreter import Fault
from wangen.generator.setup.hardware import Card, Hardware

GIB = 2**30
PYTHON = "/ai/venv/bin/python"
RTX = Card("NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB, 0, "", 16, 16)
DRIVER = Hardware(driver="570.86.10", cuda=(12, 8), cards=(RTX.name,), capability=(8, 9))
CUDA = {"version": "2.9.1+cu128", "cuda": "12.8", "hip": None}
ROCM = {"version": "2.9.1+rocm6.4", "cuda": None, "hip": "6.4.43482"}
CPU = {"version": "2.9.1+cpu", "cuda": None, "hip": None}
BUILT_FOR = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
MISSING = Trial(found={"installed": False})
NO_CARDS = Trial(found={"cards": [], "reason": "No CUDA GPUs are available"})
PACKAGES = {"wangen": "0.1.0", "torch": "2.9.1+cu128"}


def seen(name=RTX.name, capability=(8, 9), total=24 * GIB, error="", built_for=BUILT_FOR):
    """What PyTorch says of a card."""
    card = {"name": name, "capability": list(capability), "architecture": "", "total_bytes": total, "error": error}
    return Trial(found={"cards": [card], "reason": "", "architectures": built_for})


TRIALS = {
    "torch": Trial(found=CUDA),
    "cards": seen(),
    "attention sdpa": Trial(found={"installed": True, "runs": True, "reason": "", "has_flash": True}),
    **{f"attention {kernel}": MISSING for kernel in ("flash3", "flash", "xformers", "sage")},
    "vae": Trial(found={"dtype": "float16", "finite": True, "error": 0.0004}),
    "speed": Trial(found={"tflops": 120.0, "peak_tflops": 165.2, "dtype": "bfloat16"}),
    "lock": Trial(found={"locked": True}),
    "libraries": Trial(found={"triton": True}),
    "video": Trial(found={"num_frames": 5, "ffmpeg": True}),
}


def machine(*, system=None, memory=None, python=None, trials=None, place=None, **facts):
    """A good Linux machine with an RTX 4090, but for what is given."""
    interpreter = Interpreter(path=PYTHON, packages=PACKAGES, **(python or {}))
    path = Path("/ai")
    folder = Place(what="workspace", path=path, wanted=path, file_system="ext4", mount="/", free=10**12,
                   write_rate=1e9, read_rate=2e9)  # fmt: skip
    return Facts(**{
        "system": System(**{"name": "Linux 6.8.0-45-generic", "release": "6.8.0-45-generic", **(system or {})}),
        "memory": Memory(**(memory or {})),
        "hardware": DRIVER,
        "cards": (RTX,),
        "python": interpreter,
        "trials": TRIALS | (trials or {}),
        "places": (replace(folder, **(place or {})),),
        **facts,
    })  # fmt: skip


def without_card(**facts):
    """A machine whose driver's tools find nothing."""
    return machine(**{"hardware": Hardware(), "cards": (), **facts})


def wsl(**facts):
    """Ubuntu in WSL 2 with half of 96 GB."""
    system = {"kind": "wsl", "release": "5.15.167.4-microsoft-standard-WSL2", **facts.pop("system", {})}
    return machine(system=system, memory={"total": 47 * GIB, **facts.pop("memory", {})}, **facts)


def windows(**facts):
    """Windows 11 as its setup leaves it, with a console in UTF-8."""
    card = replace(RTX, model="WDDM")
    system = {"kind": "windows", "code_page": 65001, "long_paths": True, **facts.pop("system", {})}
    root = PureWindowsPath(r"C:\AI")
    place = {"path": root, "wanted": root, "file_system": "ntfs", "mount": "C:\\", "platform": "windows",
             **facts.pop("place", {})}  # fmt: skip
    memory = {"swap": 40 * GIB, "shared": None, **facts.pop("memory", {})}
    return machine(**{"system": system, "place": place, "memory": memory, "cards": (card,), **facts})


def failed(name, error="", crash=""):
    """A trial that came to no end."""
    return {name: Trial(error=error, crash=crash)}


def torch(build, cards=NO_CARDS):
    """Trials under another build of PyTorch."""
    return {"torch": Trial(found=build), "cards": cards}


WINDOWS_CARD = {"shared-memory-of-windows"}
AMD = Hardware(amd="gfx1100")
NOTHING = tuple(Fault("problem", f"no {name}", "setup", name) for name in ("torch", "av"))
FLASH = {"installed": True, "runs": False, "reason": "undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE"}

MACHINES = {
    "linux": (machine(), set()),
    "linux with sage": (machine(trials={"attention sage": Trial(found={"installed": True, "runs": True})}), set()),
    "windows": (windows(), WINDOWS_CARD),
    "wsl": (wsl(), WINDOWS_CARD),
    "rocm": (
        machine(
            hardware=AMD,
            cards=(),
            trials=torch(ROCM, seen("Radeon RX 7900 XTX", (11, 0), built_for=["gfx1100"])),
            system={"devices": {"/dev/kfd": True}},
        ),
        set(),
    ),
    "mac": (without_card(system={"kind": "macos"}, trials=torch(CPU)), {"macos", "no-card"}),
    "no card": (without_card(trials=torch(CPU)), {"no-card"}),
    "driver and module differ": (
        without_card(
            hardware=Hardware(trouble="Failed to initialize NVML: Driver/library version mismatch"), trials=torch(CUDA)
        ),
        {"driver-silent"},
    ),
    "driver of 2022": (
        machine(hardware=replace(DRIVER, driver="522.25", cuda=(11, 8)), trials=torch(CUDA)),
        {"driver-old"},
    ),
    "torch for the cpu": (machine(trials=torch(CPU)), {"torch-cpu"}),
    "torch for cuda, amd card": (machine(hardware=AMD, cards=(), trials=torch(CUDA)), {"torch-other"}),
    "hidden": (machine(trials=torch(CUDA), system={"variables": {"CUDA_VISIBLE_DEVICES": "-1"}}), {"card-hidden"}),
    "unseen": (machine(trials=torch(CUDA)), {"card-unseen"}),
    "blackwell, torch for 12.6": (
        machine(
            trials={
                "cards": seen(
                    "NVIDIA GeForce RTX 5090",
                    (12, 0),
                    built_for=["sm_50", "sm_80", "sm_90"],
                    error="CUDA error: no kernel image is available for execution on the device",
                )
            }
        ),
        {"card-unsupported"},
    ),
    "blackwell, nothing said": (
        machine(trials={"cards": seen("NVIDIA GeForce RTX 5090", (12, 0), built_for=["sm_80", "sm_90"])}),
        {"card-unsupported"},
    ),
    "turing with 6 GB": (
        machine(trials={"cards": seen("NVIDIA GeForce RTX 2060", (7, 5), 6 * GIB)}),
        {"card-small", "card-old"},
    ),
    "card falls off the bus": (
        machine(trials={"cards": seen(error="CUDA error: unspecified launch failure")}),
        {"card-fails"},
    ),
    "looking crashes": (machine(trials=failed("cards", crash="signal SIGSEGV")), {"card-fails"}),
    "full card": (
        machine(
            trials=failed("speed", "torch.OutOfMemoryError: CUDA out of memory."),
            cards=(replace(RTX, used=23 * GIB),),
            programs=(("python.exe", 22 * GIB),),
        ),
        {"card-fails", "card-in-use"},
    ),
    "hot card": (
        machine(trials={"speed": Trial(found={"tflops": 40.0, "peak_tflops": 165.2, "dtype": "bfloat16"})}),
        {"card-slow"},
    ),
    "riser": (machine(cards=(replace(RTX, lanes=1),)), {"pcie-narrow"}),
    "two cards in windows": (
        windows(hardware=replace(DRIVER, cards=(RTX.name, RTX.name))),
        {*WINDOWS_CARD, "windows-gpus"},
    ),
    "tesla in windows": (windows(cards=(replace(RTX, model="TCC"),)), set()),
    "wsl 1": (
        wsl(system={"release": "4.4.0-19041-Microsoft"}, hardware=Hardware(), cards=(), trials=torch(CPU)),
        {"wsl-1", "no-card"},
    ),
    "wsl without driver": (
        wsl(system={"wsl_driver": False}, hardware=Hardware(), cards=(), trials=torch(CPU)),
        {"wsl-driver", "no-card"},
    ),
    "wsl with a driver of linux": (
        wsl(system={"drivers": ("/usr/lib/x86_64-linux-gnu/libcuda.so.1",)}),
        {*WINDOWS_CARD, "wsl-linux-driver"},
    ),
    "wsl on 32 GB": (wsl(memory={"total": 16 * GIB}), {*WINDOWS_CARD, "wsl-memory"}),
    "no group": (
        machine(hardware=AMD, cards=(), trials=torch(ROCM), system={"devices": {"/dev/kfd": False}}),
        {"rocm-rights", "card-unseen"},
    ),
    "ryzen with an nvidia card": (machine(system={"devices": {"/dev/kfd": False}}), set()),
    "overridden": (
        machine(
            hardware=AMD,
            cards=(),
            trials=torch(ROCM, seen("AMD Radeon RX 6700 XT", (10, 3), built_for=["gfx1030"])),
            system={"variables": {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}},
        ),
        {"rocm-override"},
    ),
    "variables": (
        machine(
            system={
                "variables": {
                    "CUDA_LAUNCH_BLOCKING": "1",
                    "PYTHONPATH": "/old",
                    "AMD_SERIALIZE_KERNEL": "0",
                    "LD_LIBRARY_PATH": "/usr/local/cuda-11.8/lib64:/opt",
                }
            }
        ),
        {"blocking", "python-variables", "library-path"},
    ),
    "sdpa fails": (
        machine(trials={"attention sdpa": Trial(found={"installed": True, "runs": False, "reason": "no"})}),
        {"attention-fails"},
    ),
    "flash for another torch": (machine(trials={"attention flash": Trial(found=FLASH)}), {"attention-package"}),
    "xformers raises": (
        machine(trials=failed("attention xformers", "NotImplementedError: No operator found")),
        {"attention-package"},
    ),
    "sage crashes": (
        machine(trials=failed("attention sage", "Fatal Python error", "signal SIGSEGV")),
        {"attention-crash"},
    ),
    "torch for windows": (
        windows(
            trials={
                "attention sdpa": Trial(found={"installed": True, "runs": True, "reason": "", "has_flash": False}),
                "libraries": Trial(found={"triton": False}),
            }
        ),
        {*WINDOWS_CARD, "sdpa-no-flash", "no-triton"},
    ),
    "zero latents": (
        machine(trials={"vae": Trial(found={"dtype": "bfloat16", "finite": True, "error": 1.0})}),
        {"vae-wrong"},
    ),
    "latents of NaN": (
        machine(trials={"vae": Trial(found={"dtype": "bfloat16", "finite": False, "error": None})}),
        {"vae-wrong"},
    ),
    "torch 2.9 with its own cuDNN": (
        machine(trials={"torch": Trial(found={**CUDA, "cudnn": 91002})}),
        {"vae-without-cudnn"},
    ),
    "torch 2.9.1 with a newer cuDNN": (machine(trials={"torch": Trial(found={**CUDA, "cudnn": 91501})}), set()),
    "torch 2.9.0 with a newer cuDNN": (
        machine(trials={"torch": Trial(found={**CUDA, "version": "2.9.0+cu128", "cudnn": 91501})}),
        {"vae-without-cudnn"},
    ),
    "torch 2.11": (machine(trials={"torch": Trial(found={**CUDA, "version": "2.11.0+cu128", "cudnn": 91002})}), set()),
    "no convolution": (machine(trials=failed("vae", "RuntimeError: miopenStatusUnknownError")), {"vae-wrong"}),
    "nothing is locked": (machine(trials={"lock": Trial(found={"locked": False})}), {"memory-not-locked"}),
    "latin-1": (machine(system={"encoding": "iso8859-1"}), {"file-names"}),
    "windows in germany": (
        windows(system={"code_page": 850, "long_paths": False}, memory={"swap": GIB}),
        {*WINDOWS_CARD, "code-page", "long-paths", "page-file"},
    ),
    "container": (
        machine(memory={"limit": 32 * GIB, "shared": 64 * 2**20}, cards=(RTX, RTX)),
        {"memory-limit", "shared-memory"},
    ),
    "closed container": (machine(memory={"total": 0, "available": 0}), set()),
    "small": (machine(memory={"total": 8 * GIB, "available": GIB}), {"memory-low", "memory-taken"}),
    "infiniband": (machine(memory={"locked": 8 * 2**20}, system={"has_infiniband": True}), {"locked-memory"}),
    "python does not start": (
        machine(python={"starts": "Permission denied"}, trials={name: Trial() for name in TRIALS}),
        {"python-fails"},
    ),
    "python that was told does not start": (
        machine(python={"starts": "no such file", "why": TOLD_WHY}, trials={name: Trial() for name in TRIALS}),
        {"python-fails"},
    ),
    "python of 2019": (machine(python={"version": (3, 8, 10), "bits": 32}), {"python-old", "python-32-bit"}),
    "store": (
        windows(python={"base": r"C:\Program Files\WindowsApps\PythonSoftwareFoundation.Python.3.12"}),
        {*WINDOWS_CARD, "python-store"},
    ),
    "system's python": (
        machine(python={"own": False, "looked": ("/ai/venv/bin/python",)}),
        {"no-venv", "no-environment"},
    ),
    "half installed": (
        machine(python={"faults": (Fault("problem", "no av", "run the setup script", "av"),)}),
        {"library"},
    ),
    "own torch": (machine(shadows=("torch.py",)), {"shadows"}),
    "nothing installed": (
        without_card(
            python={"faults": NOTHING},
            trials={name: Trial() for name in TRIALS}
            | failed("torch", "ModuleNotFoundError: No module named 'torch'")
            | failed("video", "ModuleNotFoundError: No module named 'av'"),
        ),
        {"no-runtime"},
    ),
    "environment with nothing in it": (
        without_card(
            python={
                "why": "the bundle's scripts take it",
                "faults": NOTHING,
            },
            trials={name: Trial() for name in TRIALS}
            | failed("torch", "ModuleNotFoundError: No module named 'torch'")
            | failed("video", "ModuleNotFoundError: No module named 'av'"),
        ),
        {"library"},
    ),
    "older library": (machine(python={"faults": (Fault("problem", "peft 0.1 is installed", "setup"),)}), {"library"}),
    "older wangen": (
        machine(
            trials={
                "torch": Trial(error="/ai/venv/bin/python: No module named wangen.runtime.doctor"),
                "video": Trial(error="No module named wangen.runtime.doctor"),
            }
        ),
        {"environment-old"},
    ),
    "dll is missing": (
        windows(trials=failed("torch", "OSError: [WinError 126] Error loading c10.dll")),
        {*WINDOWS_CARD, "torch-fails"},
    ),
    "killed for memory": (machine(trials=failed("torch", crash="signal SIGKILL")), {"torch-fails"}),
    "no avx": (machine(trials=failed("torch", crash="signal SIGILL")), {"torch-fails"}),
    "torchvision of another torch": (
        machine(trials=failed("libraries", "RuntimeError: operator torchvision::nms does not exist")),
        {"library-fails"},
    ),
    "broken av": (machine(trials=failed("video", "ImportError: DLL load failed")), {"video-fails"}),
    "no ffmpeg": (machine(trials={"video": Trial(found={"num_frames": 5, "ffmpeg": False})}), {"ffmpeg-fails"}),
    "wrong workspace": (
        machine(workspace=("unknown key", "wangen.toml", "mend it"), places=()),
        {"workspace-wrong"},
    ),
    "read-only": (machine(place={"options": ("ro", "relatime"), "writable": False, "write_rate": None}), {"read-only"}),
    "closed": (
        machine(place={"writable": False, "wanted": Path("/ai/published"), "write_rate": None}),
        {"not-writable"},
    ),
    "full": (machine(place={"free": 10**9}), {"disk-full"}),
    "nearly full": (machine(place={"free": 10**10}), {"disk-low"}),
    "stick": (machine(place={"file_system": "vfat"}), {"disk-fat"}),
    "hard disk": (machine(place={"write_rate": 30e6}), {"disk-slow"}),
    "onedrive": (windows(place={"cloud": "OneDrive"}), {*WINDOWS_CARD, "cloud"}),
    "drive of windows": (wsl(place={"file_system": "9p", "mount": "/mnt/c"}), {*WINDOWS_CARD, "wsl-drive"}),
    "drive of windows, for windows": (
        wsl(place={"file_system": "9p", "mount": "/mnt/c", "platform": "windows"}),
        WINDOWS_CARD,
    ),
    "nfs": (machine(place={"file_system": "nfs4"}), {"network-drive"}),
    "long root": (
        machine(place={"platform": "windows", "fixed": True, "as_target": "C:\\" + "a" * 100}),
        {"long-root"},
    ),
}
"""Machine -> its facts, and the kinds of notes and problems that it has."""
