"""Attention kernels: gradients under every name, what takes a missing kernel's place, outputs that are kept.

The packages' kernels need a GPU. Here functions of the same names and signatures stand in for them; they compute
attention exactly, and the one for sage passes no gradient on, as the real one.
"""

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from wangen.runtime.fast import attention, attention_operators
from wangen.runtime.fast.attention import Kernel, Stash, choose_kernel, pad_biases

CPU = torch.device("cpu")
FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
NAMES = ("auto", "sdpa", "flash", "flash3", "xformers", "sage")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's operators run on CUDA")


def exact(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    return (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias).softmax(-1) @ value


def by_token(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention on (B, N, H, D)."""
    return exact(*(tensor.transpose(1, 2) for tensor in (query, key, value))).transpose(1, 2)


def sage(query: Tensor, key: Tensor, value: Tensor, *, tensor_layout: str, is_causal: bool) -> Tensor:
    assert tensor_layout == "HND"
    assert not is_causal
    return exact(query.detach(), key.detach(), value.detach())


STAND_INS: dict[str, dict[str, Callable[..., Any]]] = {
    "flash_attn": {"flash_attn_func": by_token},
    "flash_attn_interface": {"flash_attn_func": lambda q, k, v: (by_token(q, k, v), q.new_zeros(()))},  # as its first
    "xformers": {},
    "xformers.ops": {"memory_efficient_attention": by_token},
    "sageattention": {"sageattn": sage},
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No choice is remembered from one test to the next."""
    attention._choose.cache_clear()
    yield
    attention._choose.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(*names: str, **functions: Callable[..., Any]) -> None:
        for name in names:
            module = ModuleType(name)
            for attribute, function in {**STAND_INS[name], **functions}.items():
                setattr(module, attribute, function)
            monkeypatch.setitem(sys.modules, name, module)

    for name in STAND_INS:  # what is really installed here stays out of it
        monkeypatch.setitem(sys.modules, name, None)
    return put


def inputs(dtype: torch.dtype, *, keys: int = 40, items: int = 2, device: torch.device = CPU) -> list[Tensor]:
    """Queries, keys and values (B, H, N, D), views of (B, N, H, D) as a transformer has them."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(items, rows, 3, 32, generator=generator).to(device, dtype).transpose(1, 2).requires_grad_()
        for rows in (40, keys, keys)
    ]


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], *rest: Any) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    output = function(*tensors, *rest)
    # Numbers of bfloat16, the same for every dtype.
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).bfloat16().to(output)
    return [output.detach(), *torch.autograd.grad(output, tensors, weights)]


def off(found: list[Tensor], expected: list[Tensor]) -> float:
    """The worst relative error of a tensor."""
    return max(
        ((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_query_key_and_value_get_the_exact_gradient_under_every_choice(install, name, dtype, bound):
    install(*STAND_INS)
    kernel = choose_kernel(name, CPU, dtype)
    assert kernel.name == ("flash3" if name == "auto" else name)
    tensors = inputs(dtype)
    bias = torch.zeros(2, 1, 1, 40)
    bias[0, ..., 30:] = -math.inf
    bias[1, ..., -1] = math.log(466)
    for split in (kernel, kernel.by_item()):
        assert off(gradients(split, tensors), gradients(exact, tensors)) < bound
        assert off(gradients(split, tensors, bias), gradients(exact, tensors, bias.to(dtype))) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_the_cpu_sixteen_bits_lose_less_than_in_the_operators_own_way(dtype):
    tensors = inputs(dtype, keys=47)
    bias = torch.zeros(2, 1, 1, 47)
    bias[..., -1] = math.log(466)  # no number of 16 bits
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    kernel = choose_kernel("sdpa", CPU, dtype)
    assert kernel.pad_copies == 1
    for rest in ((), (bias,)):
        expected = gradients(exact, wide, *rest)
        found = gradients(kernel, tensors, *rest)
        usual = gradients(functional.scaled_dot_product_attention, tensors, *rest)
        assert {tensor.dtype for tensor in found} == {dtype}
        for one, other, right in zip(found, usual, expected, strict=True):
            assert off([one], [right]) < off([other], [right])
        for number in (0, 3):  # the output, and the gradient of the values
            assert off([found[number]], [expected[number]]) < torch.finfo(dtype).eps / 4


def test_auto_takes_the_first_that_runs_and_never_sage(install, caplog):
    with caplog.at_level(logging.WARNING):
        install("sageattention", "xformers", "xformers.ops")
        assert choose_kernel("auto", CPU, torch.float32).name == "sdpa"
        attention._choose.cache_clear()
        install("flash_attn")
        assert choose_kernel("auto", CPU, torch.float32).name == "flash"
        attention._choose.cache_clear()
        install("flash_attn_interface", flash_attn_func=lambda q, k, v: by_token(q, k, v).detach())
        assert choose_kernel("auto", CPU, torch.float32).name == "flash"  # the other has no backward pass
        assert choose_kernel("auto", CPU, torch.float32, backward=False).name == "flash3"
    assert not caplog.records


@pytest.mark.parametrize(("name", "package"), attention.PACKAGES.items())
def test_a_missing_kernel_falls_back_with_one_warning_that_names_its_package(install, caplog, name, package):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert choose_kernel(name, CPU, torch.float32).name == "sdpa"
    (record,) = caplog.records
    assert f"attention kernel {name} does not run here" in record.getMessage()
    assert f"pip install {package}`" in record.getMessage()
    assert "sdpa takes its place" in record.getMessage()


@pytest.mark.parametrize(("function", "reason"), [
    (lambda q, k, v: by_token(q, k, v).detach(), "gives no gradient"),
    (lambda q, k, v: by_token(q, k, v.detach()), "gives no gradient"),
    (lambda q, k, v: by_token(q, -k + 2 * k.detach(), v), "gradient is wrong"),
    (lambda q, k, v: by_token(q, k, v + 1), "output is wrong"),
    (lambda q, k, v: by_token(q, k, v) * math.nan, "output is wrong"),
    (lambda q, k, v: torch.ones(2) + torch.ones(3), "size of tensor"),
])  # fmt: skip
def test_a_kernel_that_runs_wrongly_is_not_taken(install, caplog, function, reason):
    install("flash_attn", flash_attn_func=function)
    with caplog.at_level(logging.WARNING):
        assert choose_kernel("flash", CPU, torch.float32).name == "sdpa"
    assert reason in caplog.text


def test_sage_computes_the_output_and_never_the_gradient(install):
    install("sageattention", sageattn=lambda *tensors, **layout: 1.01 * sage(*tensors, **layout))
    kernel = choose_kernel("sage", CPU, torch.float64)
    tensors = inputs(torch.float64)
    output, *found = gradients(kernel, tensors)
    expected, *slopes = gradients(exact, tensors)
    assert torch.allclose(output, 1.01 * expected, rtol=1e-12)
    assert off(found, slopes) < 1e-12


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.items: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function.__name__.split(".")[0]] += 1
        if function.__name__.split(".")[0] == FORWARD:
            self.items.append(len(args[0]))
        return function(*args, **(kwargs or {}))


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
        extra = {"context_fn": stash.contexts} if keep else {}
        return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False, **extra)

    found = gradients(whole, tensors)
    assert stash.held_bytes() == 0
    return found


@pytest.mark.parametrize("name", ["sdpa", "sage"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kept_attention_gives_the_same_bytes(install, name, dtype):
    install("sageattention")
    kernel = choose_kernel(name, CPU, dtype)
    assert kernel.name == name
    tensors = inputs(dtype)
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
    assert calls.names[FORWARD] == 2
    sdpa = checkpointed(choose_kernel("sdpa", CPU, torch.float32), tensors, keep=True)
    assert all(torch.equal(a, b) for a, b in zip(found, sdpa, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_not_computed_again(install, dtype):
    kernel, tensors = choose_kernel("sdpa", CPU, dtype), inputs(dtype)
    counts = {}
    for keep in (False, True):
        with Calls() as calls:
            checkpointed(kernel, tensors, keep=keep)
        counts[keep] = calls.names[FORWARD], calls.names[f"{FORWARD}_backward"]
    assert counts == {False: (4, 2), True: (2, 2)}  # of the two calls of the region

    runs = []
    install("sageattention", sageattn=lambda *tensors, **layout: runs.append(1) or sage(*tensors, **layout))
    kernel = choose_kernel("sage", CPU, dtype)
    runs.clear()
    checkpointed(kernel, tensors, keep=True)
    assert len(runs) == 2


def test_a_stash_holds_output_and_logsumexp_between_the_passes_only():
    kernel, stash = choose_kernel("sdpa", CPU, torch.float32), Stash()
    tensors = inputs(torch.float32)
    output = checkpoint(
        lambda *tensors: kernel.kept(*tensors, stash).square(),
        *tensors, use_reentrant=False, preserve_rng_state=False, context_fn=stash.contexts,
    )  # fmt: skip
    assert stash.held_bytes() == 4 * (2 * 3 * 40 * 32 + 2 * 3 * 40)
    with pytest.raises(AssertionError, match="serves one forward pass"), stash.recording():
        pass
    output.sum().backward(retain_graph=True)
    assert stash.held_bytes() == 0
    with pytest.raises(AssertionError, match="recomputed once"), stash.replaying():
        kernel.kept(*tensors, stash)


def test_outside_of_checkpointing_nothing_is_held():
    kernel, stash, tensors = choose_kernel("sdpa", CPU, torch.float32), Stash(), inputs(torch.float32)
    found = gradients(lambda q, k, v: kernel.kept(q, k, v, stash), tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(kernel, tensors), strict=True))
    assert stash.held_bytes() == 0


def test_by_item_attention_runs_for_one_item_at_a_time():
    kernel, tensors = choose_kernel("sdpa", CPU, torch.float32).by_item(), inputs(torch.float32, items=3)
    with torch.no_grad(), Calls() as calls:
        output = kernel(*tensors)
        kernel.kept(*tensors, Stash())
        kernel(*tensors, torch.zeros(3, 1, 1, 40))
    assert calls.items == [1] * 9
    assert output.transpose(1, 2).is_contiguous()  # heads join without a copy


@pytest.mark.filterwarnings("ignore")  # the compiler looks at what it should not, and is warned
def test_a_compiled_block_takes_the_kernel_into_its_graph_and_a_kept_one_beside_it():
    kernel, tensors = choose_kernel("sdpa", CPU, torch.bfloat16), inputs(torch.bfloat16)
    bias = torch.zeros(2, 1, 1, 40)
    compiled = torch.compile(lambda *rest: kernel(*rest).square(), fullgraph=True, backend="eager")
    plain = gradients(lambda *rest: kernel(*rest).square(), tensors, bias)
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled, tensors, bias), plain, strict=True))

    stash = Stash()
    kept = torch.compile(lambda q, k, v: region(lambda *rest: kernel.kept(*rest, stash), q, k, v), backend="eager")
    found = gradients(
        lambda *tensors: checkpoint(
            kept, *tensors, use_reentrant=False, preserve_rng_state=False, context_fn=stash.contexts
        ),
        tensors,
    )
    plain = gradients(lambda *tensors: region(kernel, *tensors), tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_biases_of_the_padding_lie_on_the_bfloat16_grid_and_add_up():
    def share(biases: tuple[float, ...]) -> float:
        return sum(math.exp(bias) for bias in biases)

    rounded = math.exp(torch.tensor(math.log(466)).bfloat16().item())
    assert rounded / 466 - 1 == pytest.approx(0.012, abs=5e-4)  # what the copies are for
    assert 1 - share(pad_biases(466, 2)) / 466 == pytest.approx(1.7e-4, abs=5e-6)
    assert 1 - share(pad_biases(466, 3)) / 466 == pytest.approx(2e-6, abs=5e-7)
    for count in range(1, 513):
        assert pad_biases(count, 1) == (math.log(count),)
        for copies, bound in ((2, 5e-4), (3, 7e-6)):
            biases = pad_biases(count, copies)
            assert len(biases) == copies
            assert torch.tensor(biases).bfloat16().double().tolist() == list(biases)
            assert torch.tensor(biases).half().double().tolist() == list(biases)
            assert 0 <= count - share(biases) < bound * count
    assert pad_biases(0, 3) == (-math.inf,) * 3


def test_a_key_with_their_bias_acts_as_all_equal_keys_did():
    query, key, value = (tensor.detach() for tensor in inputs(torch.float64, keys=30, items=1))
    full = [torch.cat([tensor[:, :, :29], tensor[:, :, 29:].expand(-1, -1, 483, -1)], 2) for tensor in (key, value)]
    expected = exact(query, *full)
    kernel = choose_kernel("sdpa", CPU, torch.float64)
    for copies, bound in ((1, 1e-12), (3, 1e-5)):
        short = [torch.cat([tensor, *[tensor[:, :, 29:]] * (copies - 1)], 2) for tensor in (key, value)]
        bias = torch.cat([torch.zeros(29, dtype=torch.float64), torch.tensor(pad_biases(483, copies)).double()])
        if copies == 1:
            bias[-1] = math.log(483)  # in float32 it would be rounded
        assert off([kernel(query, *short, bias.reshape(1, 1, 1, -1))], [expected]) < bound


def test_cudnn_comes_first_on_hopper_only(monkeypatch):
    cuda, orders = torch.device("cuda"), []
    usual = torch._C._get_sdp_priority_order()
    attend = functional.scaled_dot_product_attention

    def spy(*tensors: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        orders.append(torch._C._get_sdp_priority_order())
        return attend(*tensors, attn_mask=attn_mask)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    for capability, first in (((9, 0), SDPBackend.CUDNN_ATTENTION.value), ((8, 9), usual[0]), ((12, 0), usual[0])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None, it=capability: it)
        attention._choose.cache_clear()
        kernel = choose_kernel("sdpa", cuda, torch.bfloat16)
        assert kernel.pad_copies == 3  # CUDA's kernels take a bias in their own dtype
        tensors = inputs(torch.float32)
        kernel(*tensors)
        assert orders.pop()[0] == first
        kernel(*tensors, torch.zeros(2, 1, 1, 40))
        assert orders.pop() == usual
        assert torch._C._get_sdp_priority_order() == usual
    monkeypatch.setattr(torch.version, "hip", "6.4")  # its cards have such capabilities too
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    attention._choose.cache_clear()
    assert not choose_kernel("sdpa", cuda, torch.bfloat16).cudnn_first


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
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(backend):
            plain = gradients(lambda *tensors: region(kernel, *tensors), tensors)
            found = checkpointed(kernel, tensors, keep=True, offload=offload)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    wide = [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]
    assert off([tensor.cpu() for tensor in found], gradients(lambda *tensors: region(exact, *tensors), wide)) < 0.02
