"""Blocks of which the forward pass keeps nothing but the input, and whose weights are on the device only around use.

`torch.utils.checkpoint` would do it too, but with hooks on every tensor that a block would have kept, which cost a
small step some percent of its time. Here one function holds the input and runs the block again, and what follows from
knowing the block is said outright: attention's outputs come back from a stash, the last product is left out, a block
swap is told when the weights are needed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from wangen.runtime.fast.attention import Stash
from wangen.runtime.fast.dit_functions import anchor, apply
from wangen.runtime.fast.dit_shared import StepBlock
from wangen.runtime.fast.host_copies import HostCopy, host_copies
from wangen.runtime.memory.blocks import BlockWeights
from wangen.runtime.models.compute import Compute


@dataclass(frozen=True)
class Presence:
    """Around its passes, the weights of one block are on the device.

    Attributes:
        swap: None if they always are.
        index: the block's number.
    """

    swap: BlockWeights | None
    index: int

    @contextlib.contextmanager
    def during(self, *, backward: bool) -> Iterator[None]:
        """The block's forward pass, or its recomputation and backward pass."""
        if self.swap is not None:
            self.swap.enter(self.index, backward=backward)
        try:
            yield
        finally:  # a sample that found no memory is left out, and the next one needs the block's place
            if self.swap is not None:
                self.swap.leave(self.index, backward=backward)


class InHostMemory:
    """The inputs of recomputed blocks wait in host memory; each is fetched a block ahead of its recomputation."""

    def __init__(self, device: torch.device) -> None:
        self._copies = host_copies(device)
        self._waiting: list[HostCopy] = []

    def send(self, tensor: Tensor) -> int:
        """Start to copy a tensor there; its number."""
        self._waiting.append(self._copies.send([tensor]))
        return len(self._waiting) - 1

    def take(self, number: int) -> Tensor:
        """A tensor back on the device; the one that was sent before it comes along beside the computation."""
        if number > 0:
            self._waiting[number - 1].fetch()
        (tensor,) = self._waiting[number].take()
        return tensor


class RandomState:
    """PyTorch's generators of numbers, of the host and of one device, as they are when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._host = torch.get_rng_state()
        on_device = device.type != "cpu"
        self._devices, self._states = get_device_states(torch.empty(0, device=device)) if on_device else ([], [])

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """While it runs, they draw what was drawn after they were noted."""
        devices = {"device_type": self._kind} if self._devices else {}
        with torch.random.fork_rng(self._devices, **devices):
            torch.set_rng_state(self._host)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._kind)
            yield


@dataclass(frozen=True)
class Recomputation:
    """How one block of one step is run, and run again.

    Attributes:
        block: itself.
        presence: of its weights.
        stash: keeps the outputs of self attention; None keeps nothing.
        host: where its input waits; None leaves it on the device.
        earlier: the stash of the block before, whose outputs are fetched while this one computes.
    """

    block: StepBlock
    presence: Presence
    stash: Stash | None
    host: InHostMemory | None
    earlier: Stash | None

    def __call__(self, hidden: Tensor) -> Tensor:
        """The block's forward pass, (T, D) -> (T, D)."""
        # What it takes beside the tokens has a gradient only where something before the blocks is trained.
        beside = [part if part is not None and part.requires_grad else None for part in self.block.beside]
        recording = contextlib.nullcontext() if self.stash is None else self.stash.recording()
        with self.presence.during(backward=False), recording:
            output: Tensor = apply(_Recomputed, anchor(hidden.device), self, hidden, *beside)
        return output


class Passage:
    """One forward pass through a transformer's blocks: which are computed again later, and what is kept of them.

    Args:
        compute: what is recomputed, what waits in host memory.
        swap: brings the weights of the blocks in `swap.swapped`; those blocks are always recomputed.
        num_blocks: of the transformer.
        device: where it computes.
    """

    def __init__(self, compute: Compute, swap: BlockWeights | None, num_blocks: int, device: torch.device) -> None:
        self._compute = compute
        self._swap = swap
        self._first_free = 0 if compute.checkpointing == "none" else num_blocks - compute.free_blocks
        self._host = InHostMemory(device) if compute.offload and torch.is_grad_enabled() else None
        self._earlier: Stash | None = None

    def swaps(self, index: int) -> bool:
        """Whether a block's weights are on the device only around its passes."""
        return self._swap is not None and index in self._swap.swapped

    def recomputes(self, index: int, module: nn.Module, *, has_gradient: bool) -> bool:
        """Whether a block is computed again in the backward pass.

        Args:
            index: its number.
            module: itself.
            has_gradient: something that goes into it requires one.
        """
        if not torch.is_grad_enabled() or not (self.swaps(index) or index < self._first_free):
            return False
        return has_gradient or any(parameter.requires_grad for parameter in module.parameters())

    def stash(self, recomputes: bool) -> Stash | None:
        """Where the outputs of the next block's self attention are kept, if they are."""
        keeps = recomputes and self._compute.checkpointing == "selective"
        return Stash(offload=self._compute.offload) if keeps else None

    def run(self, index: int, block: StepBlock, hidden: Tensor, stash: Stash | None, *, recomputes: bool) -> Tensor:
        """(T, D) -> (T, D), the blocks in their order; `stash` is what the block was made with."""
        presence = Presence(self._swap if self.swaps(index) else None, index)
        if recomputes:
            again = Recomputation(block, presence, stash=stash, host=self._host, earlier=self._earlier)
            output = again(hidden)
        else:
            with presence.during(backward=False):
                output = block(hidden)
        self._earlier = stash
        return output


class _Recomputed(torch.autograd.Function):
    """A block that keeps its input, and is run again in the backward pass to get its gradients.

    Those of its parameters are added to them there and then, as by any other backward pass.
    """

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, plan: Recomputation, hidden: Tensor, *beside: Tensor | None) -> Tensor:
        """(T, D) -> (T, D).

        Args:
            ctx: autograd's.
            _anchor: see `anchor`.
            plan: of the block.
            hidden: its input.
            beside: those parts of the block's `beside` that require a gradient.
        """
        ctx.plan, ctx.number = plan, None
        ctx.random = RandomState(hidden.device) if plan.block.draws else None
        # Trained gates are computed in another way, by whether they have a gradient: so they get one here as well.
        with torch.set_grad_enabled(plan.block.trains_numbers):
            output = plan.block(hidden).detach()
        if plan.host is not None:
            ctx.number = plan.host.send(hidden)
        ctx.save_for_backward(hidden if plan.host is None else None, *beside)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """(T, D) -> the gradients of the input and of what is beside it."""
        plan: Recomputation = ctx.plan
        hidden, *beside = ctx.saved_tensors
        if plan.host is not None:
            hidden = plan.host.take(ctx.number)
        if plan.earlier is not None:
            plan.earlier.fetch()
        with plan.presence.during(backward=True):
            to_hidden, *to_beside = _back(ctx, gradient, hidden, beside)
        return None, None, to_hidden, *to_beside


def _back(ctx: Any, gradient: Tensor, hidden: Tensor, beside: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The gradients of a block's input and of what is beside it."""
    block: StepBlock = ctx.plan.block
    with torch.autocast(gradient.device.type, enabled=False), _as_before(ctx):
        found = block.recomputed_back(gradient, hidden.detach(), has_gradient=ctx.needs_input_grad[2])
        if found is not None:
            return *found, *(None for _ in beside)
        start = hidden.detach().requires_grad_(ctx.needs_input_grad[2])
        leaves = [None if part is None else part.detach().requires_grad_() for part in beside]
        own = block.beside
        trained = {name: leaf for name, leaf in zip(own._fields, leaves, strict=True) if leaf is not None}
        with torch.enable_grad():
            output = block.again(start, own._replace(**trained))
    if output.requires_grad:  # else all of its adapters were left out (`module_dropout`), and nothing before is trained
        torch.autograd.backward(output, gradient)
    return [None if leaf is None else leaf.grad for leaf in (start, *leaves)]


@contextlib.contextmanager
def _as_before(ctx: Any) -> Iterator[None]:
    """A recomputation finds attention's outputs and the random numbers of the forward pass again."""
    stash: Stash | None = ctx.plan.stash
    with (
        contextlib.nullcontext() if stash is None else stash.replaying(),
        contextlib.nullcontext() if ctx.random is None else ctx.random.again(),
    ):
        yield
