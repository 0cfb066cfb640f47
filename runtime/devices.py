"""Where and how to compute: device, precision, attention kernel, and the rules of ROCm. All such choices live here."""

import logging
from typing import Any

import torch

from wangen.generator.errors import UsageError, WangenError
from wangen.runtime.needs import is_rocm, vae_dtype

log = logging.getLogger("wangen")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BACKENDS = {"sdpa": "native", "flash": "flash", "flash3": "_flash_3", "xformers": "xformers", "sage": "sage"}
_PACKAGES = {"flash": "flash-attn", "flash3": "flash-attn-3", "xformers": "xformers", "sage": "sageattention"}


def choose_device(name: str | None) -> torch.device:
    """The device to compute on; None takes CUDA (or ROCm, which answers to that name) when there is one.

    Raises:
        UsageError: no such device on this machine.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name}: {reason}", cure="leave --device out or give cpu") from None
    return device


def choose_vae_dtype(name: str | None, device: torch.device) -> str:
    """The precision of the VAE: as asked (on ROCm always float32), else bfloat16 on CUDA and float32 elsewhere."""
    default = "bfloat16" if device.type == "cuda" and not is_rocm() else "float32"
    return vae_dtype(name, announce=True) or default


def choose_dtype(name: str | None, device: torch.device) -> str:
    """The precision of any other model: as asked, else bfloat16 on a GPU and float32 on a CPU."""
    return name or ("float32" if device.type == "cpu" else "bfloat16")


def set_attention(transformer: Any, name: str, device: torch.device, dtype: torch.dtype, *, backward: bool) -> str:
    """Set the attention kernel of a diffusers transformer and return its name.

    Args:
        transformer: the module.
        name: a value of `--attention`; `auto` takes the first of flash3, flash, sdpa that runs here.
        device: where it will run.
        dtype: of queries, keys and values; most kernels know no float32.
        backward: the kernel must also have a backward pass.

    Raises:
        WangenError: the kernel that was asked for does not run here; the message names its package.
    """
    # Its only use here is this choice; the note that backends are experimental says nothing to a user.
    logging.getLogger("diffusers.models.modeling_utils").setLevel(logging.ERROR)
    wanted = ("flash3", "flash", "sdpa") if name == "auto" else (name,)
    for kernel in wanted:
        reason = _try_kernel(kernel, device, dtype, backward=backward)
        if reason is None:
            transformer.set_attention_backend(_BACKENDS[kernel])
            return kernel
    raise WangenError(
        f"the attention kernel {name} does not run here ({reason})",
        cure=f"pip install {_PACKAGES.get(name, name)}, or use --attention auto",
    )


def _try_kernel(kernel: str, device: torch.device, dtype: torch.dtype, *, backward: bool) -> str | None:
    """Run a kernel once on small tensors; None when it works, else why not."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    if device.type == "cpu":
        return None if kernel == "sdpa" else "there is no GPU"
    try:
        query, key, value = (
            torch.randn(1, 128, 2, 128, device=device, dtype=dtype, requires_grad=backward) for _ in range(3)
        )
        output = dispatch_attention_fn(query, key, value, backend=_BACKENDS[kernel])
        if backward:
            output.float().sum().backward()
            if any(tensor.grad is None or not tensor.grad.any() for tensor in (query, key, value)):
                return "it gives no gradient"
    except (ImportError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
