"""Attention kernels: gradients under every name, what takes a missing kernel's place, biases for collapsed padding."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import CPU, ON_CPU, STAND_INS, by_token, exact, gradients, inputs, installer, off, sage
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from wangen.runtime.fast import attention, attention_pieces
from wangen.runtime.fast.attention import Kernel, choose_kernel, pad_biases
from wangen.runtime.fast.attention_backends import efficient_first, laid_out

NAMES = ("auto", "sdpa", "flash", "flash3", "xformers", "sage")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Stand-ins for the packages; no choice is remembered from one test to the next."""
    attention._choose.cache_clear()
    yield installer(monkeypatch)
    attention._choose.cache_clear()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("keys", ON_CPU)
def test_query_key_and_value_get_the_exact_gradient_under_every_choice(install, name, dtype, bound, keys):
    install(*STAND_INS)
    kernel = choose_kernel(name, CPU, dtype)
    assert kernel.name == ("flash3" if name == "auto" else name)
    tensors = inputs(dtype, keys=keys)
    bias = torch.zeros(2, 1, 1, keys)
    bias[0, ..., 30:] = -math.inf
    bias[1, ..., -1] = math.log(466)
    for split in (kernel, kernel.by_item()):
        assert off(gradients(split, tensors), gradients(exact, tensors)) < bound
        assert off(gradients(split, tensors, bias), gradients(exact, tensors, bias.to(dtype))) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_the_cpu_sixteen_bits_lose_less_than_in_the_operators_own_way(dtype):
    tensors = inputs(dtype, keys=80)
    bias = torch.zeros(2, 1, 1, 80)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_the_cpu_products_of_sixteen_bits_are_off_by_their_rounding(dtype):
    tensors = inputs(dtype, keys=40)
    bias = torch.zeros(2, 1, 1, 40)
    bias[..., -1] = math.log(466)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    kernel = choose_kernel("sdpa", CPU, dtype)
    for rest in ((), (bias,)):
        found, expected = gradients(kernel, tensors, *rest), gradients(exact, wide, *rest)
        assert {tensor.dtype for tensor in found} == {dtype}
        for one, right, bound in zip(found, expected, (0.35, 0.8, 0.8, 0.35), strict=True):
            assert off([one], [right]) < torch.finfo(dtype).eps * bound


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


@pytest.mark.parametrize(("name", "module"), [("flash", "flash_attn"), ("flash3", "flash_attn_interface")])
def test_a_package_kernel_adds_in_a_fixed_order_when_that_is_asked(install, name, module):
    asked = []

    def function(query: Tensor, key: Tensor, value: Tensor, *, deterministic: bool = False) -> Tensor:
        asked.append(deterministic)
        return by_token(query, key, value)

    install(module, flash_attn_func=function)
    kernel, tensors = choose_kernel(name, CPU, torch.float32), inputs(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        kernel(*tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    kernel(*tensors)
    assert asked[-2:] == [True, False]


def test_sage_computes_the_output_and_never_the_gradient(install):
    install("sageattention", sageattn=lambda *tensors, **layout: 1.01 * sage(*tensors, **layout))
    kernel = choose_kernel("sage", CPU, torch.float64)
    tensors = inputs(torch.float64)
    output, *found = gradients(kernel, tensors)
    expected, *slopes = gradients(exact, tensors)
    assert torch.allclose(output, 1.01 * expected, rtol=1e-12)
    assert off(found, slopes) < 1e-12


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
        tensors = inputs(torch.float32, device=torch.device("meta"))
        kernel(*tensors)
        assert orders.pop()[0] == first
        kernel(*tensors, torch.zeros(2, 1, 1, 40, device="meta"))
        assert orders.pop() == usual
        assert torch._C._get_sdp_priority_order() == usual
    monkeypatch.setattr(torch.version, "hip", "6.4")  # its cards have such capabilities too
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    attention._choose.cache_clear()
    assert not choose_kernel("sdpa", cuda, torch.bfloat16).cudnn_first


class PlannedOnce(torch.autograd.Function):
    """Attention whose backward pass reads gradients by the strides of the first, as PyTorch has cuDNN read them."""

    strides: tuple[int, ...] | None = None

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return exact(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        strides = PlannedOnce.strides = PlannedOnce.strides or gradient.stride()
        with torch.enable_grad():
            return torch.autograd.grad(exact(*leaves), leaves, gradient.as_strided(gradient.shape, strides))


@pytest.mark.parametrize("way", ["call", "apart", "by_item", "sage", "bare"])
def test_a_gradient_is_laid_out_as_the_output(way, monkeypatch, install):
    install("sageattention")
    monkeypatch.setattr(PlannedOnce, "strides", None)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", PlannedOnce.apply)
    monkeypatch.setattr(attention, "operator_for", lambda *_: None)
    monkeypatch.setattr(attention.Kernel, "_operator_on_cpu", lambda *_: None)
    monkeypatch.setattr(Tensor, "is_cuda", way != "bare")
    tensors = inputs(torch.float64)
    kernel = Kernel("sdpa")
    if way == "sage":
        kernel = replace(kernel, function=lambda *tensors: exact(*tensors).detach(), has_gradient=False)
    if way == "by_item":
        kernel = kernel.by_item()
    output, back = kernel(*tensors), None
    if way == "apart":
        output, back = kernel.apart(*tensors)
    draw = torch.Generator().manual_seed(1)
    slope = torch.randn(output.shape, dtype=output.dtype, generator=draw)
    layouts = [slope, slope.transpose(1, 2).contiguous().transpose(1, 2), slope[:1, :1, :1, :1].expand(slope.shape)]
    assert len({layout.stride() for layout in layouts}) == 3
    right = []
    for layout in layouts:
        found = back(layout) if back else torch.autograd.grad(output, tensors, layout, retain_graph=True)
        expected = torch.autograd.grad(exact(*tensors), tensors, layout)
        right.append(off(found, expected) < 1e-12)
        if back:
            output, back = kernel.apart(*tensors)
    assert right == ([True, False, False] if way == "bare" else [True] * 3)


def test_a_gradient_that_is_laid_out_well_is_not_copied():
    gradient = torch.randn(1, 3, 4, 8).transpose(1, 2)
    assert laid_out(gradient, gradient.stride()) is gradient
    assert laid_out(gradient, (7, *gradient.stride()[1:])) is gradient  # of one item
    copy = laid_out(gradient, gradient.contiguous().stride())
    assert copy.is_contiguous()
    assert torch.equal(copy, gradient)


@pytest.mark.parametrize(("capability", "chosen"), [((9, 0), "sdpa"), ((8, 9), "flash"), ((12, 0), "flash")])
def test_on_hopper_cudnn_goes_before_flash_attention_2(capability, chosen, install, monkeypatch):
    install("flash_attn", "xformers", "xformers.ops")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
    monkeypatch.setattr(attention, "_try", lambda *_, **__: None)
    cuda = torch.device("cuda")
    assert choose_kernel("auto", cuda, torch.bfloat16).name == chosen
    assert choose_kernel("sage", cuda, torch.bfloat16).name == chosen
    assert choose_kernel("flash", cuda, torch.bfloat16).name == "flash"
    install("flash_attn", "flash_attn_interface")
    attention._choose.cache_clear()
    assert choose_kernel("auto", cuda, torch.bfloat16).name == "flash3"


def test_with_a_bias_the_efficient_kernel_comes_first_on_a_gpu():
    usual = torch._C._get_sdp_priority_order()
    with efficient_first(torch.device("cuda")):
        assert torch._C._get_sdp_priority_order()[0] == SDPBackend.EFFICIENT_ATTENTION.value
    with efficient_first(CPU):
        assert torch._C._get_sdp_priority_order() == usual
    assert torch._C._get_sdp_priority_order() == usual


def test_before_ampere_bfloat16_is_computed_in_float32(monkeypatch):
    cuda, seen = torch.device("cuda"), []
    attend = functional.scaled_dot_product_attention

    def spy(*tensors: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        seen.append({tensor.dtype for tensor in (*tensors, *([] if attn_mask is None else [attn_mask]))})
        return attend(*tensors, attn_mask=attn_mask)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)

    def kernel(capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> attention.Kernel:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
        attention._choose.cache_clear()
        return choose_kernel("sdpa", cuda, dtype)

    assert not kernel((8, 0)).widens
    assert not kernel((7, 5), torch.float32).widens
    turing = kernel((7, 5))
    tensors = [tensor.bfloat16() for tensor in inputs(torch.float32, device=torch.device("meta"))]
    for bias in ([], [torch.zeros(2, 1, 1, 40, device="meta")]):
        assert turing(*tensors, *bias).dtype == torch.bfloat16
        assert seen.pop() == {torch.float32}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not kernel((7, 5)).widens


def test_what_is_widened_is_rounded_once():
    kernel = attention.Kernel("sdpa", widens=True)
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs(torch.float32)]
    wide = [tensor.detach().float().requires_grad_() for tensor in narrow]
    output, expected = kernel(*narrow), attention.Kernel("sdpa")(*wide)
    assert torch.equal(output, expected.bfloat16())
    for found, right in zip(
        torch.autograd.grad(output.float().square().sum(), narrow),
        torch.autograd.grad(expected.bfloat16().float().square().sum(), wide), strict=True,
    ):  # fmt: skip
        assert torch.equal(found, right.bfloat16())


@pytest.mark.parametrize("pieces", [1, 2, 6])
def test_pieces_of_an_item_see_the_same_keys(pieces):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, tokens, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for tokens in (12, 5, 5)
    )
    bias = torch.randn(2, 1, 1, 5, generator=generator, dtype=torch.float64)
    found = attention_pieces.in_pieces(query, key, value, bias, pieces)
    expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(expected)
    for one, other in zip(
        *(torch.autograd.grad(output, (query, key, value), slope) for output in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_there_are_as_many_pieces_as_a_gpu_has_work_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))

    def pieces(items: int, heads: int, queries: int, keys: int, device: str = "cuda") -> int:
        where = torch.device(device)
        query, key = (SimpleNamespace(shape=(items, heads, rows, 128), device=where) for rows in (queries, keys))
        return attention_pieces.num_pieces(query, key)

    assert pieces(1, 12, 32760, 67) == 21  # the largest divisor that is not above 2 x 132 / 12
    assert pieces(1, 40, 32760, 67) == 6
    assert pieces(1, 40, 32760, 300) == 2
    assert pieces(8, 40, 32760, 67) == 1
    assert pieces(1, 12, 256, 67) == 1  # a small picture: nothing to share out
    assert pieces(1, 12, 32749, 67) == 1  # a prime number of tokens
    assert pieces(1, 12, 32760, 67, "cpu") == 1
