"""CUDA graphs of a step's blocks: what the processor hands to the GPU kernel by kernel is handed over at once.

A step of small pictures is some ten thousand kernels, each done sooner than Python and PyTorch can start it: the GPU
waits. So the blocks' forward pass and their backward pass are recorded, once for each shape of what goes in, and from
then on replayed: the same kernels on the same addresses. What goes in is copied to where they read it; the gradients of
the adapters are added to theirs, which stay where they are.

A shape runs a few times without: kernels are compiled and chosen then, which no recording may do.
"""

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wangen.runtime.devices import is_out_of_memory, is_roomy, spare_bytes
from wangen.runtime.fast.dit_functions import anchor, apply

log = logging.getLogger("wangen")

Inputs = TypeVar("Inputs", bound=tuple[Tensor | None, ...])
"""What goes into the blocks beside their weights: a named tuple, whose first are the tokens (T, D)."""

RUNS_BEFORE = 2
"""Passes of a shape before it is recorded: it has to be compiled for, and a rare one is not worth a recording."""

MOST_SHAPES = 32
"""Each holds the arguments of some ten thousand kernels: 30 MB of the host's memory and 10 of the GPU's, for 1.3B."""

MOST_MOVES = 4
"""So often weights may be found elsewhere before anything is replayed twice: a recording takes longer than a step."""

BESIDE = 512 * 1024**2
"""Bytes that have to be left for what a step does beside the blocks."""

_all: "weakref.WeakSet[Graphs]" = weakref.WeakSet()


def release() -> None:
    """Let go of all graphs and their memory; they are recorded again when they are next wanted."""
    for graphs in _all:
        graphs.release()


def make_room() -> None:
    """Let go of those on GPUs that are nearly full: clips that are judged, or a decoder, may want their memory."""
    for graphs in _all:
        if graphs.device and not is_roomy(graphs.device):
            graphs.release()


def give_up() -> bool:
    """Let go of them for good, where memory is too small beside them.

    Returns:
        Whether there were any.
    """
    had = [graphs for graphs in _all if graphs.are_there]
    for graphs in had:
        graphs.give_up("too little memory is left beside them")
    return bool(had)


@dataclass(frozen=True)
class Recorded:
    """The graphs of one shape.

    Attributes:
        inputs: where the forward pass reads.
        output: where it writes, (T, D).
        gradient: of the output, where the backward pass reads it.
        forward: the graph of the forward pass.
        backward: that of the backward pass.
    """

    inputs: Sequence[Tensor | None]
    output: Tensor
    gradient: Tensor
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph

    def run(self, inputs: Sequence[Tensor | None]) -> Tensor:
        """The blocks' output (T, D), in the place where the next call writes its own."""
        for place, tensor in zip(self.inputs, inputs, strict=True):
            if place is not None and tensor is not None:
                place.copy_(tensor)
        self.forward.replay()
        return self.output.detach()

    def back(self, gradient: Tensor) -> None:
        """Add the gradients of the last `run` to those of the adapters."""
        self.gradient.copy_(gradient)
        self.backward.replay()


class Graphs:
    """The graphs of one transformer's blocks.

    Args:
        transformer: its weights and the gradients of its adapters are where they were, step by step. Those of an expert
            that was away may come back to other places: then its graphs are recorded anew, a few times.
    """

    def __init__(self, transformer: nn.Module) -> None:
        self._transformer = transformer
        self._runs: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, Recorded] = {}
        self._parameters: list[nn.Parameter] = []  # as they were at a recording, and where they lay
        self._addresses: list[int] = []
        self._num_moves = 0
        self._open: weakref.ref[_Pass] | None = None
        self._has_given_up = self._has_told = False
        _all.add(self)

    def run(self, inputs: Inputs, key: Hashable, blocks: Callable[[Inputs], Tensor]) -> Tensor:
        """What `blocks` make of the inputs, (T, D), by a graph where there is one.

        Args:
            inputs: of which none has a gradient; some may be missing.
            key: what of the step is no tensor, and makes another graph.
            blocks: inputs -> (T, D).
        """
        recorded = self._graph_for(inputs, key, blocks)
        if recorded is None:
            return blocks(inputs)
        one = _Pass()
        self._open = weakref.ref(one)
        output: Tensor = apply(_Replayed, anchor(recorded.output.device), recorded, one, *inputs)
        return output

    @property
    def are_there(self) -> bool:
        """Whether any is recorded."""
        return bool(self._recorded)

    @property
    def device(self) -> torch.device | None:
        """Where they are; None where there are none."""
        return next((recorded.output.device for recorded in self._recorded.values()), None)

    def release(self) -> None:
        """Let go of the graphs and their memory, when nothing runs that might use it."""
        if self.device and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._recorded.clear()

    def give_up(self, reason: str) -> None:
        """Let go of them and record no more."""
        log.warning("  no CUDA graphs: %s; the steps are the same without, and slower", reason)
        self.release()
        self._has_given_up = True

    def _graph_for(self, inputs: Inputs, key: Hashable, blocks: Callable[[Inputs], Tensor]) -> Recorded | None:
        if self._has_given_up or (self._open is not None and self._open() is not None):
            return None  # a pass that is still to go back would find what this one writes
        key = key, *(None if one is None else (one.shape, one.dtype) for one in inputs)
        self._runs[key] += 1
        if self._runs[key] <= RUNS_BEFORE:
            return None
        if self._recorded and self._where() != self._addresses:
            self._num_moves += 1
            self.release()
            if self._num_moves > MOST_MOVES:
                self.give_up("the weights are never where they were")
                return None
        if key in self._recorded:
            self._num_moves = 0
        elif len(self._recorded) < MOST_SHAPES:
            self._record(inputs, key, blocks)
        return self._recorded.get(key)

    def _where(self) -> list[int]:
        """The addresses of all weights and of the gradients there are."""
        gradients = (parameter.grad for parameter in self._parameters if parameter.requires_grad)
        return [one.data_ptr() for one in (*self._parameters, *gradients) if one is not None]

    def _record(self, inputs: Inputs, key: Hashable, blocks: Callable[[Inputs], Tensor]) -> None:
        """Record a shape; where that cannot be, or leaves no memory, none."""
        if not self._recorded:
            self._parameters = list(self._transformer.parameters())
        try:
            with torch.cuda.device_of(inputs[0]):  # type: ignore[no-untyped-call]
                recorded = self._recording(inputs, blocks)
        except (RuntimeError, OSError, AssertionError, MemoryError) as error:
            self.give_up("there is too little memory" if is_out_of_memory(error) else f"{error!r:.200}")
            return
        if recorded is None:
            self._has_given_up = True
            return
        if spare_bytes(recorded.output.device) < BESIDE:
            self.give_up("too little memory would be left")
            return
        self._recorded[key] = recorded
        if not self._has_told:
            log.info("  small steps are replayed as CUDA graphs from here on (--no_cuda_graphs: they are not)")
            self._has_told = True

    def _recording(self, inputs: Inputs, blocks: Callable[[Inputs], Tensor]) -> Recorded | None:
        """The graphs of a shape; None where nothing in the blocks is trained."""
        places = [None if one is None else one.detach().clone() for one in inputs]
        made: Callable[..., Inputs] = type(inputs)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # All share their memory, for no two are between their passes at once.
        pool = next((one.forward.pool() for graphs in _all for one in graphs._recorded.values()), None)
        pool = pool or torch.cuda.graph_pool_handle()
        with _capture(forward, pool):
            output = blocks(made(*places))
        if not output.requires_grad:
            return None
        gradient = torch.empty_like(output)
        with _capture(backward, pool):
            torch.autograd.backward(output, gradient)
        self._addresses = self._where()
        return Recorded(places, output.detach(), gradient, forward, backward)


@contextlib.contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record what is computed within; where that fails, all but what was recorded before is as it was."""
    stream, device, is_whole = torch.cuda.current_stream(), torch.cuda.current_device(), False
    generator = torch.cuda.default_generators[device]
    random = generator.clone_state()
    try:
        # Other threads may pin memory meanwhile, so their calls are none of a recording's business.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
        is_whole = True
    finally:
        torch.clear_autocast_cache()  # of casts that were recorded and not computed, or that have no gradient
        if not is_whole:
            # What PyTorch leaves behind: its own stream, a generator that draws for the graph only, and, in some
            # versions, all new memory going to the pool.
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(random)
            with contextlib.suppress(RuntimeError, AttributeError, TypeError):
                torch._C._cuda_endAllocateToPool(device, pool)


class _Pass:
    """A forward pass whose backward pass may still come: as long as this is there."""


class _Replayed(torch.autograd.Function):
    """The blocks by their graphs."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, recorded: Recorded, one: _Pass, *inputs: Tensor | None) -> Tensor:
        """-> (T, D)."""
        ctx.recorded, ctx.one = recorded, one
        return recorded.run(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """(T, D) -> nothing: what went in has no gradient, and those of the adapters are added to theirs."""
        recorded: Recorded = ctx.recorded
        recorded.back(gradient)
        ctx.recorded = ctx.one = None
        return None, None, None, *(None for _ in recorded.inputs)
