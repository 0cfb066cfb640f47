"""The trainable parameters as one buffer per group, so that clipping, zeroing and AdamW are one operation each."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from wangen.generator.errors import WangenError

OTHER_ADAPTER = "give the rank, targets and kind of adapter it was trained with, or --fresh"

ALIGNMENT = 256
"""Elements. Every parameter starts at a multiple of it: 1 KiB in float32, which suits every kernel, and the block in
which 8-bit optimizers quantise, so that no block holds values of two parameters."""


@dataclass(frozen=True)
class Place:
    """Where a parameter lies.

    Attributes:
        buffer: number of its buffer.
        start: its first element there.
        shape: its own.
    """

    buffer: int
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """Behind its last element."""
        return self.start + math.prod(self.shape)

    @property
    def end(self) -> int:
        """Behind its padding: where the next one may start."""
        return self.stop + -self.stop % ALIGNMENT


class FlatParameters:
    """Parameters that live side by side: each is a view into its group's buffer, its gradient into another.

    Those that are anchored stay where they are, and are buffers by themselves.

    A gradient is there from the start and autograd adds to it in place, so it must be zeroed, never set to None.
    What pads the buffers stays zero in weights and gradients.

    Attributes:
        parameters: by name; leaves of autograd as before, only their storage moved.
        places: where each lies, by name, in the order of the buffers.
        num_joint: so many buffers, the first ones, are those of the groups.
        weights: a buffer (elements,) in float32 per group, then one per anchored parameter.
        gradients: of the same sizes.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        groups: Sequence[Sequence[str]],
        anchored: Collection[str] = (),
    ) -> None:
        """Move the parameters, keeping their values.

        Args:
            parameters: trainable, in float32, all on one device.
            groups: their names, each in one group; buffers keep this order.
            anchored: names of contiguous ones whose storage somebody else reads.
        """
        assert sorted(parameters) == sorted(name for group in groups for name in group)
        assert {(p.dtype, p.device) for p in parameters.values()} == {(torch.float32, self._device(parameters))}
        self.parameters = {name: parameters[name] for group in groups for name in group}
        self.num_joint = len(groups)
        self.places: dict[str, Place] = {}
        sizes = []
        for number, names in enumerate(groups):
            end = 0
            for name in (name for name in names if name not in anchored):
                self.places[name] = Place(number, end, parameters[name].shape)
                end = self.places[name].end
            sizes.append(end)
        self.weights = [torch.zeros(size, device=self._device(parameters)) for size in sizes]
        for name in (name for name in self.parameters if name in anchored):
            self.places[name] = Place(len(self.weights), 0, parameters[name].shape)
            self.weights.append(parameters[name].detach().view(-1))
        self.gradients = [torch.zeros_like(buffer) for buffer in self.weights]
        gradients = self.views(self.gradients)
        for name, view in self.views(self.weights).items():
            parameter = self.parameters[name]
            if name not in anchored:
                with torch.no_grad():
                    view.copy_(parameter)
                parameter.data = view
            parameter.grad = gradients[name]

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self.weights[0].device

    def is_anchored(self, name: str) -> bool:
        """Whether a parameter is a buffer by itself."""
        return self.places[name].buffer >= self.num_joint

    def views(self, buffers: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Buffers of the weights' sizes, of any type, cut into tensors of the parameters' shapes, by name."""
        return {
            name: buffers[place.buffer][place.start : place.stop].view(place.shape)
            for name, place in self.places.items()
        }

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor], where: str) -> None:
        """Take over saved values by name.

        Raises:
            WangenError: they are of an adapter with other modules or another rank.
        """
        if {name: tensor.shape for name, tensor in weights.items()} != {n: p.shape for n, p in self.places.items()}:
            raise WangenError("the training state is of an adapter with other modules or another rank", where=where,
                              cure=OTHER_ADAPTER)  # fmt: skip
        for name, view in self.views(self.weights).items():
            view.copy_(weights[name])

    def is_attached(self) -> bool:
        """Whether every parameter and gradient still is a view of the buffers: moving a module replaces them."""
        weights = [buffer.data_ptr() for buffer in self.weights]
        gradients = [buffer.data_ptr() for buffer in self.gradients]
        return all(
            parameter.grad is not None
            and parameter.data_ptr() == weights[place.buffer] + 4 * place.start
            and parameter.grad.data_ptr() == gradients[place.buffer] + 4 * place.start
            for parameter, place in ((self.parameters[name], place) for name, place in self.places.items())
        )

    @staticmethod
    def _device(parameters: Mapping[str, torch.nn.Parameter]) -> torch.device:
        return next(iter(parameters.values())).device
