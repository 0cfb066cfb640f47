"""Modules of Triton kernels: whether they run where they are wanted.

Triton comes with PyTorch for Linux; on Windows it is the package triton-windows. A module of kernels is imported only
here, and only where Triton is there.
"""

import logging
import subprocess
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch

log = logging.getLogger("wangen")


def working(
    name: str, device: torch.device, trial: Callable[[ModuleType, torch.device], None], what: str
) -> ModuleType | None:
    """A module, if its kernels run on a device: Triton is there, can compile, and a trial is passed.

    Args:
        name: of the module, in full.
        device: where they would run.
        trial: runs each kernel once; it raises `ValueError` where a result is wrong, and whatever Triton raises.
        what: PyTorch's own operations do in their place, for the log.
    """
    if device.type != "cuda":
        return None
    try:
        module = import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # not there, or half
        _tell(what, error)
        return None
    try:
        trial(module, device)
    except _failures() as error:
        _tell(what, error)
        return None
    return module


def _failures() -> tuple[type[Exception], ...]:
    """What Triton raises where its compiler, the C compiler that it calls, or the driver does not do."""
    from triton.errors import TritonError

    return (
        TritonError, subprocess.SubprocessError, RuntimeError, OSError, ImportError, ValueError, TypeError,
        AttributeError, AssertionError, LookupError, Warning,
    )  # fmt: skip


def _tell(what: str, error: Exception) -> None:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    log.info("%s: PyTorch's own operations, which take longer; Triton does not run here (%s)", what, reason)
