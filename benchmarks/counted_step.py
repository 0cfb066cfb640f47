"""A step of the trainer with every operation of torch.distributed counted, in real processes or in one among fakes.

All weights lie on the same zeros, so that the largest transformer fits into memory; the picture has 64x64 pixels, since
the clip decides nothing of what is sent.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_train import TINY
from random_run import Clip, make_run, products_in_bfloat16, random_batch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wangen import profiles
from wangen.generator.launch import Launch
from wangen.profiles import Model
from wangen.runtime.interrupt import Interrupt
from wangen.runtime.training.parallel import Way, mesh_of
from wangen.runtime.training.prepared import Group
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.run import Trainee
from wangen.runtime.training.step import optimizer_step

CPU = torch.device("cpu")
PER_MACHINE = 8
PICTURE: Clip = (64, 64, 1)
FEW = (2, 3)
"""Blocks of which the others are told."""

KINDS: Mapping[str, tuple[str, int]] = {
    "allreduce_": ("all-reduce", 2),
    "_allgather_base_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "all_reduce": ("all-reduce", 2),
    "all_gather_into_tensor": ("all-gather", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
}
"""What an operation is called here, and how often the whole goes round a ring, less the part that each has itself."""


@dataclass(frozen=True, order=True)
class Collective:
    """One kind of collective of a step.

    Attributes:
        kind: all-reduce, all-gather or reduce-scatter.
        num_bytes: of the whole: what is added up, or what is put together or shared out of all parts.
        processes: that take part.
        machines: on which they are.
    """

    kind: str
    num_bytes: int
    processes: int
    machines: int

    @property
    def sent(self) -> float:
        """Bytes that each process sends, and receives, if it goes round a ring."""
        rounds = dict(KINDS.values())[self.kind]
        return rounds * (self.processes - 1) / self.processes * self.num_bytes

    def between_machines(self, per_machine: int = PER_MACHINE) -> float:
        """Bytes that a machine sends to others: the ring leaves it once; groups beside each other share its wire."""
        beside = per_machine * self.machines / self.processes
        return self.sent * beside if self.machines > 1 else 0.0


class Collectives(TorchDispatchMode):
    """Counts the operations of torch.distributed that tensors go through, how often each.

    Attributes:
        counts: how often each was met.
    """

    def __init__(self, per_machine: int = PER_MACHINE) -> None:
        super().__init__()
        self.counts: Counter[Collective] = Counter()
        self._per_machine = per_machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it does what it does with plain tensors, which come here as well
        result = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            group = named.get("process_group", named.get("group_name"))
            if group is not None:
                self._count(func._opname, group, [*args, *kwargs.values(), result])
        return result

    def _count(self, name: str, group: Any, values: Sequence[Any]) -> None:
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        elif isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        members = dist.get_process_group_ranks(group)
        whole = max(sum(map(_num_bytes, tree_leaves(value))) for value in values)
        machines = len({member // self._per_machine for member in members})
        self.counts[Collective(KINDS[name][0], whole, len(members), machines)] += 1


def _num_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


@dataclass(frozen=True)
class Case:
    """What is counted.

    Attributes:
        task: the model profile.
        way: how the processes hold the model.
        launch: which of how many this one is.
        flags: of the training step.
        tiny: small sizes.
        num_blocks: of the transformer; None for as many as it has.
    """

    task: str
    way: Way
    launch: Launch
    flags: Mapping[str, Any]
    tiny: bool = False
    num_blocks: int | None = None

    @property
    def model(self) -> Model:
        """The profile, of small sizes where they are asked for."""
        model = profiles.model(self.task)
        sizes = replace(model.transformer, **TINY) if self.tiny else model.transformer
        return replace(model, transformer=replace(sizes, num_layers=self.num_blocks or sizes.num_layers))


@dataclass(frozen=True)
class Counted:
    """What was found.

    Attributes:
        collectives: how often each.
        held: bytes of this process by what they are: frozen weights, trained weights, gradients, optimizer.
    """

    collectives: Mapping[Collective, int]
    held: Mapping[str, int]

    def total(self, of: Callable[[Collective], float], kind: str = "") -> float:
        """A number of each collective, of one kind or all, added up over the step."""
        return sum(of(one) * count for one, count in self.collectives.items() if kind in ("", one.kind))


def counted_step(case: Case, *, around: Callable[[Callable[[], object]], object] = lambda step: step()) -> Counted:
    """Make the run of a case and do one step of it; the processes must be connected.

    Args:
        case: what is counted.
        around: is handed the step, and does it.
    """
    mesh = mesh_of(case.way, case.launch, CPU)
    ranks = Ranks(case.launch).marching() if mesh else Ranks(case.launch)
    found = Collectives(case.launch.local_count)
    with products_in_bfloat16():
        run, trainee = make_run(case.model, case.flags, CPU, draw=_zeros(), mesh=mesh, ranks=ranks)
        group = Group(0, [random_batch(case.model, PICTURE, 1, CPU)], 1, ranks.count)

        def step() -> None:
            with found:
                optimizer_step(run, trainee, group, 1.0, Interrupt())

        around(step)
    return Counted(found.counts, held_bytes(trainee))


def counted_in_few_blocks(case: Case) -> Counted:
    """The same of all blocks as two and three of them tell, where all would not fit into this machine.

    Each further block does what the third one did; one sum over all blocks has so many bytes more.
    """
    two, three = (counted_step(replace(case, num_blocks=number)) for number in FEW)
    more = case.model.transformer.num_layers - FEW[0]
    found = {
        one: count + more * (three.collectives[one] - count)
        for one, count in two.collectives.items()
        if one in three.collectives
    }
    names = set(two.collectives), set(three.collectives)
    grown = [sorted(names[0] - names[1]), sorted(names[1] - names[0])]
    for one, other in zip(*grown, strict=True):
        assert replace(one, num_bytes=other.num_bytes) == other, "not the same sum over more blocks"
        assert two.collectives[one] == three.collectives[other]
        found[replace(one, num_bytes=one.num_bytes + more * (other.num_bytes - one.num_bytes))] = two.collectives[one]
    held = {name: size + more * (three.held[name] - size) for name, size in two.held.items()}
    return Counted(found, held)


def _zeros() -> Callable[[torch.Size, torch.dtype, str], torch.Tensor]:
    """Draws every weight out of the same zeros."""
    stores: dict[torch.dtype, torch.Tensor] = {}

    def draw(shape: torch.Size, dtype: torch.dtype, _key: str) -> torch.Tensor:
        if dtype not in stores or stores[dtype].numel() < shape.numel():
            stores[dtype] = torch.zeros(shape.numel(), dtype=dtype)
        return stores[dtype][: shape.numel()].view(shape)

    return draw


def held_bytes(trainee: Trainee) -> dict[str, int]:
    """Bytes of what a process keeps from step to step, its own parts only."""
    frozen = (parameter for parameter in trainee.transformer.parameters() if not parameter.requires_grad)
    states = trainee.optimization.optimizer.state.values()
    return {
        "frozen weights": sum(map(_own_bytes, frozen)),
        "trained weights": sum(_own_bytes(parameter) for parameter in trainee.parameters.values()),
        "gradients": sum(_own_bytes(buffer) for buffer in trainee.optimization.flat.gradients),
        "optimizer": sum(_own_bytes(value) for state in states for value in state.values() if torch.is_tensor(value)),
    }


def _own_bytes(tensor: torch.Tensor) -> int:
    return _num_bytes(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def as_first_of(processes: int, count: Callable[[Launch], Counted]) -> Counted:
    """What is counted in the first of so many processes, of which only this one is real."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        return count(Launch(rank=0, count=processes, local_count=min(PER_MACHINE, processes)))
    finally:
        dist.destroy_process_group()


def over_loopback(step: Callable[[], object]) -> int:
    """Do a step, and return the bytes that went over the machine's loopback meanwhile, also others'."""
    dist.barrier()
    before = _loopback_bytes()
    step()
    dist.barrier()
    return _loopback_bytes() - before


def _loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.lstrip().startswith("lo:"))
    return int(line.split()[1])
