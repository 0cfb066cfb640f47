"""What becomes of memory that a step gives back: on the CPU by the C library, on a GPU by PyTorch.

Imports no torch: PyTorch reads its setting when it first asks for a GPU's memory.
"""

import ctypes
import os
import platform

from wangen.generator.target import host_platform_name
from wangen.runtime.rocm import is_rocm

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Options of glibc's `mallopt`, https://man7.org/linux/man-pages/man3/mallopt.3.html."""

LARGE_BYTES = 32 << 20
"""What is larger comes from the system and goes back to it; glibc takes no higher limit."""

KEPT_BYTES = 512 << 20
"""So much that is free at the end of the heap may stay there. What is free below a tensor in use always stays."""


def keep_freed_memory() -> bool:
    """Let what a step frees serve the next one, in place of going back to the system and coming again page by page.

    By itself glibc gives a tensor of megabytes back at once, or as soon as all above it is free: thousands of page
    faults in a step. Tensors larger than 32 MiB still go back when they are freed.

    Returns:
        Whether it is so now: other C libraries have no such choice.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_THRESHOLD, LARGE_BYTES)) and bool(mallopt(TRIM_THRESHOLD, KEPT_BYTES))


GPU_SETTING = "PYTORCH_CUDA_ALLOC_CONF"
"""The variable that every PyTorch here reads. If it, or its newer name, is set already, it is left alone."""

BOARDS = ("/etc/nv_tegra_release",)
"""What Jetson boards have."""

EXPANDABLE = "expandable_segments:True"
"""Segments that grow page by page. The usual ones are cut up by what is smaller, and soon there is no place for what is
larger: an 8 GB preset whose tensors took 5.3 GiB had 9.1 GiB reserved, and did not fit (H200, PyTorch 2.11)."""

WHOLE = "max_split_size_mb:256"
"""Where segments cannot expand: those above 256 MiB are not cut up, and go back to the driver when memory is short."""


def prefer_whole_segments() -> None:
    """Keep PyTorch's memory on a GPU from going to pieces.

    Segments expand on Linux with CUDA alone: PyTorch for Windows has them not or only lately, and under WSL, on Jetson
    boards and with ROCm they end runs (pytorch issues 192330, 188008, 187343).
    """
    if not {GPU_SETTING, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & set(os.environ):
        os.environ[GPU_SETTING] = EXPANDABLE if _segments_expand() else WHOLE


def _segments_expand() -> bool:
    return host_platform_name() == "linux" and not any(map(os.path.exists, BOARDS)) and not is_rocm()
