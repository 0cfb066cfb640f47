"""States of weights in parts, of one process whose part is the whole."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from wangen.generator.errors import WangenError
from wangen.generator.launch import Launch
from wangen.runtime import communication
from wangen.runtime.communication import CommunicationTime
from wangen.runtime.training import checkpoint, sharded, sharded_state
from wangen.runtime.training.checkpoint import ExpertState, TrainingState
from wangen.runtime.training.loading import as_here
from wangen.runtime.training.parallel import mesh_of
from wangen.runtime.training.ranks import TIMEOUT, Ranks
from wangen.runtime.training.sharded import ShardedWeights
from wangen.runtime.training.sharded_state import ShardedStates, read

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two blocks and something behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.out = nn.Linear(4, 4)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Launch()
    dist.destroy_process_group()


@pytest.fixture
def weights(alone: Launch) -> ShardedWeights:
    mesh = mesh_of("fsdp", alone, CPU)
    assert mesh is not None
    return ShardedWeights(Net(), mesh, CPU, CommunicationTime(), torch.float32)


def waits(group: Any) -> timedelta:
    """How long a process waits in a group for the others."""
    found: timedelta = group._get_backend(CPU).options._timeout
    return found


def state_of(weights: ShardedWeights, facts: dict[str, Any]) -> TrainingState:
    tensors = {name: value.detach() for name, value in weights.parameters.items()}
    steps = {"out.weight/step": torch.tensor(3.0)}
    return TrainingState({"": ExpertState(1, tensors, steps, {}, tensors, 1)}, {}, facts)


def save(folder: Path, weights: ShardedWeights, facts: dict[str, Any], *, asynchronous: bool = False) -> ShardedStates:
    """Begin to write a state."""
    states = ShardedStates(folder, Ranks(), asynchronous=asynchronous)
    states.save(state_of(weights, facts), {"": weights}, keep=False)
    return states


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_is_what_it_was_when_it_was_saved(weights: ShardedWeights, tmp_path: Path, *, asynchronous: bool):
    """Weights, averages and facts go on while it is written."""
    facts = {"last_loss": 1.0, "loss_by_timestep_so_far": {"counts": [1, 2]}}
    before = {name: value.detach().clone() for name, value in weights.parameters.items()}
    states = save(tmp_path / "states", weights, facts, asynchronous=asynchronous)
    facts["loss_by_timestep_so_far"]["counts"][0] = 5
    facts["last_loss"] = 2.0
    with torch.no_grad():
        for value in weights.parameters.values():
            value.add_(1)
    path = states.settle()
    assert path is not None
    found = checkpoint.read(path)
    assert found.facts == {"last_loss": 1.0, "loss_by_timestep_so_far": {"counts": [1, 2]}}
    own = read(found.experts[""], "", None)
    for part in (own.adapter, own.ema):
        assert part.keys() == before.keys()
        assert all(torch.equal(part[name], value) for name, value in before.items())
    assert own.optimizer["out.weight/step"] == 3.0


def test_a_slow_disk_is_waited_for_as_long_as_anything_else(weights: ShardedWeights, tmp_path: Path):
    """Those that have written wait in the group of the states."""
    assert waits(ShardedStates(tmp_path, Ranks(), asynchronous=True)._group) == TIMEOUT


def test_machines_that_are_copies_wait_for_each_other_as_long(alone: Launch):
    """The first process writes a whole checkpoint while the others wait for the next one's parts."""
    mesh = mesh_of("hsdp", alone, CPU)
    assert mesh is not None
    assert mesh.mesh_dim_names == ("replicate", "shard")
    assert [waits(mesh.get_group(number)) for number in range(2)] == [TIMEOUT] * 2


def test_what_a_state_names_is_durable_before_it_has_its_name(
    weights: ShardedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The names of the parts as well: a state that has lost them is none, and the one before is gone."""
    done: list[tuple[str, Path]] = []
    monkeypatch.setattr(checkpoint, "sync_folder", lambda path: done.append(("sync", path)))
    monkeypatch.setattr(checkpoint, "replace", lambda path, _to, **_named: done.append(("name", path)))
    save(tmp_path, weights, {}).settle()
    staging = checkpoint.staging_of(tmp_path, 1)
    named = done.index(("name", staging))
    assert {path for word, path in done[:named] if word == "sync"} == {staging, staging / checkpoint.IN_PARTS}


def test_what_a_full_disk_left_half_written_makes_room_first(weights: ShardedWeights, tmp_path: Path):
    """It was of another step; the next state would find the disk as full."""
    left = tmp_path / ".staging-00000007" / "parts"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(b"half")
    states = save(tmp_path, weights, {})
    assert not left.parent.exists()
    assert states.settle() == tmp_path / "step-00000001"


def test_damaged_parts_are_said_in_a_line(weights: ShardedWeights, tmp_path: Path):
    path = save(tmp_path, weights, {}).settle()
    assert path is not None
    (file,) = (path / "parts").glob("*.distcp")
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(WangenError, match="the training state is damaged") as caught:
        read(checkpoint.read(path).experts[""], "", weights)
    assert "\n" not in caught.value.found
    assert "Traceback" not in caught.value.found


def test_other_bytes_in_a_tensor_of_parts_are_seen(weights: ShardedWeights, tmp_path: Path):
    path = save(tmp_path, weights, {}).settle()
    assert path is not None
    read(checkpoint.read(path).experts[""], "", weights)
    (file,) = (path / "parts").glob("*.distcp")
    content = bytearray(file.read_bytes())
    numbers = weights.parameters[next(iter(weights.names))].detach().flatten()[:8].numpy().tobytes()
    place = content.index(numbers)
    content[place + 1] ^= 1
    file.write_bytes(content)
    with pytest.raises(WangenError, match=rf"damaged \({file.name} has other bytes than were saved\)"):
        read(checkpoint.read(path).experts[""], "", weights)
    (path / "parts" / f"{file.name}.crc32").unlink()  # as an earlier version left it, but for the manifest
    read(ExpertState(1, {}, {}, {}, {}, in_parts=path / "parts"), "", weights)


def test_a_state_whose_parts_are_not_all_there_gets_no_name(
    weights: ShardedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sharded_state, "_ALL_SEEN_S", 0.2)
    states = save(tmp_path, weights, {})
    (file,) = tmp_path.glob(".staging-*/parts/*.distcp")
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(WangenError, match=rf"{file.name} of another process is not there"):
        states.settle()
    assert not list(tmp_path.glob("step-*"))


def test_a_process_that_is_lost_when_gradients_are_sent_is_said(
    weights: ShardedWeights, monkeypatch: pytest.MonkeyPatch
):
    def refuses(*_words: Any, **_named: Any) -> Any:
        raise RuntimeError("[gloo/transport] Connection closed by peer")

    monkeypatch.setattr(communication, "GRACE_S", 0.0)
    monkeypatch.setattr(DTensor, "redistribute", refuses)
    weights.enter(0, backward=True)
    weight = weights.transformer.get_parameter("blocks.0.weight")
    weight.grad = torch.ones_like(weight)
    with pytest.raises(WangenError, match="has lost the others"):
        weights.leave(0, backward=True)


def test_of_two_experts_each_reads_its_own(weights: ShardedWeights, tmp_path: Path):
    state = state_of(weights, {})
    moments = {"out.weight/exp_avg": torch.full((4, 4), 2.0), "out.weight/step": torch.tensor(3.0)}
    low = replace(state.experts[""], optimizer=moments)
    high = replace(low, adapter={name: value + 1 for name, value in low.adapter.items()})
    both = replace(state, experts={"high_noise": high, "low_noise": low})
    tensors = sharded_state._tensors(both, {"high_noise": weights, "low_noise": weights})
    assert isinstance(tensors["optimizer/low_noise/out.weight/exp_avg"], DTensor), "a part of it, as its weight is"
    assert not isinstance(tensors["optimizer/low_noise/out.weight/step"], DTensor)
    states = ShardedStates(tmp_path, Ranks(), asynchronous=True)
    assert not states.is_written, "there is nothing to settle"
    states.save(both, {"high_noise": weights, "low_noise": weights}, keep=False)
    assert states._writing
    assert states._writing[0]
    states._writing[0].result()
    assert states.is_written
    path = states.settle()
    assert path
    for name, expert in both.experts.items():
        found = read(checkpoint.read(path).experts[name], name, weights)
        assert found.adapter.keys() == expert.adapter.keys()
        assert all(torch.equal(found.adapter[key], value) for key, value in expert.adapter.items())
        assert torch.equal(found.optimizer["out.weight/exp_avg"], moments["out.weight/exp_avg"])


def test_more_processes_than_rows_leave_some_without_a_part(monkeypatch: pytest.MonkeyPatch):
    """Of machines that are copies the second dimension of the mesh is the one that splits."""
    mesh = SimpleNamespace(
        ndim=2, size=[1, 4].__getitem__, get_local_rank=[0, 3].__getitem__, get_group="ab".__getitem__
    )
    table, vector = torch.arange(6.0).view(3, 2), torch.ones(5)
    holds: Any = SimpleNamespace(
        _mesh=mesh, _layouts={"table": table}, parameters={"table": table[:0], "vector": vector},
        _communication=CommunicationTime(), _device=CPU,
    )  # fmt: skip
    holds.own = lambda name, whole: ShardedWeights.own(holds, name, whole)
    assert holds.own("table", table).shape == (0, 2)
    mesh.get_local_rank = [3, 1].__getitem__
    assert torch.equal(holds.own("table", table), table[1:2])
    assert holds.own("table", torch.tensor(3.0)) == 3
    assert torch.equal(holds.own("vector", vector), vector)
    assert ShardedWeights.num_weights.fget(holds) == 6 + 5  # type: ignore[attr-defined]
    groups: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda _total, group: groups.append(group))
    ShardedWeights.over_all(holds, torch.tensor(1.0))
    assert groups == ["b"], "the sum is over the parts, not over the copies"
    whole = ExpertState(1, {"table": table}, {"table/exp_avg": table}, {}, {"table": table})
    own = as_here(whole, "", holds)
    assert [next(iter(each.values())).shape for each in (own.adapter, own.optimizer, own.ema)] == [(1, 2)] * 3
    wide, square, flat = (nn.Parameter(torch.ones(*shape)) for shape in ((3, 9), (4, 4), (9,)))
    assert sharded._whole([wide, square, flat], mesh) == {wide, flat}, "tables of fewer rows than parts"
