"""What the C library does with memory that a step on the CPU gives back."""

import ctypes
import platform

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
