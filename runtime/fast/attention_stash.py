"""Attention's outputs held from a checkpointed forward pass to its recomputation, if need be in host memory."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from wangen.runtime.fast.host_copies import HostCopy, host_copies


class Stash:
    """What the calls of `Kernel.kept` in one checkpointed region computed.

    One stash serves one forward pass of one region, while it is `recording`, and its one recomputation, while it is
    `replaying`.

    Args:
        offload: what is held waits in host memory (`host_copies`).
    """

    def __init__(self, *, offload: bool = False) -> None:
        self._offload = offload
        self._held: list[_Held] = []
        self._mode: Literal["", "record", "replay"] = ""

    @property
    def records(self) -> bool:
        """Whether what is computed now shall be held."""
        return self._mode == "record"

    @property
    def replays(self) -> bool:
        """Whether what is asked for now was computed before."""
        return self._mode == "replay"

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
        for held in self._held:
            if held.copy is not None:
                held.copy.fetch()

    def put(self, tensors: Sequence[Tensor | None]) -> None:
        """Hold the tensors of one call."""
        # Of the output itself the graph would be held too, and so the stash by itself.
        held = _Held([None if tensor is None else tensor.detach() for tensor in tensors])
        if self._offload:
            held.offload()
        self._held.append(held)

    def take(self) -> list[Tensor | None]:
        """The tensors of the next call, with the strides that they had; they are held no longer."""
        assert self._held, "a region is recomputed once, and calls attention as often as in its forward pass"
        return self._held.pop(0).take()


@dataclass
class _Held:
    """One call's tensors. Those that wait in the host's memory are None here; `copy` has them, `moved` their places."""

    tensors: list[Tensor | None]
    moved: Sequence[int] = ()
    copy: HostCopy | None = None

    def offload(self) -> None:
        large = {place: tensor for place, tensor in enumerate(self.tensors)
                 if tensor is not None and tensor.is_floating_point()}  # fmt: skip  # the rest is dropout's state
        self.moved = tuple(large)
        (device,) = {tensor.device for tensor in large.values()}
        self.copy = host_copies(device).send(list(large.values()))
        for place in large:
            self.tensors[place] = None

    def take(self) -> list[Tensor | None]:
        if self.copy is not None:
            for place, tensor in zip(self.moved, self.copy.take(), strict=True):
                self.tensors[place] = tensor
        return self.tensors
