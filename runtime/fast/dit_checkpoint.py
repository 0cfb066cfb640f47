"""Blocks of which the backward pass recomputes what the forward pass did not keep, and whose weights come when needed.

`torch.utils.checkpoint` does the work (not reentrant: it stops as soon as the last tensor that the backward pass needs
is there again). Here are its surroundings: attention's outputs kept, what is kept waiting in host memory, and the
announcements to a block swap.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from wangen.runtime.fast.attention import Stash
from wangen.runtime.fast.dit_functions import apply
from wangen.runtime.fast.host_copies import HostCopy, host_copies

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


class InHostMemory:
    """The inputs of recomputed blocks wait in host memory; each is fetched a block ahead of its recomputation."""

    def __init__(self, device: torch.device) -> None:
        self._copies = host_copies(device)
        self._waiting: list[HostCopy] = []

    @contextlib.contextmanager
    def keeping(self, tensor: Tensor) -> Iterator[None]:
        """While it runs, autograd's hold on this tensor is a hold on its copy."""
        with torch.autograd.graph.saved_tensors_hooks(partial(self._send, tensor.data_ptr(), tensor.shape), self._get):
            yield

    def _send(self, pointer: int, shape: torch.Size, saved: Tensor) -> Tensor | int:
        """The number of its copy, if it is the tensor there; anything else as it is.

        Autograd keeps this hook as long as the other: to know the tensor itself would be to hold it.
        """
        if saved.data_ptr() != pointer or saved.shape != shape:
            return saved
        self._waiting.append(self._copies.send([saved]))
        return len(self._waiting) - 1

    def _get(self, kept: Tensor | int) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept > 0:
            self._waiting[kept - 1].fetch()
        (tensor,) = self._waiting[kept].take()
        return tensor


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


class EnterBeforeBackward(torch.autograd.Function):
    """Nothing, but that it tells when the backward pass arrives at a block.

    The last layers of a block may be frozen and keep nothing: then their weights are needed before anything that was
    kept is, which is what begins the recomputation.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, tell: Callable[[], None]) -> Tensor:
        """(T, D) -> the same."""
        ctx.tell = tell
        return output.view_as(output)

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
        if self.again:  # the backward pass has entered before
            return self._block(hidden)
        self._swap.enter(self._index, backward=False)
        output = self._block(hidden)
        self._swap.leave(self._index, backward=False)
        return output

    def returned_to(self) -> None:
        """The backward pass is here; its recomputation begins when something that was not kept is asked for."""
        self._swap.enter(self._index, backward=True)

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
    host: InHostMemory | None = None,
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
    if isinstance(block, Announced) and output.requires_grad:
        output = apply(EnterBeforeBackward, output, block.returned_to)
    return output
