"""What is different on AMD's cards, all in one place. Telling the build of torch needs no import of torch.

On some ROCm builds a VAE in bfloat16 or under autocast gives latents that are all zero or not finite, and decoding in
several threads starves the one that feeds the card. So there the VAE runs in float32 without autocast, values are
clamped before they are converted to a narrower type, and one thread decodes.
"""

import importlib.util
import logging
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

log = logging.getLogger("wangen")

NUM_WORKERS = 4
"""Threads that decode ahead of the encoder, where nothing else is said."""


def is_rocm() -> bool:
    """Whether the torch that is installed is a ROCm (HIP) build; False when there is none."""
    if "torch" in sys.modules:
        return bool(sys.modules["torch"].version.hip)
    return _built_with("hip")


def on_cpu(device: str | None) -> bool:
    """Whether a step with this `--device` computes on the CPU, told without importing torch; False when it is open."""
    if device:
        return device == "cpu"
    if "torch" in sys.modules:
        return not sys.modules["torch"].cuda.is_available()
    return not _built_with("hip") and not _built_with("cuda")


@cache
def _built_with(name: str) -> bool:
    """Whether `torch.version.hip` (or `cuda`) will be set, read from its file: importing torch takes a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(rf"^{name}\b[^=\n]*=\s*['\"]", text, re.MULTILINE) is not None


def vae_dtype(asked: str | None, *, announce: bool = False) -> str | None:
    """The precision that a VAE runs in when this one is asked for; None leaves it to the device.

    Args:
        asked: the flag's value.
        announce: warn when it is not what was asked for.
    """
    if not is_rocm() or asked == "float32":
        return asked
    if announce and asked:
        log.warning("ROCm: the VAE runs in float32; %s gives zero or non-finite latents on some builds", asked)
    return "float32"


def num_workers(asked: int | None) -> int:
    """How many threads decode ahead of the encoder; 0 decodes in the encoder's own."""
    if asked is not None:
        return asked
    return 1 if is_rocm() else NUM_WORKERS


def narrowed(values: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
    """Finite values clamped to the range of `dtype`, then converted; what is not finite stays so, for the judge.

    >>> import torch
    >>> narrowed(torch.tensor([1.0, 1e6, float("inf")]), torch.float16).tolist()
    [1.0, 65504.0, inf]
    """
    import torch

    if values.dtype == dtype:
        return values
    limit = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-limit, limit), values).to(dtype)
