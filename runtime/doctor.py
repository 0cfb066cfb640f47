"""The trials of `wangen doctor`: PyTorch, the card, the attention kernels and the libraries, each really used once.

`python -m wangen.runtime.doctor TRIAL …` runs them in that order and prints two lines of JSON for each: that it begins,
and what it found. What fails is left to fail, down to a crash of the process: the doctor reads how far it came, takes
the end of the error output for the reason, and starts again behind the trial that failed.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Found = dict[str, Any]

KERNELS = ("sdpa", "flash3", "flash", "xformers", "sage")
LOCKED_BYTES = 2**30
"""Host memory that is locked at a trial: block swap locks many times as much."""

_NUM_FRAMES = 5
_SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrices whose product is timed."""


def main(names: Sequence[str]) -> int:
    """Run trials; returns the exit code.

    Args:
        names: of `TRIALS`, in order.
    """
    _crash_quietly()
    # Libraries print to the standard output as well, which is for the results alone.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)
        for name in names:
            _write(results, {"trial": name})
            _write(results, {"trial": name, "found": TRIALS[name]()})
    return 0


def _crash_quietly() -> None:
    """A crash leaves no file behind, and on Windows no window that waits for a click."""
    if sys.platform == "win32":
        import ctypes

        ctypes.windll.kernel32.SetErrorMode(0x0001 | 0x0002)  # SEM_FAILCRITICALERRORS, SEM_NOGPFAULTERRORBOX
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _write(results: Any, line: Mapping[str, Any]) -> None:
    results.write(json.dumps(line) + "\n")
    results.flush()  # the next trial may end this process


def _torch() -> Found:
    """The build of PyTorch."""
    import torch

    return {
        "python": platform.python_version(),
        "bits": 64 if sys.maxsize > 2**32 else 32,
        "executable": sys.executable,
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "threads": torch.get_num_threads(),
    }


def _cards() -> Found:
    """The cards that PyTorch sees, and what each answers to a small calculation."""
    import torch

    if not torch.cuda.is_available():
        return {"cards": [], "reason": _reason_of(torch.cuda.init)}
    cards = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        cards.append({
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "architecture": getattr(properties, "gcnArchName", ""),
            "total_bytes": properties.total_memory,
            "error": _reason_of(partial(_calculate, number)),
        })  # fmt: skip
    return {"cards": cards, "reason": "", "architectures": torch.cuda.get_arch_list()}


def _calculate(number: int) -> None:
    import torch

    torch.zeros(1, device=f"cuda:{number}").add_(1).item()


def _reason_of(act: Callable[[], object]) -> str:
    """Why something fails, on one line; empty when it does not."""
    try:
        act()
    except (RuntimeError, AssertionError, OSError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def _attention(kernel: str) -> Found:
    """One attention kernel, forward and backward, compared with PyTorch's own."""
    import torch

    from wangen.runtime.fast.attention import MODULES, try_kernel

    if kernel in MODULES and find_spec(MODULES[kernel]) is None:
        return {"installed": False}
    device = _device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    runs, reason = try_kernel(kernel, device, dtype)
    found: Found = {"installed": True, "runs": runs is not None, "reason": reason}
    if kernel == "sdpa":
        found["has_flash"] = device.type == "cpu" or torch.backends.cuda.is_flash_attention_available()
    return found


def _vae() -> Found:
    """A convolution over frames as the VAE has it, in the precision that it would encode in, against the CPU's."""
    import torch

    from wangen.runtime.devices import DTYPES, choose_vae_dtype, exact

    device = _device()
    name = choose_vae_dtype(None, device)
    torch.manual_seed(0)
    layer = torch.nn.Conv3d(16, 16, 3, padding=1).requires_grad_(False)
    frames = torch.randn(1, 16, 5, 32, 32)
    expected = layer(frames)
    with exact(name):
        output = layer.to(device, DTYPES[name])(frames.to(device, DTYPES[name])).cpu().float()
    error = float((output - expected).norm() / expected.norm())
    return {"dtype": name, "finite": bool(output.isfinite().all()), "error": error if error == error else None}


def _speed() -> Found:
    """TFLOP/s of a large matrix product, and the card's peak where it is known."""
    import torch

    from wangen.runtime.training.throughput import peak_tflops

    device = _device()
    size = _SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.randn(size, size, device=device, dtype=dtype)
    times = 20
    for _ in range(3):
        left @ left
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        left @ left
    _wait(device)
    tflops = times * 2 * size**3 / (time.perf_counter() - began) / 1e12
    return {"tflops": tflops, "peak_tflops": peak_tflops(device), "dtype": str(dtype).removeprefix("torch.")}


def _wait(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _lock() -> Found:
    """Host memory that the card reads while it computes, as block swap wants it."""
    import torch

    if not torch.cuda.is_available():
        return {"locked": None}
    from wangen.runtime.memory.swap import host_buffer

    return {"locked": host_buffer(LOCKED_BYTES, torch.device("cuda")).is_pinned()}


def _libraries() -> Found:
    """diffusers, transformers, peft and accelerate, as training imports them; and whether Triton makes kernels."""
    from importlib import import_module

    for name in ("wangen.runtime.libraries", "transformers", "accelerate", "safetensors.torch"):
        import_module(name)
    import torch

    from wangen.runtime.fast.dit_norms import kernels_on

    on_card = torch.cuda.is_available()
    return {"triton": kernels_on(torch.device("cuda", 0)) is not None if on_card else find_spec("triton") is not None}


def _video() -> Found:
    """A clip written and read by PyAV, and the ffmpeg beside it."""
    import io
    import subprocess

    import av
    import imageio_ffmpeg
    import numpy as np

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("h264", rate=16)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(_NUM_FRAMES):
            picture = np.full((48, 64, 3), 32 * number, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    file.seek(0)
    with av.open(file) as container:
        num_frames = sum(1 for _ in container.decode(video=0))
    if num_frames != _NUM_FRAMES:
        raise RuntimeError(f"of {_NUM_FRAMES} frames that were written {num_frames} are read")
    done = subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-version"], capture_output=True, check=False)
    return {"num_frames": num_frames, "ffmpeg": done.returncode == 0}


def _device() -> "torch.device":
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


TRIALS: Mapping[str, Callable[[], Found]] = {
    "torch": _torch,
    "cards": _cards,
    **{f"attention {name}": partial(_attention, name) for name in KERNELS},
    "vae": _vae,
    "speed": _speed,
    "lock": _lock,
    "libraries": _libraries,
    "video": _video,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
