"""A stand-in for CUDA graphs where there is no GPU: it notes operations, and does them again on the same tensors.

As a GPU does, it computes nothing while it notes: what was changed meanwhile is put back, and what was made holds NaN
until it is replayed. Whoever hands a replay new numbers anywhere but in the tensors it reads will find the old ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Graph(TorchDispatchMode):
    """A recording of operations."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable, Any, Any, Any]] = []
        self._made: dict[int, torch.UntypedStorage] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.num_replays = 0
        self.memory: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name)):
                    self._note(tensor)
        result = func(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = storage
        # Detached, so that what autograd knows of this pass is not held for good.
        self._calls.append((func, *tree_map(_detached, (args, kwargs, result))))
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made and storage._cdata not in self._before:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._before[storage._cdata] = whole, whole.clone()

    def end(self) -> None:
        """Nothing was computed."""
        for whole, before in self._before.values():
            whole.copy_(before)
        for _, args, _, result in self._calls:
            for tensor in _tensors(result):
                fresh = tensor.untyped_storage()._cdata in self._made
                if fresh and tensor.is_floating_point() and not any(tensor is one for one in _tensors(args)):
                    tensor.data.fill_(float("nan"))  # which autograd does not count as a change

    def replay(self) -> None:
        """Do it all again."""
        self.num_replays += 1
        with torch.no_grad():
            for func, args, kwargs, result in self._calls:
                found = func(*args, **kwargs)
                for old, new in zip(_tensors(result), _tensors(found), strict=True):
                    if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                        old.copy_(new)

    def pool(self) -> Any:
        """What memory it was recorded in."""
        return self.memory


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


class Generator:
    """As the one of a GPU: a recording that is broken off leaves it drawing for that recording."""

    def __init__(self) -> None:
        self.is_recorded = False

    def manual_seed(self, seed: int) -> None:
        """Nothing is drawn from it."""

    def clone_state(self) -> "Generator":
        """One with the same state."""
        clone = Generator()
        clone.is_recorded = self.is_recorded
        return clone

    def graphsafe_set_state(self, other: "Generator") -> None:
        """Take the state of another."""
        self.is_recorded = other.is_recorded


@contextmanager
def recording(graph: Graph, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    """As `torch.cuda.graph`."""
    assert capture_error_mode == "thread_local", "other threads pin memory meanwhile"
    graph.memory = pool
    (generator,) = torch.cuda.default_generators
    generator.is_recorded = True
    try:
        with graph:
            yield
    finally:
        graph.end()
    generator.is_recorded = False


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Put it in the place of PyTorch's, and let models on the CPU be such as a GPU with little memory left has them."""
    from wangen.runtime.fast import dit, dit_text, graphs  # here: the stand-in for a GPU is loaded before all of this

    patch.setattr(graphs, "spare_bytes", lambda _: 1 << 40)
    patch.setattr(graphs, "is_roomy", lambda _: False)
    patch.setattr(dit, "rows_step", lambda *_, **__: dit_text.GRAPH_ROWS_STEP)
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", recording)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
    patch.setattr(torch.cuda, "default_generators", (Generator(),))
    patch.setattr(torch.cuda, "current_stream", lambda *_: None)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "set_stream", lambda _: None)
