"""Blocks of which the backward pass recomputes what the forward pass did not keep, and whose weights come when needed.

`torch.utils.checkpoint` does the work (not reentrant: it stops as soon as the last tensor that the backward pass needs is
there again). Here are its surroundings: attention's outputs kept, what is kept waiting in host memory, and the
announcements to a block swap.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from wangen.runtime.fast.attention import Stash
from wangen.runtime.fast.dit_functions import apply

Step = Callable[[Tensor], Tensor]


class BlockSwap(Protocol):
    """Weights that are on the device only around their use."""

    @property
    def swapped(self) -> Collection[int]:
        """The numbers of the blocks that it concerns."""

    def enter(self, index: int, *, backward: bool) -> None:
        """The block's weights are needed from now on, for its forward pass or for recomputation and backward pass."""

    def leave(self, index: int, *, backward: bool) -> None:
        """They are not needed any more."""


class HostMemory:
    """Tensors that wait in host memory between the forward and the backward pass, fetched one ahead of their use.

    On CUDA the host memory is pinned and the copies run on a stream of their own; on the CPU they are plain copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device)
        self._waiting: list[_Waiting] = []

    @contextlib.contextmanager
    def keeping(self, tensor: Tensor) -> Iterator[None]:
        """While it runs, autograd's hold on this tensor is a hold on its copy."""
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: self._send(saved) if saved is tensor or _same(saved, tensor) else saved, self._get
        ):
            yield

    def _send(self, tensor: Tensor) -> "_Waiting":
        waiting = _Waiting(tensor, self._stream, len(self._waiting))
        self._waiting.append(waiting)
        return waiting

    def _get(self, kept: "Tensor | _Waiting") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.number > 0:
            self._waiting[kept.number - 1].fetch()
        return kept.take()


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


class _Waiting:
    """One tensor in host memory."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None, number: int) -> None:
        self.number = number
        self._device = tensor.device
        self._stream = stream
        self._back: Tensor | None = None
        with _on(stream):
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
            self._host.copy_(tensor, non_blocking=stream is not None)
        if stream is not None:
            tensor.record_stream(stream)

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._back is None:
            with _on(self._stream):
                self._back = self._host.to(self._device, non_blocking=True, copy=True)

    def take(self) -> Tensor:
        """The tensor on its device, in time for what is asked of the device next."""
        self.fetch()
        tensor, self._back = self._back, None
        assert tensor is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            tensor.record_stream(current)
        return tensor


@contextlib.contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on a stream, after what the current one was asked for so far; nothing on the CPU."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


class LeaveAfterBackward(torch.autograd.Function):
    """Nothing, but that it tells when the backward pass has come through to here."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tell: Callable[[], None]) -> Tensor:
        """(T, D) -> the same."""
        ctx.tell = tell
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The same."""
        ctx.tell()
        return gradients[0], None


class Announced:
    """A block that tells a block swap when it begins and ends, forward and backward.

    Attributes:
        again: what runs now is the recomputation, after which the weights stay for the backward pass.
    """

    def __init__(self, block: Step, index: int, swap: BlockSwap) -> None:
        self._block, self._index, self._swap = block, index, swap
        self.again = False

    def __call__(self, hidden: Tensor) -> Tensor:
        """The block's forward pass or its recomputation, (T, D) -> (T, D)."""
        self._swap.enter(self._index, backward=self.again)
        output = self._block(hidden)
        if not self.again:
            self._swap.leave(self._index, backward=False)
        return output

    def done(self) -> None:
        """The backward pass is through."""
        self._swap.leave(self._index, backward=True)

    def begin_again(self, *, tells: bool) -> None:
        """The recomputation begins; unless its input `tells` when the backward pass is through, its end does."""
        self.again = True
        if not tells:  # autograd offers no other way to be called at the end of a backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self.done)


def recomputed(
    block: Step,
    hidden: Tensor,
    *,
    stash: Stash | None = None,
    host: HostMemory | None = None,
    keep_random_state: bool = False,
    before: Callable[[], None] = lambda: None,
) -> Tensor:
    """Run a block and keep nothing of it but its input.

    Args:
        block: (T, D) -> (T, D).
        hidden: its input.
        stash: keeps the outputs of self attention.
        host: where the input waits.
        keep_random_state: the block draws random numbers from torch's global state (dropout).
        before: called when the recomputation begins.
    """
    tells = hidden.requires_grad
    if isinstance(block, Announced) and tells:
        hidden = apply(LeaveAfterBackward, hidden, block.done)

    @contextlib.contextmanager
    def again(inner: AbstractContextManager[None]) -> Iterator[None]:
        before()
        if isinstance(block, Announced):
            block.begin_again(tells=tells)
        with inner:
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first, second = stash.contexts() if stash is not None else (contextlib.nullcontext(), contextlib.nullcontext())
        return first, again(second)

    with host.keeping(hidden) if host is not None else contextlib.nullcontext():
        output: Tensor = checkpoint(
            block, hidden, use_reentrant=False, preserve_rng_state=keep_random_state, context_fn=contexts
        )
    return output
