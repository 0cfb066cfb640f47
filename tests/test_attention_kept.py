"""Attention in checkpointed blocks: outputs kept on the device or the host, not computed again, equal to the byte."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from attention_cases import (
    CPU,
    ON_CPU,
    STAND_INS,
    Calls,
    exact,
    gradients,
    inputs,
    installer,
    off,
    sage,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from wangen.runtime.fast import attention, attention_operators
from wangen.runtime.fast.attention import Kernel, Stash, choose_kernel
from wangen.runtime.fast.host_copies import HostCopies, HostCopy

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's operators run on CUDA")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Stand-ins for the packages; no choice is remembered from one test to the next."""
    attention._choose.cache_clear()
    yield installer(monkeypatch)
    attention._choose.cache_clear()


def held_bytes(stash: Stash) -> int:
    """What a stash holds on the device; also where something else holds the same storage."""
    kept = [tensor.nbytes for held in stash._held for tensor in held.tensors if tensor is not None]
    return sum(kept) + sum(resident_bytes(held.copy) for held in stash._held if held.copy is not None)


def resident_bytes(copy: HostCopy) -> int:
    """What of the tensors in host memory lies on the device."""
    return sum(tensor.nbytes for tensor in copy._brought[0]) if copy._brought is not None else 0


def region(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What a block does around attention: something before, two calls in a row, something behind."""
    first = attend(query.tanh(), key, value)
    return attend(first, key.sin(), value).square()


def checkpointed(kernel: Kernel, tensors: list[Tensor], *, keep: bool, offload: bool = False) -> list[Tensor]:
    stash = Stash(offload=offload)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attend = (lambda q, k, v: kernel.kept(q, k, v, stash)) if keep else kernel
        return region(attend, query, key, value)

    def whole(*tensors: Tensor) -> Tensor:
        extra = {"context_fn": lambda: (stash.recording(), stash.replaying())} if keep else {}
        return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False, **extra)

    found = gradients(whole, tensors)
    assert held_bytes(stash) == 0
    return found


def test_what_is_kept_of_widened_numbers_gives_the_same_bytes():
    kernel, tensors = Kernel("sdpa", widens=True), inputs(torch.bfloat16)
    found = checkpointed(kernel, tensors, keep=True)
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}
    plain = gradients(lambda *tensors: region(kernel, *tensors), tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("name", ["sdpa", "sage"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("keys", ON_CPU)
def test_kept_attention_gives_the_same_bytes(install, name, dtype, keys):
    install("sageattention")
    kernel = choose_kernel(name, CPU, dtype)
    assert kernel.name == name
    tensors = inputs(dtype, keys=keys)
    for one in (kernel, kernel.by_item()):
        plain = gradients(lambda q, k, v, one=one: region(one, q, k, v), tensors)
        for keep, offload in ((False, False), (True, False), (True, True)):
            found = checkpointed(one, tensors, keep=keep, offload=offload)
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("name", ["flash", "flash3", "xformers"])
def test_in_place_of_a_package_kernel_sdpa_is_kept(install, name):
    install(*STAND_INS)
    kernel, tensors = choose_kernel(name, CPU, torch.float32), inputs(torch.float32)
    with Calls() as calls:
        found = checkpointed(kernel, tensors, keep=True)
    assert len(calls.items) == 2
    sdpa = checkpointed(choose_kernel("sdpa", CPU, torch.float32), tensors, keep=True)
    assert all(torch.equal(a, b) for a, b in zip(found, sdpa, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("keys", "backward"), [
    (40, "_softmax_backward_data"), (80, "_scaled_dot_product_flash_attention_for_cpu_backward"),
])  # fmt: skip
def test_what_is_kept_is_not_computed_again(install, dtype, keys, backward):
    kernel, tensors = choose_kernel("sdpa", CPU, dtype), inputs(dtype, keys=keys)
    counts = {}
    for keep in (False, True):
        with Calls() as calls:
            checkpointed(kernel, tensors, keep=keep)
        counts[keep] = calls.names[ON_CPU[keys]], calls.names[backward]
    assert counts == {False: (4, 2), True: (2, 2)}  # of the two calls of the region

    runs = []
    install("sageattention", sageattn=lambda *tensors, **layout: runs.append(1) or sage(*tensors, **layout))
    kernel = choose_kernel("sage", CPU, dtype)
    runs.clear()
    checkpointed(kernel, tensors, keep=True)
    assert len(runs) == 2


@pytest.mark.parametrize(("keys", "beside"), [(40, 2 * 3 * 40 * 40), (80, 2 * 3 * 40)])
def test_a_stash_holds_output_and_probabilities_or_logsumexp_between_the_passes_only(keys, beside):
    kernel, stash = choose_kernel("sdpa", CPU, torch.float32), Stash()
    tensors = inputs(torch.float32, keys=keys)
    output = checkpoint(
        lambda *tensors: kernel.kept(*tensors, stash).square(),
        *tensors, use_reentrant=False, preserve_rng_state=False,
        context_fn=lambda: (stash.recording(), stash.replaying()),
    )  # fmt: skip
    assert held_bytes(stash) == 4 * (2 * 3 * 40 * 32 + beside)
    with pytest.raises(AssertionError, match="serves one forward pass"), stash.recording():
        pass
    output.sum().backward(retain_graph=True)
    assert held_bytes(stash) == 0
    with pytest.raises(AssertionError, match="recomputed once"), stash.replaying():
        kernel.kept(*tensors, stash)


def test_what_waits_in_host_memory_comes_back_with_its_strides_and_leaves_its_buffer_to_the_next():
    copies, generator = HostCopies(CPU), torch.Generator().manual_seed(0)
    buffers = set()
    for rows in (40, 30, 50, 40):
        tensors = [
            torch.randn(2, rows, 3, 8, generator=generator).bfloat16().transpose(1, 2),
            torch.randn(7, rows, generator=generator)[::2],  # with gaps
            torch.randn((), generator=generator, dtype=torch.float64),
        ]
        expected = [tensor.clone() for tensor in tensors]
        copy = copies.send(tensors)
        for tensor in tensors:
            tensor.zero_()
        assert resident_bytes(copy) == 0
        copy.fetch()
        assert resident_bytes(copy) == sum(tensor.nbytes for tensor in expected)
        found = copy.take()
        assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert found[0].stride() == tensors[0].stride()
        (buffer,) = copies._free
        buffers.add(buffer.data_ptr())
        assert not any(tensor.untyped_storage().data_ptr() == buffer.data_ptr() for tensor in found)
    assert len(buffers) <= 2  # a new one for 50 rows only


class Side:
    """Stands in for a stream of copies; what the main stream waits for is noted with what is alive then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited: list[tuple[int, bool]] = []
        self.copies, self.sent = 0, StorageWeakRef(torch.empty(1).untyped_storage())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(wait_event=self.wait))
        monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())

    def wait(self, event: int) -> None:
        self.waited.append((event, not self.sent.expired()))

    def wait_stream(self, _other: object) -> None:
        pass

    def record_event(self) -> int:
        self.copies += 1
        return self.copies


@pytest.mark.parametrize("sends", [True, False])
def test_what_was_sent_is_let_go_once_the_stream_that_computes_waits_for_its_copy(sends, monkeypatch):
    copies = HostCopies(CPU)
    copies._stream = side = Side(monkeypatch)
    tensor = torch.ones(40)
    side.sent = StorageWeakRef(tensor.untyped_storage())
    held = copies.send([tensor])
    del tensor
    assert not side.waited
    assert not side.sent.expired()
    copies.send([torch.ones(7)]) if sends else held.fetch()
    assert side.waited == [(1, True)], "the stream waits before the memory goes back to it"
    assert side.sent.expired()
    held.take()


def test_what_was_brought_and_is_not_taken_is_kept_by_the_allocator_until_it_has_come(monkeypatch):
    copies, told = HostCopies(CPU), []
    copies._stream = Side(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda one, stream: told.append((len(one), stream)))
    taken, left = copies.send([torch.ones(3)]), copies.send([torch.ones(5)])
    taken.fetch()
    left.fetch()
    taken.take()
    del taken
    assert not told
    del left
    assert told == [(5, copies._stream)]


def test_an_offloaded_stash_holds_nothing_on_the_device():
    kernel, stash = choose_kernel("sdpa", CPU, torch.float32), Stash(offload=True)
    tensors = inputs(torch.float32, keys=80)
    with stash.recording():
        output = kernel.kept(*tensors, stash)
    assert held_bytes(stash) == 0
    stash.fetch()
    assert held_bytes(stash) == output.nbytes + 4 * 2 * 3 * 40
    with stash.replaying():
        assert torch.equal(kernel.kept(*tensors, stash), output)


def test_outside_of_checkpointing_nothing_is_held():
    kernel, stash, tensors = choose_kernel("sdpa", CPU, torch.float32), Stash(), inputs(torch.float32)
    found = gradients(lambda q, k, v: kernel.kept(q, k, v, stash), tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(kernel, tensors), strict=True))
    assert held_bytes(stash) == 0


def test_by_item_attention_runs_for_one_item_at_a_time():
    kernel, tensors = choose_kernel("sdpa", CPU, torch.float32).by_item(), inputs(torch.float32, items=3)
    with torch.no_grad(), Calls() as calls:
        output = kernel(*tensors)
        kernel.kept(*tensors, Stash())
        kernel(*tensors, torch.zeros(3, 1, 1, 40))
    assert calls.items == [1] * 9
    assert output.transpose(1, 2).is_contiguous()  # heads join without a copy


CUDA_OPERATORS = [
    attention_operators.CudaFlash(), attention_operators.CudaCudnn(), attention_operators.CudaEfficient(),
]  # fmt: skip


@pytest.mark.parametrize("operator", CUDA_OPERATORS, ids=lambda operator: type(operator).__name__)
def test_the_operators_of_cuda_are_called_as_their_schemas_say(operator):
    """On tensors without numbers: the shapes of outputs and gradients, no more."""
    tensors = [tensor.detach().to("meta") for tensor in inputs(torch.bfloat16)]
    kept = operator.forward(*tensors)
    found = operator.backward(torch.empty_like(kept[0]), *tensors, kept)
    assert [tensor.shape for tensor in (kept[0], *found)] == [tensors[0].shape] * 4
    assert {tensor.dtype for tensor in (kept[0], *found)} == {torch.bfloat16}


@needs_cuda
@pytest.mark.parametrize("backend", [
    SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
])  # fmt: skip
@pytest.mark.parametrize("offload", [False, True])
def test_on_cuda_kept_attention_gives_the_same_bytes(backend, offload):
    cuda = torch.device("cuda")
    kernel = Kernel("sdpa")  # the choice of SDPA's kernel is the test's
    tensors = inputs(torch.bfloat16, device=cuda)
    ordered = backend != SDPBackend.CUDNN_ATTENTION  # its backward pass has no fixed order of adding
    torch.use_deterministic_algorithms(ordered)
    try:
        with sdpa_kernel(backend):
            plain = gradients(lambda *tensors: region(kernel, *tensors), tensors)
            found = checkpointed(kernel, tensors, keep=True, offload=offload)
    finally:
        torch.use_deterministic_algorithms(False)
    if ordered:
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert off(found, plain) < 0.004
    wide = [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]
    assert off([tensor.cpu() for tensor in found], gradients(lambda *tensors: region(exact, *tensors), wide)) < 0.02
