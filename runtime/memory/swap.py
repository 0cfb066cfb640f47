"""Block swap: frozen weights of some blocks wait in host memory and are copied to the device ahead of need.

The frozen tensors of a block lie one behind the other in one buffer of host memory (pinned on CUDA), so that a block
is one copy. A few device buffers, the ring, receive them: while one block computes, the next one's copy runs on a
stream of its own. Nothing is copied back, for frozen weights do not change; what trains stays on the device.

The order of need is known: forward, then backward from the last block to the first, then forward again. The ring holds
what comes next in it; so the last blocks of the forward pass stay for the backward pass, and are copied once.
"""

import contextlib
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from mmap import PAGESIZE
from typing import Any, Protocol

import torch
from torch import nn

from wangen.generator.train_refusals import not_so_many_swapped
from wangen.runtime.memory.blocks import blocks_of

log = logging.getLogger("wangen")

ALIGNMENT = 512
"""Bytes: where each tensor of a block begins in its buffer, as the device's own allocator has it."""


class Lane(Protocol):
    """How a host buffer gets to the device beside the computation; an event is whatever the lane makes of it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        """Start a copy once the event `after` has come; returns the event of its end."""

    def wait(self, event: Any) -> None:
        """Let the computation that is queued from now on wait for an event."""

    def mark(self) -> Any:
        """The event of the end of what has been queued to be computed."""


class DirectLane:
    """Copies at once: for a device whose memory is the host's."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        """As `Lane`."""
        target.copy_(source)

    def wait(self, event: Any) -> None:
        """As `Lane`."""

    def mark(self) -> Any:
        """As `Lane`."""


class CudaLane:
    """Copies on a stream of their own; no call waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        """As `Lane`."""
        self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event: Any) -> None:
        """As `Lane`."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def mark(self) -> Any:
        """As `Lane`."""
        return torch.cuda.current_stream(self.device).record_event()


@dataclass(frozen=True)
class Piece:
    """One frozen tensor: where its storage lies in a buffer of bytes, and where it lies in its storage."""

    tensor: torch.Tensor
    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in a buffer."""
        storage = buffer[self.start : self.start + self.num_bytes].view(self.dtype)
        return storage.as_strided(self.shape, self.strides, storage.storage_offset() + self.offset)


class Master:
    """Frozen tensors in one buffer of host memory; the tensors themselves are emptied.

    Tensors that share memory, as three weights of one product do, share it in every copy of the buffer.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.device = device
        self.pieces: list[Piece] = []
        starts: dict[int, int] = {}
        end = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in starts:
                starts[storage.data_ptr()] = end
                end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
            self.pieces.append(
                Piece(
                    tensor=tensor,
                    start=starts[storage.data_ptr()],
                    num_bytes=storage.nbytes(),
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    strides=tensor.stride(),
                    offset=int(tensor.storage_offset()),
                )
            )
        self.buffer = host_buffer(end, device)
        for piece in self.pieces:
            piece.view(self.buffer).copy_(piece.tensor)
        self.empty()

    def fill_from(self, buffer: torch.Tensor) -> None:
        """Let the tensors be views of a buffer that holds these bytes."""
        for piece in self.pieces:
            piece.tensor.data = piece.view(buffer)

    def empty(self) -> None:
        """Let the tensors hold nothing: who uses one now meets a wrong shape, not wrong numbers."""
        for piece in self.pieces:
            piece.tensor.data = torch.empty(0, dtype=piece.dtype, device=self.device)


@dataclass
class Slot:
    """One device buffer of the ring.

    Attributes:
        buffer: bytes, as many as the largest block has.
        free: the event after which it may be written.
        block: whose weights are in it or on their way; -1 for none.
        in_use: that block computes.
        ready: the event of the copy's end.
    """

    buffer: torch.Tensor
    free: Any
    block: int = -1
    in_use: bool = False
    ready: Any = None


class BlockSwap:
    """Puts a transformer on its device but for some blocks, and brings those in time.

    The transformer calls `enter` before a block computes (forward, or its recomputation before its backward pass) and
    `leave` when that is over. Swapped blocks must be recomputed in the backward pass, so that nothing which is kept
    from the forward pass holds a weight. Adapters are added, and what trains is marked by `requires_grad`, before this
    is made; the optimizer after it.

    Attributes:
        swapped: the numbers of the blocks that wait in host memory.
        device: where blocks compute.
        parked: whether nothing frozen is on the device.
    """

    def __init__(
        self,
        transformer: nn.Module,
        num_swapped: int,
        device: torch.device,
        *,
        free_blocks: int = 0,
        ring: int = 2,
        parked: bool = False,
        lane: Lane | None = None,
    ) -> None:
        """Move everything to where it belongs, a block at a time.

        Args:
            transformer: on the host or on the device.
            num_swapped: how many blocks to swap; 0 puts the whole transformer on the device.
            device: where to compute.
            free_blocks: so many of the last blocks are not recomputed and therefore not swapped.
            ring: device buffers, at least 1; 2 are enough for one block to compute while the next one comes.
            parked: leave what is frozen in host memory until `unpark`.
            lane: how to copy; None takes the one for the device.

        Raises:
            UsageError: more blocks are to be swapped than there are to be recomputed.
        """
        self.device, self.transformer = device, transformer
        self.blocks = list(blocks_of(transformer).children())
        self.swapped = spread(len(self.blocks) - free_blocks, num_swapped)
        self.lane = lane or (CudaLane(device) if device.type == "cuda" else DirectLane())
        self._order = sorted(self.swapped)
        self._ring = min(ring, num_swapped)
        self._masters = {index: Master(frozen_tensors(self.blocks[index]), device) for index in self._order}
        self._others: list[Master] = []  # of the rest of the transformer, from the first `park` on
        self._slots: list[Slot] = []
        if parked:
            self._take_over_others()
        transformer.to(device)  # the tensors of swapped blocks are empty by now
        self.parked = parked
        if not parked:
            self._start()

    def enter(self, index: int, *, backward: bool) -> None:
        """A block is about to compute: its weights are there, or the device will wait for them.

        Args:
            index: of the block; nothing happens for one that is not swapped.
            backward: for its recomputation and backward pass.
        """
        if index not in self.swapped:
            return
        assert self._slots, "the transformer is parked"
        slot = self._slot_of(index)
        if slot is None:
            self._fetch([index])
            slot = self._slot_of(index)
        assert slot, "more blocks compute at once than the ring holds"
        if not slot.in_use:
            self.lane.wait(slot.ready)
            self._masters[index].fill_from(slot.buffer)
            slot.in_use = True
        self._fetch([index, *self._next(index, backward)][: self._ring])

    def leave(self, index: int, *, backward: bool) -> None:
        """A block has computed: its weights are let go and the next ones called. Leaving twice is no error.

        Args:
            index: of the block.
            backward: as it was entered.
        """
        slot = self._slot_of(index)
        if slot is None or not slot.in_use:
            return
        self._masters[index].empty()
        slot.in_use, slot.free = False, self.lane.mark()
        self._fetch(self._next(index, backward)[: self._ring])

    def park(self) -> None:
        """Take every frozen weight off the device, for the time that another transformer needs it.

        The first time they are copied to the host and kept there; from then on parking costs nothing. What trains
        stays. Parking twice is no error.
        """
        if self.parked:
            return
        if not self._others:
            self._take_over_others()
        self._clear()

    def unpark(self) -> None:
        """Bring the weights back to the device; no error where they are there. Without room for all none is there."""
        if not self.parked:
            return
        try:
            for master in self._others:
                master.fill_from(master.buffer.to(self.device, copy=True))
            self._start()
        except (RuntimeError, MemoryError):
            self._clear()
            raise

    def _clear(self) -> None:
        """Let go of every frozen weight on the device."""
        for master in (*self._others, *self._masters.values()):
            master.empty()
        for slot in self._slots:
            if slot.block >= 0:
                self.lane.wait(slot.ready)  # its memory is used anew by computations queued from now on
        self._slots.clear()
        self.parked = True

    def _take_over_others(self) -> None:
        """Copy what is frozen and not swapped to host memory, and empty it."""
        kept = [block for index, block in enumerate(self.blocks) if index not in self.swapped]
        in_blocks = {id(tensor) for block in self.blocks for tensor in frozen_tensors(block)}
        rest = [tensor for tensor in frozen_tensors(self.transformer) if id(tensor) not in in_blocks]
        self._others = [Master(tensors, self.device) for tensors in (*map(frozen_tensors, kept), rest)]

    def _start(self) -> None:
        """Make the ring and call the first blocks."""
        self.parked = False
        size = max((master.buffer.numel() for master in self._masters.values()), default=0)
        for _ in range(self._ring):
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._slots.append(Slot(buffer, free=self.lane.mark()))
        self._fetch(self._order[: self._ring])

    def _slot_of(self, index: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.block == index), None)

    def _next(self, index: int, backward: bool) -> list[int]:
        """The swapped blocks in the order in which they will be needed, each once, after this one."""
        before = [number for number in reversed(self._order) if number < index]
        after = [number for number in self._order if number > index]
        if backward:
            return [*before, index, *after]
        if torch.is_grad_enabled():
            return [*after, index, *before]
        return [*after, *reversed(before), index]  # no backward pass comes: the next thing is another forward pass

    def _fetch(self, wanted: Sequence[int]) -> None:
        """Start copies of blocks that are not in the ring, into buffers that hold none of them."""
        for index in wanted:
            if self._slot_of(index):
                continue
            slot = next((slot for slot in self._slots if not slot.in_use and slot.block not in wanted), None)
            if slot is None:
                return
            source = self._masters[index].buffer
            slot.block, slot.ready = index, self.lane.copy(slot.buffer[: source.numel()], source, slot.free)


def spread(num_blocks: int, num_swapped: int) -> frozenset[int]:
    """Which blocks to swap: spread evenly, so that every copy has as much computation to hide behind as can be.

    Args:
        num_blocks: the first so many blocks are those that may be swapped.
        num_swapped: how many are.

    Raises:
        UsageError: there are not as many.

    >>> sorted(spread(8, 2)), sorted(spread(3, 3)), sorted(spread(40, 0))
    ([2, 6], [0, 1, 2], [])
    """
    if not 0 <= num_swapped <= num_blocks:
        raise not_so_many_swapped(num_swapped, num_blocks)
    return frozenset((2 * number + 1) * num_blocks // (2 * num_swapped) for number in range(num_swapped))


def frozen_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a module that do not train, each once."""
    found = {id(value): value for value in (*module.parameters(), *module.buffers()) if not value.requires_grad}
    return list(found.values())


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Host memory as uint8. For a GPU its pages are locked, which lets it copy while it computes.

    torch's own pinned memory comes in powers of two, half as much again for a block of 14B; so memory of the right
    size is registered instead, in whole pages, of which no two buffers may share one. If the system refuses, the memory
    stays pageable, and a warning says so once.

    Args:
        num_bytes: the length.
        device: to and from which it is copied; CUDA registers memory with the current GPU, which may be another one.
    """
    if device.type != "cuda" or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8)
    whole = -(-num_bytes // PAGESIZE) * PAGESIZE
    memory = torch.empty(whole + PAGESIZE, dtype=torch.uint8)
    buffer = memory[-memory.data_ptr() % PAGESIZE :][:num_bytes]
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(buffer.data_ptr(), whole, 0))
        if code == 0:
            weakref.finalize(buffer, _unregister, buffer.data_ptr(), device).atexit = False
        else:
            _forget_error(device)
            _warn_unpinned(code)
    return buffer


def _unregister(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _forget_error(device: torch.device) -> None:
    """Let CUDA report the failed call now: it would otherwise reappear at a later, innocent one."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)


@cache
def _warn_unpinned(code: int) -> None:
    log.warning(
        "  the system does not lock enough host memory for block swap (CUDA error %d): copies to the device will not "
        "run beside the computation. On Windows half of the memory can be locked; swap fewer blocks or quantise them",
        code,
    )
