import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import PAGESIZE

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from wangen import profiles
from wangen.generator.errors import UsageError
from wangen.runtime.fast.attention import choose_kernel
from wangen.runtime.fast.dit import FastWan
from wangen.runtime.memory import swap as swap_module
from wangen.runtime.memory.quantize import quantize_blocks
from wangen.runtime.memory.swap import ALIGNMENT, BlockSwap, DirectLane, frozen_tensors, spread
from wangen.runtime.models.compute import Compute

CPU = torch.device("cpu")
NUM_BLOCKS = 5


def make_transformer(seed: int = 0, mode: str = "none") -> WanTransformer3DModel:
    """A small Wan with an adapter that is not zero; base frozen."""
    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=32, freq_dim=32,
        ffn_dim=192, num_layers=NUM_BLOCKS,
    )  # fmt: skip
    model.requires_grad_(False)
    quantize_blocks(model, mode)
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=profiles.model("t2v-1.3B").lora_targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.train()


def adapter_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def step(model: torch.nn.Module, swap: BlockSwap | None = None, **changes) -> tuple[torch.Tensor, dict]:
    """Two steps of forward and backward through the fast path; the last loss and the sum of both gradients."""
    velocity = FastWan(model, Compute(**changes), choose_kernel("sdpa", CPU, torch.float32), swap)
    for parameter in adapter_of(model).values():
        parameter.grad = None
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(2, 16, 1, 8, 8, generator=generator)
    texts = [torch.randn(length, 32, generator=generator) for length in (3, 7)]
    for _ in range(2):
        loss = velocity(latents, torch.tensor([700.0, 200.0]), texts).square().mean()
        loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in adapter_of(model).items()}


def same(found, wanted) -> None:
    assert torch.equal(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert torch.equal(found[1][name], gradient), name


def device_bytes(swap: BlockSwap) -> int:
    """What really is there: the storages of all frozen tensors of the blocks, and of the ring, each once."""
    tensors = [tensor for block in swap.blocks for tensor in frozen_tensors(block)]
    storages = [tensor.untyped_storage() for tensor in tensors] + [s.buffer.untyped_storage() for s in swap._slots]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def block_bytes(block: torch.nn.Module) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in frozen_tensors(block))


# ---- the same numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_swapped", "ring", "mode", "changes"),
    [
        (1, 2, "none", {}),
        (3, 2, "none", {}),
        (5, 1, "none", {}),
        (5, 2, "none", {"checkpointing": "selective"}),
        (5, 3, "none", {"offload": True}),
        (4, 2, "none", {"free_blocks": 1}),
        (5, 9, "none", {}),
        (5, 2, "fp8", {}),
        (3, 2, "int8", {"checkpointing": "selective", "offload": True}),
        (5, 2, "nf4", {}),
    ],
)
def test_loss_and_gradients_are_bit_equal_to_the_plain_run(num_swapped, ring, mode, changes):
    wanted = step(make_transformer(mode=mode), **changes)
    model = make_transformer(mode=mode)
    swap = BlockSwap(model, num_swapped, CPU, ring=ring, free_blocks=changes.get("free_blocks", 0))
    same(step(model, swap, **changes), wanted)


def test_validation_without_gradients_goes_through_the_swap_too():
    def validate(model, swap=None):
        velocity = FastWan(model, Compute(), choose_kernel("sdpa", CPU, torch.float32), swap)
        with torch.no_grad():
            return [
                velocity(torch.ones(1, 16, 1, 4, 4) * n, torch.tensor([500.0]), [torch.ones(2, 32)]) for n in (1, 2)
            ]

    model = make_transformer()
    swap = BlockSwap(model, 4, CPU)
    trained = step(model, swap)
    outputs = validate(model, swap)
    same(step(model, swap), trained)
    for found, wanted in zip(outputs, validate(make_transformer()), strict=True):
        assert torch.equal(found, wanted)


# ---- what is resident --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "nf4"])
@pytest.mark.parametrize(("num_swapped", "ring"), [(3, 1), (3, 2), (5, 2)])
def test_at_every_block_only_what_is_needed_is_on_the_device(monkeypatch, num_swapped, ring, mode):
    model = make_transformer(mode=mode)
    whole = [block_bytes(block) for block in model.blocks]
    swap = BlockSwap(model, num_swapped, CPU, ring=ring)
    kept = sum(size for index, size in enumerate(whole) if index not in swap.swapped)
    tensors = len(frozen_tensors(model.blocks[0]))
    limit = kept + ring * (whole[0] + tensors * ALIGNMENT)
    seen = []

    def look(event: str, index: int, backward: bool) -> None:
        assert device_bytes(swap) <= limit
        filled = {number for number, block in enumerate(swap.blocks) if block_bytes(block)}
        assert filled == set(range(NUM_BLOCKS)) - swap.swapped | ({index} if event == "enter" else set())
        seen.append((event, index, backward))

    for name in ("enter", "leave"):
        real = getattr(BlockSwap, name)

        def watched(self, index, *, backward, real=real, name=name):
            real(self, index, backward=backward)
            look(name, index, backward)

        monkeypatch.setattr(BlockSwap, name, watched)
    step(model, swap)
    order = sorted(swap.swapped)
    once = [(event, index, False) for index in order for event in ("enter", "leave")]
    once += [(event, index, True) for index in reversed(order) for event in ("enter", "leave")]
    assert seen == once * 2
    assert sum(whole) - device_bytes(swap) > (num_swapped - ring - 0.2) * whole[0]


def test_a_block_that_is_used_without_its_weights_fails():
    model = make_transformer()
    swap = BlockSwap(model, 5, CPU)
    with pytest.raises(RuntimeError, match=r"shape|size|dimension"):
        step(model)
    assert swap.swapped == set(range(5))


def test_what_trains_stays_and_is_saved_as_ever():
    model = make_transformer()
    before = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    swap = BlockSwap(model, 5, CPU)
    after = get_peft_model_state_dict(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    swap.park()
    parked = get_peft_model_state_dict(model)
    assert all(torch.equal(parked[name], value) for name, value in before.items())


# ---- ahead of need, and safely so --------------------------------------------------------------------------------


@dataclass
class LateLane(DirectLane):
    """A device as unfriendly as can be: a copy spoils its target at once, and arrives when it is waited for.

    So a block that computes before it waits, or whose buffer is written while it computes, gives other numbers.
    """

    swap: BlockSwap | None = None
    marks: int = 0
    copies: list[int] = field(default_factory=list)
    pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def copy(self, target, source, after):
        assert after is not None, "a buffer is written before it is known to be free"
        target.fill_(255)
        self.copies.append(len(source))
        self.pending[len(self.copies)] = (target, source)
        return len(self.copies)

    def wait(self, event):
        if event in self.pending:
            target, source = self.pending.pop(event)
            target.copy_(source)

    def mark(self):
        self.marks += 1
        return self.marks


@pytest.mark.parametrize("ring", [1, 2, 3])
def test_a_device_that_copies_late_gives_the_same_numbers(ring):
    wanted = step(make_transformer())
    model = make_transformer()
    same(step(model, BlockSwap(model, 5, CPU, ring=ring, lane=LateLane())), wanted)


@pytest.mark.parametrize("fault", ["no wait", "written while it computes"])
def test_that_device_sees_what_would_go_wrong(monkeypatch, fault):
    wanted = step(make_transformer())
    model = make_transformer()
    lane = LateLane()
    swap = BlockSwap(model, 5, CPU, lane=lane)
    if fault == "no wait":
        monkeypatch.setattr(lane, "wait", lambda event: None)
    else:
        real = swap.enter

        def enter(index, *, backward):
            real(index, backward=backward)
            slot = swap._slot_of(index)
            lane.copy(slot.buffer, swap._masters[index].buffer, slot.free)

        monkeypatch.setattr(swap, "enter", enter)
    assert not torch.equal(step(model, swap)[0], wanted[0])


@pytest.mark.parametrize(("ring", "copies"), [(1, 8), (2, 6), (3, 4), (5, 0)])
def test_each_block_is_copied_twice_per_step_but_those_of_the_ring_once(ring, copies):
    model = make_transformer()
    lane = LateLane()
    swap = BlockSwap(model, 5, CPU, ring=ring, lane=lane)
    assert len(lane.copies) == ring, "the first blocks are called at once"
    step(model, swap)
    assert len(lane.copies) == ring + 2 * copies


def test_every_copy_starts_a_block_ahead_of_its_use(monkeypatch):
    model = make_transformer()
    lane = LateLane()
    swap = BlockSwap(model, 5, CPU, lane=lane)
    real, late = BlockSwap.enter, []

    def watched(self, index, *, backward):
        before = len(lane.copies)
        real(self, index, backward=backward)
        late.extend([index] * (len(lane.copies) - before))

    monkeypatch.setattr(BlockSwap, "enter", watched)
    step(model, swap)
    assert late == []


def test_a_buffer_is_written_again_only_after_the_block_that_used_it(monkeypatch):
    lane, after = LateLane(), []
    real = lane.copy
    monkeypatch.setattr(lane, "copy", lambda *words: (after.append(words[2]), real(*words))[1])
    swap = BlockSwap(make_transformer(), 5, CPU, ring=1, lane=lane)
    for index in range(4):
        swap.enter(index, backward=False)
        swap.leave(index, backward=False)
    assert after == [1, 2, 3, 4, 5], "each copy waits for the mark of the block before"


def test_the_blocks_that_are_called_next_are_those_of_the_pass_that_follows():
    swap = BlockSwap(make_transformer(), 5, CPU)
    assert swap._next(2, backward=False) == [3, 4, 2, 1, 0]
    assert swap._next(2, backward=True) == [1, 0, 2, 3, 4]
    with torch.no_grad():
        assert swap._next(2, backward=False) == [3, 4, 0, 1, 2], "no backward pass, but another forward pass"


# ---- two experts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_swapped", "mode"), [(0, "none"), (3, "none"), (5, "int8")])
def test_two_experts_take_turns_on_the_device(num_swapped, mode):
    wanted = [step(make_transformer(seed, mode)) for seed in (0, 1)]
    models = [make_transformer(seed, mode) for seed in (0, 1)]
    swaps = [BlockSwap(model, num_swapped, CPU, parked=number == 1) for number, model in enumerate(models)]
    assert [swap.parked for swap in swaps] == [False, True]
    assert device_bytes(swaps[1]) == 0
    for turn in (0, 1, 0, 1):
        swaps[1 - turn].park()
        swaps[1 - turn].park()
        swaps[turn].unpark()
        swaps[turn].unpark()
        frozen = frozen_tensors(models[1 - turn])
        assert device_bytes(swaps[1 - turn]) == 0
        assert sum(tensor.untyped_storage().nbytes() for tensor in frozen) == 0
        assert device_bytes(swaps[turn]) > 0
        same(step(models[turn], swaps[turn]), wanted[turn])


@pytest.mark.parametrize("fits", [0, 1, 2])
def test_a_transformer_that_finds_no_room_stays_parked_and_comes_back_once_there_is_some(fits):
    class Full(DirectLane):
        room = 99

        def mark(self):
            self.room -= 1
            if self.room < 0:
                raise torch.OutOfMemoryError

    model, lane, wanted = make_transformer(), Full(), step(make_transformer())
    swap = BlockSwap(model, 3, CPU, lane=lane, ring=3)
    swap.park()
    lane.room = fits
    with pytest.raises(torch.OutOfMemoryError):
        swap.unpark()
    assert (swap.parked, device_bytes(swap)) == (True, 0)
    lane.room = 99
    swap.unpark()
    same(step(model, swap), wanted)


def test_a_parked_transformer_is_not_entered():
    swap = BlockSwap(make_transformer(), 2, CPU)
    swap.park()
    with pytest.raises(AssertionError, match="parked"):
        swap.enter(min(swap.swapped), backward=False)


def test_weights_that_lie_side_by_side_still_do_after_parking():
    """The fast path makes one product of three layers whose weights are parts of one storage."""
    model = make_transformer()
    swap = BlockSwap(model, 2, CPU)
    step(model, swap)
    swap.park()
    swap.unpark()
    attention = model.blocks[(set(range(5)) - swap.swapped).pop()].attn1
    weights = [getattr(attention, name).base_layer.weight for name in ("to_q", "to_k", "to_v")]
    places = [weight.data_ptr() for weight in weights]
    size = weights[0].numel() * weights[0].element_size()
    assert places == [places[0], places[0] + size, places[0] + 2 * size]


# ---- choices and refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 30, 40])
def test_swapped_blocks_are_spread_evenly(num_blocks):
    for num_swapped in range(num_blocks + 1):
        chosen = sorted(spread(num_blocks, num_swapped))
        assert len(chosen) == num_swapped
        gaps = [later - earlier for earlier, later in itertools.pairwise(chosen)]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_more_blocks_than_there_are_are_refused():
    for num_swapped, free, words in (6, 0, "5 blocks that are"), (5, 2, "3 blocks that are"), (2, 4, "1 block that is"):
        with pytest.raises(UsageError, match=rf"--blocks_to_swap {num_swapped}: only the {words} recomputed"):
            BlockSwap(make_transformer(), num_swapped, CPU, free_blocks=free)


def test_host_memory_that_cannot_be_pinned_is_said_once_and_used_as_it_is(monkeypatch, caplog):
    """No GPU here: a stand-in for CUDA's runtime, which refuses the second buffer."""
    calls = []

    class Runtime:
        def cudaHostRegister(self, place, num_bytes, flags):  # noqa: N802
            assert current == [second_card]
            calls.append(("pin", place, num_bytes))
            return 0 if len(calls) == 1 else 2

        def cudaHostUnregister(self, place):  # noqa: N802
            calls.append(("unpin", place))

    second_card = torch.device("cuda", 1)
    current: list[torch.device] = []

    @contextmanager
    def on_card(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", on_card)
    monkeypatch.setattr(swap_module, "_forget_error", lambda device: calls.append(("forget", device)))
    swap_module._warn_unpinned.cache_clear()
    first = swap_module.host_buffer(1000, second_card)
    place = first.data_ptr()
    others = [swap_module.host_buffer(500, second_card) for _ in range(2)]
    assert [len(buffer) for buffer in others] == [500, 500]
    assert [*map(len, (swap_module.host_buffer(0, second_card), swap_module.host_buffer(7, CPU)))] == [0, 7]
    assert caplog.text.count("does not lock enough host memory for block swap (CUDA error 2)") == 1
    del first
    assert calls[0] == ("pin", place, PAGESIZE)
    assert place % PAGESIZE == 0, "no two buffers lock the same page"
    assert [call[0] for call in calls] == ["pin", "pin", "forget", "pin", "forget", "unpin"]
    assert calls[-1] == ("unpin", place)
    swap_module._warn_unpinned.cache_clear()
