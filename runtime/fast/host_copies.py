"""Tensors that wait in host memory between the forward and the backward pass.

On CUDA the host memory is pinned, and the copies run on a stream of their own, beside the computation. Its buffers are
used again from step to step: to pin memory takes longer than to copy it. On the CPU the copies are plain ones.

Memory on the device goes back to the stream that computes, in its order. The allocator's own way (`record_stream`)
gives it back only once the device has come so far, and the host asks for many blocks ahead: they would all hold some.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wangen.runtime.memory.swap import ALIGNMENT, host_buffer


class HostCopies:
    """Where the tensors of one device wait; `host_copies` makes it.

    Args:
        device: that of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._free: list[Tensor] = []
        self._leaving: tuple[Sequence[Tensor], torch.cuda.Event] | None = None  # what was sent last

    def send(self, tensors: Sequence[Tensor]) -> "HostCopy":
        """Start to copy tensors to the host; the caller may let go of them at once.

        They are held here until the next ones are sent or brought, and what is computed from then on waits for the end
        of their copy, which has had the time between: a block's, or a part of it where attention's outputs go as well.
        """
        self._settle()
        ends = [0]
        for tensor in tensors:
            ends.append(math.ceil((ends[-1] + tensor.nbytes) / ALIGNMENT) * ALIGNMENT)
        buffer = self._buffer(ends[-1])
        held = [_view(buffer, start, tensor) for start, tensor in zip(ends[:-1], tensors, strict=True)]
        with self._beside():
            for target, tensor in zip(held, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
        if self._stream is not None:
            self._leaving = tensors, self._stream.record_event()
        return HostCopy(self, buffer, held)

    def bring(self, held: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Start to copy tensors to the device, into memory of the stream that computes now; the event is their end.

        That stream has to wait for it before it lets go of them; where none will, `abandon` them.
        """
        self._settle()
        tensors = [torch.empty_like(tensor, device=self.device) for tensor in held]
        with self._beside():
            for target, tensor in zip(tensors, held, strict=True):
                target.copy_(tensor, non_blocking=True)
        return tensors, self._stream.record_event() if self._stream is not None else None

    def free(self, buffer: Tensor) -> None:
        """Nothing waits in the buffer any more. What is still being copied out of it comes first on the stream."""
        self._free.append(buffer)

    def abandon(self, tensors: Sequence[Tensor]) -> None:
        """Nobody takes what was brought: the allocator keeps its memory until the copies are done."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def _settle(self) -> None:
        """Let go of what was sent, once its copies are done in the order of the stream that computes."""
        if self._leaving is not None:
            torch.cuda.current_stream(self.device).wait_event(self._leaving[1])
            self._leaving = None

    def _buffer(self, num_bytes: int) -> Tensor:
        """A free buffer that is large enough, else a new one in place of a free one that is too small."""
        fitting = [place for place, buffer in enumerate(self._free) if len(buffer) >= num_bytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda place: len(self._free[place])))
        if self._free:
            if self._stream is not None:
                self._stream.synchronize()  # it may still be read
            self._free.pop()
        return host_buffer(num_bytes, self.device)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Copy beside the computation, after what has been asked of it so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield


class HostCopy:
    """Tensors in host memory, to be taken back once. `HostCopies.send` makes it."""

    def __init__(self, copies: HostCopies, buffer: Tensor, held: Sequence[Tensor]) -> None:
        self._copies, self._buffer, self._held = copies, buffer, held
        self._brought: tuple[list[Tensor], torch.cuda.Event | None] | None = None

    def __del__(self) -> None:
        if self._brought is not None:  # an error came between
            self._copies.abandon(self._brought[0])

    def fetch(self) -> None:
        """Start to bring them back, ahead of `take`."""
        if self._brought is None:
            self._brought = self._copies.bring(self._held)

    def take(self) -> list[Tensor]:
        """The tensors on their device, with the strides that they had, for what is computed from now on."""
        self.fetch()
        assert self._brought is not None
        tensors, end = self._brought
        if end is not None:
            torch.cuda.current_stream(self._copies.device).wait_event(end)
        self._copies.free(self._buffer)
        self._brought, self._held = None, ()
        return tensors


@functools.cache
def host_copies(device: torch.device) -> HostCopies:
    """The one of a device: all that waits for it shares one stream and one set of buffers."""
    return HostCopies(device)


def _view(buffer: Tensor, start: int, tensor: Tensor) -> Tensor:
    """Room for a tensor in a buffer of bytes, with its strides if they leave no gaps."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return buffer[start : start + tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, strides)
