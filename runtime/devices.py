"""Where and how to compute: device, precision, attention kernel of diffusers' modules; what a full memory says."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from wangen.generator.errors import UsageError, WangenError
from wangen.generator.memory import GIB
from wangen.generator.target import host_platform_name
from wangen.runtime.fast.attention import KERNEL_FAILURES, warn_of_another
from wangen.runtime.memory.allocator import GPU_SETTING, WHOLE
from wangen.runtime.rocm import vae_dtype

log = logging.getLogger("wangen")

CONTEXT_BYTES = GIB // 2
"""What CUDA itself has taken when it is asked what is free; the memory formula counts it."""

BESIDE_PYTORCH = GIB // 4
"""What libraries take of a GPU beside PyTorch once they are used."""

_FULL = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_AUTO = ("flash3", "flash", "sdpa")
_BACKENDS = {"sdpa": "native", "flash": "flash", "flash3": "_flash_3", "xformers": "xformers", "sage": "sage"}


def choose_device(name: str | None, number: int = 0) -> torch.device:
    """The device to compute on; None takes CUDA (or ROCm, which answers to that name) when there is one.

    A GPU has its number: the name alone means the current one of each thread, which in a new thread is the first.

    Args:
        name: with or without its number; where it has none, processes of one machine take a GPU each.
        number: of this process on its machine.

    Raises:
        UsageError: no such device on this machine, or not one for each process.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if number and device.type == "cuda":
            device = own_gpu(device, number)
        probe = torch.empty(1, device=device)
        probe.cpu()  # what cannot be read back, as of `meta`, is no place to compute
        device = probe.device
        if device.type == "cuda" and host_platform_name() in ("windows", "wsl"):
            hold_to_the_card(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        if "CUDA driver error" in reason:  # as of virtual GPUs, which have no segments that expand
            raise UsageError(f"the GPU gives no memory: {reason}", cure=f"set {GPU_SETTING}={WHOLE}") from None
        found, other = (f"--device {name}", "leave --device out or give") if name else ("the GPU", "give --device")
        raise UsageError(f"{found}: {reason}", cure=f"{other} cpu") from None
    return device


def hold_to_the_card(device: torch.device) -> None:
    """Let PyTorch take what is free on a GPU now, and no more, as it is on Linux.

    Windows' driver would move what does not fit into the host's memory, where it is many times slower, and say nothing;
    nor would PyTorch give back segments that lie idle, of which it may hold as much again as it uses.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, max(0, free + torch.cuda.memory_reserved(index) - BESIDE_PYTORCH) / total), index
    )


def own_gpu(device: torch.device, number: int) -> torch.device:
    """The GPU of a process that is not its machine's first.

    Args:
        device: as asked, with or without its number.
        number: of the process on its machine.

    Raises:
        UsageError: the device is one for all, or there are fewer.
    """
    if str(device) != "cuda":  # they were all started with the same line
        raise UsageError(f"--device {device}: all processes of this machine would compute on it",
                         cure="give --device cuda or leave it out: each then takes a GPU of its own")  # fmt: skip
    there = torch.cuda.device_count()
    if number >= there:
        raise UsageError(f"process {number} of this machine, counted from 0, has no GPU: there are {there}",
                         cure="start as many processes as there are GPUs")  # fmt: skip
    return torch.device("cuda", number)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that a run may take of a device, as the memory formula counts them; None where it cannot tell, as a CPU."""
    return torch.cuda.mem_get_info(device)[0] + CONTEXT_BYTES if device.type == "cuda" else None


def spare_bytes(device: torch.device) -> int:
    """Bytes of a GPU that PyTorch may still take, beside what it holds in reserve."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free, allowed - torch.cuda.memory_reserved(device))


def is_roomy(device: torch.device) -> bool:
    """Whether a quarter of a GPU may still be filled."""
    return spare_bytes(device) >= torch.cuda.mem_get_info(device)[1] / 4


def require_compiler() -> None:
    """See that torch.compile can make kernels for the GPU, if there is one.

    Raises:
        UsageError: triton is missing.
    """
    if find_spec("triton") is None and torch.cuda.is_available():
        raise UsageError("--compile needs triton on a GPU", cure="pip install triton (Windows: triton-windows)")


def set_precision(*, deterministic: bool, tf32: bool) -> None:
    """Choose between speed and repeatable bytes on a GPU; a CPU always repeats them.

    Args:
        deterministic: only kernels that give the same bytes each time; what has none warns, see `fixed_order`.
        tf32: products of float32 may round their operands to TF32.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
        torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def fixed_order() -> Iterator[None]:
    """While it runs, `--deterministic` does not merely warn: attention's kernels then add up in a fixed order.

    Where PyTorch is only to warn, FlashAttention, the memory-efficient kernel and cuDNN stay as fast as ever, and their
    gradients add up in whatever order blocks finish (`check_cudnn_deterministic` in ATen's sdp_utils.cpp, and
    attention_backward.cu). It holds for all threads, also for those of the backward pass.

    Raises:
        RuntimeError: something that runs meanwhile has no such kernel.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def choose_vae_dtype(name: str | None, device: torch.device) -> str:
    """The precision that a VAE encodes in: as asked (on ROCm always float32), else the best one that costs nothing.

    That is float16 on a card whose units compute it at full speed (compute capability 7 and above): bfloat16 is no
    faster and loses three more bits. What leaves its range is encoded in float32. Elsewhere it is float32.
    """
    return vae_dtype(name, announce=True) or ("float16" if _fast_float16(device) else "float32")


def choose_decoder_dtype(name: str | None, device: torch.device) -> str:
    """The precision that a VAE decodes in: as asked (on ROCm always float32), else bfloat16 on CUDA, as it was made."""
    return vae_dtype(name, announce=True) or ("bfloat16" if device.type == "cuda" else "float32")


def choose_clip_dtype(device: torch.device) -> str:
    """The precision of the image encoder: float16 on a GPU, as it is stored, and float32 on a CPU."""
    return "float16" if _fast_float16(device) else "float32"


def _fast_float16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 7


@contextlib.contextmanager
def exact(dtype: str) -> Iterator[None]:
    """While the block runs, float32 means float32: PyTorch lets cuDNN round its operands to TF32 by default.

    Autocast is off as well, whatever surrounds the block.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = before and dtype != "float32"
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def within_range(encode: Callable[[str], torch.Tensor], dtype: str, name: str) -> torch.Tensor:
    """What a VAE encodes in a precision, or in float32 where it leaves the range of float16.

    Args:
        encode: takes the precision.
        dtype: the one that was chosen.
        name: of the item, for the log.
    """
    latents = encode(dtype)
    if dtype == "float16" and not latents.isfinite().all():
        log.warning("  %s leaves the range of float16 inside the VAE: encoded in float32", name)
        with exact("float32"):
            latents = encode("float32")
    return latents


def choose_dtype(name: str | None, device: torch.device) -> str:
    """The precision of any other model: as asked, else bfloat16 on a GPU and float32 on a CPU."""
    return name or ("float32" if device.type == "cpu" else "bfloat16")


@contextlib.contextmanager
def enough_memory(what: str, cure: str) -> Iterator[None]:
    """Say what was being done when the device's memory, or the host's, is full, and what to do.

    Raises:
        WangenError: in place of torch's own error.
    """
    with out_of_memory_as(lambda _: WangenError(f"out of memory {what}", cure=cure)):
        yield


@contextlib.contextmanager
def out_of_memory_as(answer: Callable[[Exception], WangenError]) -> Iterator[None]:
    """Answer a full memory, of the device or of the host, with a message that is made of the error only then.

    Raises:
        WangenError: in place of torch's own error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise answer(error) from None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory is full.

    Python's and PyTorch's own kinds do. Of others it is the words, by which PyTorch tells of the host's, and CUDA,
    cuBLAS, cuDNN, NCCL and Triton of what they take themselves.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _FULL.search(str(error)) is not None


def is_of_host(error: Exception, device: torch.device) -> bool:
    """Whether the memory that an error says is full is the host's."""
    return device.type == "cpu" or isinstance(error, MemoryError) or "CPUAllocator" in str(error)


def set_attention(transformer: Any, name: str, device: torch.device, dtype: torch.dtype, *, backward: bool) -> str:
    """Set the attention kernel of a diffusers transformer and return its name.

    Args:
        transformer: the module.
        name: a value of `--attention`; `auto` takes the first of flash3, flash, sdpa that runs here. For any other that
            does not run, auto's choice takes its place, and one warning says what to install.
        device: where it will run.
        dtype: of queries, keys and values; most kernels know no float32.
        backward: the kernel must also have a backward pass.
    """
    # Its only use here is this choice; the note that backends are experimental says nothing to a user.
    logging.getLogger("diffusers.models.modeling_utils").setLevel(logging.ERROR)
    why = ""
    for kernel in {"auto": _AUTO, "sdpa": ("sdpa",)}.get(name, (name, *_AUTO)):
        reason = _try_kernel(kernel, device, dtype, backward=backward)
        if reason is None:
            break
        why = why or reason
    transformer.set_attention_backend(_BACKENDS[kernel])
    if name not in ("auto", kernel):
        warn_of_another(name, why, kernel)
    return kernel


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
    except KERNEL_FAILURES as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
