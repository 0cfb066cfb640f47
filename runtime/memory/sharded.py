"""Frozen weights of a transformer's blocks spread over processes: FSDP2 and HSDP for the fast paths.

`torch.distributed.fsdp.fully_shard` splits each block's frozen weights; what trains stays whole everywhere, and its
gradients are added up as without. The fast paths call no module's forward, so FSDP's own hooks do not run: a fast path
says when a block's weights are needed, as it does for block swap, and they are gathered and let go by `unshard` and
`reshard`. All processes must go through the same number of passes.
"""

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from wangen.runtime.communication import CommunicationTime
from wangen.runtime.memory.blocks import blocks_of


class ShardedBlocks:
    """Keeps a part of each block's frozen weights, and gathers a block's before it computes, the next one's meanwhile.

    As `BlockSwap` for a fast path: the blocks are recomputed in the backward pass, so that nothing which is kept from
    the forward pass holds a weight. Adapters are added, and what trains is marked by `requires_grad`, before this is
    made.

    Attributes:
        swapped: the numbers of all blocks.
    """

    def __init__(
        self, transformer: nn.Module, mesh: DeviceMesh, device: torch.device, communication: CommunicationTime
    ) -> None:
        """Split the blocks, one after the other, so that a device never holds more than one; the rest goes over whole.

        Args:
            transformer: with its adapters, in host memory or on the device.
            mesh: of the processes that hold the parts; with two dimensions the first are copies of each other.
            device: where it computes.
            communication: gets the time in which blocks wait for their weights.
        """
        self._device, self._communication = device, communication
        self._blocks = list(blocks_of(transformer).children())
        self.swapped = range(len(self._blocks))
        self._split(transformer, mesh)
        transformer.to(device)

    def _split(self, transformer: nn.Module, mesh: DeviceMesh) -> None:
        for block in self._blocks:
            trained = {parameter for parameter in block.parameters() if parameter.requires_grad}
            fully_shard(block, mesh=mesh, ignored_params=trained)

    def enter(self, index: int, *, backward: bool) -> None:
        """A block is about to compute: its weights are there when this returns, and those of the next one called."""
        with self._communication.inside(self._device):
            self._block(index).unshard()
            following = index - 1 if backward else index + 1
            if following in self.swapped:
                self._block(following).unshard(async_op=True)

    def leave(self, index: int, *, backward: bool) -> None:
        """A block has computed: only its part is kept. `backward` as it was entered."""
        self._block(index).reshard()

    def _block(self, index: int) -> FSDPModule:
        return cast(FSDPModule, self._blocks[index])
