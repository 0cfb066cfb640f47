"""Full fine-tuning over several processes: each keeps a part of every matrix, of its gradient and of its moments.

FSDP2 (`torch.distributed.fsdp.fully_shard`) keeps the masters in float32 in parts and gathers a block's in the dtype of
the products when a fast path says that it needs them. When a block's backward pass is over, its gradients are added up
over the processes in float32, each keeping its part, while the block before computes. Vectors and tables, less than a
thousandth of the weights, are whole everywhere, as with data parallel; so are their gradients, which are added up once
a step. What lies outside the blocks is gathered in float32 for a whole pass, and its gradients once a step.

With HSDP the first dimension of the mesh are machines that are copies of each other: within a machine gradients are
added up after each block, between machines in the last pass of a step, also while the block before computes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial

from wangen.runtime.communication import CommunicationTime, all_there
from wangen.runtime.memory.blocks import in_a_block
from wangen.runtime.memory.sharded import ShardedBlocks
from wangen.runtime.models import VelocityModel
from wangen.runtime.models.inputs import Inputs
from wangen.runtime.training.full import make_masters, require_unquantised


class ShardedWeights(ShardedBlocks):
    """Weights that train in parts; as `ShardedBlocks` for a fast path, and `optim.Parts` for the optimizer.

    A step is any number of forward and backward passes of `model(...)`, then `add_up`.

    Attributes:
        transformer: whose weights they are.
        parameters: what this process trains, by name, sorted: its parts (rows) of what is split, and all of the rest,
            in float32.
        is_last_pass: whether the backward pass that comes is the last of its step.
    """

    def __init__(
        self,
        transformer: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        communication: CommunicationTime,
        dtype: torch.dtype,
    ) -> None:
        """Make masters of all weights and split them, a block at a time.

        Args:
            transformer: without adapters, in host memory or on the device.
            mesh: of the processes that hold the parts; with two dimensions the first are copies of each other.
            device: where it computes.
            communication: gets the time in which weights and gradients are waited for.
            dtype: of the products, in which blocks are gathered.

        Raises:
            WangenError: its weights are quantised.
        """
        require_unquantised(transformer)
        self._mesh, self._dtype, self.transformer = mesh, dtype, transformer
        super().__init__(transformer, mesh, device, communication)
        found = dict(sorted(transformer.named_parameters()))
        self._layouts = {name: value.data for name, value in found.items() if isinstance(value.data, DTensor)}
        self.parameters = {
            name: nn.Parameter(self._layouts[name].to_local()) if name in self._layouts else value
            for name, value in found.items()
        }
        self._outer = [name for name in self._layouts if not in_a_block(name)]
        self._in_block = [
            [name for name in self._layouts if in_a_block(name) and name.split(".")[1] == str(index)]
            for index in self.swapped
        ]
        self.is_last_pass = True
        self._on_their_way: list[tuple[str, DTensor, bool]] = []  # with whether that was the last pass
        self._between_machines: list[Any] = []

    def _split(self, transformer: nn.Module, mesh: DeviceMesh) -> None:
        in_products = MixedPrecisionPolicy(param_dtype=self._dtype)
        for block in self._blocks:
            fully_shard(block, mesh=mesh, mp_policy=in_products, ignored_params=_whole(block.parameters(), mesh))
        outer = [value for name, value in transformer.named_parameters() if not in_a_block(name)]
        fully_shard(transformer, mesh=mesh, ignored_params=_whole(outer, mesh))

    @property
    def names(self) -> Collection[str]:
        """The names of the parameters that are split."""
        return self._layouts.keys()

    @property
    def num_weights(self) -> int:
        """The number of weights in the whole model."""
        return sum(self._layouts.get(name, value).numel() for name, value in self.parameters.items())

    def shape(self, name: str) -> torch.Size:
        """The shape of the whole of a parameter that is split."""
        return self._layouts[name].shape

    def leave(self, index: int, *, backward: bool) -> None:
        """A block has computed: its gradients are on their way, and only its part is kept."""
        if backward:
            self._send(self._in_block[index])
        super().leave(index, backward=backward)

    def gathering(self, model: VelocityModel) -> VelocityModel:
        """A model on these weights, which gathers what lies outside the blocks before each of its passes."""
        return _WithOuterWeights(model, self)

    def gather_outer(self) -> None:
        """Before a pass: what lies outside the blocks, as it is now, for forward and backward pass."""
        root = cast(FSDPModule, self.transformer)
        root.reshard()
        with self._communication.inside(self._device):
            root.unshard()

    def add_up(self) -> None:
        """After the last backward pass of a step: each process has its parts of the gradients of all."""
        assert self.is_last_pass
        self._send(self._outer)
        self._take()
        for work in self._between_machines:
            with self._communication.inside(self._device):
                work.wait()
        self._between_machines.clear()

    def over_all(self, own: Tensor) -> Tensor:
        """A number (), of this process's parts -> its sum over all parts, the same everywhere."""
        total = own.clone()
        with self._communication.inside(self._device):
            dist.all_reduce(total, group=self._mesh.get_group(self._mesh.ndim - 1))
        return total

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Of a tensor that belongs to a parameter and has its shape, what belongs to this process's part."""
        if name not in self._layouts or whole.shape != self._layouts[name].shape:
            return whole
        chunks = whole.chunk(self._mesh.size(self._mesh.ndim - 1))
        number = self._mesh.get_local_rank(self._mesh.ndim - 1)
        return chunks[number] if number < len(chunks) else whole[:0]

    def distributed(self, name: str, own: Tensor) -> Tensor:
        """What belongs to this process's part of a parameter as the whole that it is a part of; others as they are."""
        layout = self._layouts.get(name)
        if layout is None or own.shape != self.parameters[name].shape:
            return own
        return DTensor.from_local(
            own, self._mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride()
        )

    def gathered(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name, one after the other, from what all processes have of them; all have to ask."""
        for name, value in values.items():
            one = self.distributed(name, value)
            with self._communication.inside(self._device):
                whole = one.full_tensor() if isinstance(one, DTensor) else one
            yield name, whole

    def _gradient(self, name: str) -> Tensor:
        gradient = self.parameters[name].grad
        assert gradient is not None, "the optimizer lends gradients their storage"
        return gradient

    def _send(self, names: Sequence[str]) -> None:
        """Start to add up gradients of gathered weights over the processes; those before have come meanwhile."""
        self._take()
        for name in names:
            weight = self.transformer.get_parameter(name)
            gradient, weight.grad = weight.grad, None
            if gradient is None:  # it was not used here, but the others may wait: so does Qwen-Image's last text block
                gradient = torch.zeros_like(weight)
            partial = DTensor.from_local(gradient.float(), self._mesh, [Partial()] * self._mesh.ndim, run_check=False)
            wanted = [*partial.placements[:-1], self._layouts[name].placements[-1]]
            with all_there():
                reduced = partial.redistribute(placements=wanted, async_op=True)
            self._on_their_way.append((name, reduced, self.is_last_pass))

    def _take(self) -> None:
        with self._communication.inside(self._device):
            for name, reduced, is_last in self._on_their_way:
                gradient = self._gradient(name).add_(reduced.to_local())
                if is_last and self._mesh.ndim > 1:
                    group = self._mesh.get_group(0)
                    self._between_machines.append(dist.all_reduce(gradient, group=group, async_op=True))
        self._on_their_way.clear()


def _whole(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> set[nn.Parameter]:
    """Make masters of parameters; those that are too small to split: vectors, and tables of fewer rows than parts."""
    masters = list(parameters)
    make_masters(masters)
    return {value for value in masters if value.ndim < 2 or len(value) < mesh.size(mesh.ndim - 1)}


class _WithOuterWeights:
    """A velocity model whose weights outside the blocks are gathered before each of its passes.

    Args:
        model: the fast path.
        weights: in parts.
    """

    def __init__(self, model: VelocityModel, weights: ShardedWeights) -> None:
        self._model, self._weights = model, weights

    @property
    def attention(self) -> str:
        """The name of the attention kernel."""
        return self._model.attention

    def __call__(self, *arguments: Any, **given: Any) -> Tensor:
        """As the model."""
        self._weights.gather_outer()
        return self._model(*arguments, **given)

    def packed(self, passes: Sequence[Inputs]) -> list[Tensor]:
        """As the model."""
        self._weights.gather_outer()
        return self._model.packed(passes)
