"""Attention's outputs held from a checkpointed forward pass to its recomputation, if need be in host memory."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_SMALL_BYTES = 1 << 16
"""What is smaller stays on the device: a copy costs more than the room."""


class Stash:
    """What the calls of `Kernel.kept` in one checkpointed region computed.

    One stash serves one forward pass of one region, and its one recomputation:

        stash = Stash()
        checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=stash.contexts)

    Args:
        offload: what is held waits in pinned host memory. It is copied on a stream of its own, both ways. On the CPU
            this changes nothing.
    """

    def __init__(self, *, offload: bool = False) -> None:
        self._offload = offload
        self._held: list[tuple[_Resident | _Offloaded, ...]] = []
        self._mode: Literal["", "record", "replay"] = ""

    @property
    def records(self) -> bool:
        """Whether what is computed now shall be held."""
        return self._mode == "record"

    @property
    def replays(self) -> bool:
        """Whether what is asked for now was computed before."""
        return self._mode == "replay"

    def contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """The contexts of the forward pass and of the recomputation: `context_fn` of `torch.utils.checkpoint`."""
        return self.recording(), self.replaying()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While it runs, what `Kernel.kept` computes is held."""
        assert not self._held, "a stash serves one forward pass"
        self._mode = "record"
        try:
            yield
        finally:
            self._mode = ""

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """While it runs, `Kernel.kept` takes back what is held, in the order in which it came."""
        self.fetch()
        self._mode = "replay"
        try:
            yield
        finally:
            self._mode = ""

    def fetch(self) -> None:
        """Start to bring back what waits in host memory: a block ahead of its recomputation, or when that starts."""
        for tensors in self._held:
            for tensor in tensors:
                tensor.fetch()

    def put(self, tensors: Sequence[Tensor | None]) -> None:
        """Hold the tensors of one call."""
        self._held.append(tuple(self._holder(tensor) for tensor in tensors))

    def take(self) -> tuple[Tensor | None, ...]:
        """The tensors of the next call, with the strides that they had; they are held no longer."""
        assert self._held, "a region is recomputed once, and calls attention as often as in its forward pass"
        return tuple(tensor.take() for tensor in self._held.pop(0))

    def held_bytes(self) -> int:
        """What is held on the device, in bytes; shared storage counts as well."""
        return sum(tensor.resident_bytes() for tensors in self._held for tensor in tensors)

    def _holder(self, tensor: Tensor | None) -> "_Resident | _Offloaded":
        if self._offload and tensor is not None and tensor.is_cuda and tensor.nbytes >= _SMALL_BYTES:
            return _Offloaded(tensor)
        # Of the output itself the graph would be held, and so the stash by itself.
        return _Resident(None if tensor is None else tensor.detach())


@dataclass(frozen=True)
class _Resident:
    tensor: Tensor | None

    def fetch(self) -> None:
        """It is there."""

    def take(self) -> Tensor | None:
        return self.tensor

    def resident_bytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes


class _Offloaded:
    """A CUDA tensor in pinned host memory. The allocator is told of every stream that touches its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # keeps the strides
        self._fetched: tuple[Tensor, torch.cuda.Event] | None = None
        stream = _copy_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)

    def fetch(self) -> None:
        if self._fetched is not None:
            return
        stream = _copy_stream(self._device)
        tensor = torch.empty_like(self._host, device=self._device)  # in the pool of the stream that will use it
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            tensor.copy_(self._host, non_blocking=True)
            self._fetched = tensor, stream.record_event()
        tensor.record_stream(stream)

    def take(self) -> Tensor:
        self.fetch()
        assert self._fetched is not None
        tensor, copied = self._fetched
        torch.cuda.current_stream(self._device).wait_event(copied)
        return tensor

    def resident_bytes(self) -> int:
        return self._fetched[0].nbytes if self._fetched is not None else 0


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
