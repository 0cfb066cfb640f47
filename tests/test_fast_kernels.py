"""The GPU's kernels against PyTorch's operations, run by Triton's interpreter: no GPU is needed for what they compute.

Needs Triton, which PyTorch for the CPU does not bring: CI's part `kernels` installs it. Where there is a GPU, the tests
of the transformer go through the compiled kernels.
"""

import os
import sys

import pytest
import torch

if not (torch.version.cuda or torch.version.hip) or not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is made, and so before the module is imported
pytest.importorskip("triton", reason="triton is not installed: CI's part `kernels` has it")

from wangen.runtime.fast import dit_kernels, dit_norms
from wangen.runtime.memory import quantize
from wangen.runtime.memory.quantize import FORMS, pack
from wangen.runtime.weights import unpack_kernels, unpacking
from wangen.runtime.weights.quantized import Coding

DEVICE = torch.device("cpu" if "TRITON_INTERPRET" in os.environ else "cuda")
EPS = 0.1  # large enough to be seen
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Of the norm of a result: what two orders of adding up in float32 differ by, and one rounding to bfloat16."""


@pytest.fixture
def by(monkeypatch):
    """A function of `dit_norms`, called by PyTorch's operations or by the kernels."""

    def called(name: str, *arguments, kernels: bool, **options):
        monkeypatch.setattr(dit_norms, "kernels_for", lambda _: dit_kernels if kernels else None)
        return getattr(dit_norms, name)(*arguments, **options)

    return called


@pytest.fixture(params=ROUNDING, ids=["float32", "bfloat16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    return drawn


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < ROUNDING[found.dtype]


@pytest.mark.parametrize("width", [48, 64, 200])  # a power of 2, and others: a part of the last threads is idle
def test_layer_norm_and_its_gradient(draw, by, dtype, width):
    tokens, gradient = draw(5, width, dtype=dtype) * 2 + 1, draw(5, width, dtype=dtype)
    weight, bias = draw(width), draw(width)
    output, moments = by("layer_norm", tokens, weight, bias, EPS, kernels=True)
    exact = tokens.double().requires_grad_()
    expected = torch.nn.functional.layer_norm(exact, [width], weight.double(), bias.double(), EPS)
    assert_close(output, expected.to(dtype))
    (slope,) = torch.autograd.grad(expected, exact, gradient.double())
    assert_close(by("layer_norm_back", gradient, tokens, moments, weight, kernels=True), slope.to(dtype))


SHAPES = {
    "one norm over all heads": (96, (96,)),
    "query beside key": (96, (2, 48)),
    "a norm for each head": (96, (16,)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("turns", [True, False])
def test_rms_norm_with_rotation_and_its_gradient(draw, by, dtype, name, turns):
    channels, shape = SHAPES[name]
    apart = draw(6, channels + 8, dtype=dtype)  # rows that do not follow each other, as of a product of three layers
    inputs, gradient, weight = apart[:, :channels], draw(6, channels, dtype=dtype), draw(*shape)
    angles = draw(3, 8)  # positions of an item, of which there are two
    table = torch.polar(torch.ones_like(angles), angles) if turns else None
    output, roots = by("rms_rotary", inputs, weight, table, EPS, kernels=True)
    expected, expected_roots = by("rms_rotary", inputs, weight, table, EPS, kernels=False)
    assert_close(output, expected)
    assert_close(roots, expected_roots)
    back = ("rms_rotary_back", gradient, inputs, roots, weight, table)
    assert_close(by(*back, kernels=True), by(*back, kernels=False))


def test_tensors_may_lie_in_any_way(draw, by):
    tokens, weight, bias = draw(40, 6).t(), draw(80)[::2], draw(1).expand(40)
    angles = draw(3, 20)
    table = torch.polar(torch.ones_like(angles), angles)[:, :10]
    apart = draw(6, 48)[:, :40]
    for name, *given in (("layer_norm", tokens, weight, bias, EPS), ("rms_rotary", apart, weight, table, EPS)):
        assert_close(by(name, *given, kernels=True)[0], by(name, *given, kernels=False)[0])
    gates = draw(40, 2).t()
    found, expected = (by("gated", tokens, tokens, gates, (2, 4), kernels=kernels) for kernels in (True, False))
    assert_close(found, expected)


@pytest.mark.parametrize("runs", [(7,), (3, 4)])
def test_gates_and_their_gradient(draw, by, dtype, runs):
    residual, branch, gates = draw(7, 40, dtype=dtype), draw(7, 40, dtype=dtype), draw(len(runs), 40)
    slopes = (by("gated_back", residual, gates, runs, kernels=kernels) for kernels in (True, False))
    assert_close(*slopes)
    expected = by("gated", residual, branch, gates, runs, kernels=False)
    assert_close(by("gated", residual, branch, gates, runs, kernels=True), expected)
    assert_close(by("gated", residual, branch, gates, runs, output=branch, kernels=True), expected)  # in place


@pytest.mark.skipif(DEVICE.type != "cuda", reason="compiles kernels for a GPU; there is none")
def test_a_gpu_takes_them():
    assert dit_norms.kernels_on(DEVICE) is dit_kernels


def test_the_trial_runs_every_kernel_and_refuses_wrong_ones(monkeypatch):
    dit_norms._try(dit_kernels, DEVICE)
    called = []
    for name in ("layer_norm", "layer_norm_back", "rms_rotary", "rms_rotary_back", "gated"):
        real = getattr(dit_kernels, name)
        monkeypatch.setattr(dit_kernels, name, lambda *given, name=name, real=real: called.append(name) or real(*given))
    dit_norms._try(dit_kernels, DEVICE)
    assert sorted(called) == ["gated", "layer_norm", "layer_norm_back", "rms_rotary", "rms_rotary_back"]
    monkeypatch.setattr(dit_kernels, "rms_rotary_back", lambda gradient, *_: gradient * torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        dit_norms._try(dit_kernels, DEVICE)


def test_a_gpu_on_which_they_fail_does_without(caplog, monkeypatch):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler.\nmore")

    dit_norms.kernels_on.cache_clear()
    monkeypatch.setattr(dit_norms, "_try", fail)
    with caplog.at_level("INFO", "wangen"):
        assert dit_norms.kernels_on(torch.device("cuda", 0)) is None
    assert [text.rpartition(";")[2] for text in caplog.messages] == [
        " Triton does not run here (Failed to find C compiler.)"
    ]
    dit_norms.kernels_on.cache_clear()


def test_who_is_computed_by_kernels(monkeypatch):
    monkeypatch.setattr(dit_norms, "kernels_on", lambda device: device.type)
    assert dit_norms.kernels_for(torch.zeros(1)) is None  # the CPU's own operations
    assert dit_norms.kernels_for(torch.zeros(1, device="meta")) == "meta"  # as the device says
    assert dit_norms.kernels_for(torch.zeros(1, device="meta", dtype=torch.float64)) is None


def test_without_triton_pytorch_computes(caplog, monkeypatch):
    dit_norms.kernels_on.cache_clear()
    monkeypatch.setitem(sys.modules, "wangen.runtime.fast.dit_kernels", None)
    monkeypatch.delattr("wangen.runtime.fast.dit_kernels", raising=False)
    with caplog.at_level("INFO", "wangen"):
        assert dit_norms.kernels_on(torch.device("cuda", 0)) is None
    assert "Triton does not run here" in caplog.text
    dit_norms.kernels_on.cache_clear()


# ---- weights of 8 bits -------------------------------------------------------------------------------------------

OUTPUTS = [torch.float32, torch.bfloat16, torch.float16]
silent = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of bytes that are no numbers


def as_stored(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a kernel writes of numbers in float32: Triton's interpreter cuts to bfloat16, where GPUs round."""
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        return torch.where(wide.isnan(), wide, (wide.view(torch.int32) & -65536).view(torch.float32)).to(dtype)
    return wide.to(dtype)


@pytest.fixture
def by_kernel(monkeypatch):
    """Whether weights are unpacked by the kernel, to be set."""

    def chosen(kernel: bool) -> None:
        for module in ("memory.quantize", "weights.quantized"):
            monkeypatch.setattr(f"wangen.runtime.{module}.unpacked", on_kernel if kernel else lambda *_: False)
        monkeypatch.setattr(quantize, "unpacked_pairs", pairs_on_kernel if kernel else lambda *_: False)

    def pairs_on_kernel(*words) -> bool:
        unpack_kernels.unpack_pairs(*words)
        return True

    def on_kernel(stored, scale, kind, out) -> bool:
        unpack_kernels.unpack(stored, scale, unpack_kernels.KINDS[kind], out)
        return True

    return chosen


@pytest.mark.parametrize("out", OUTPUTS, ids=str)
@pytest.mark.parametrize("mode", FORMS)
@pytest.mark.parametrize("shape", [(3, 64), (70, 320), (5, 48)], ids=str)  # of several programs, and odd blocks
def test_quantised_weights_are_unpacked_to_the_same_bits(draw, by_kernel, mode, shape, out):
    packed = pack(draw(*shape) * 3, mode)
    found, wide = torch.empty(shape, dtype=out, device=DEVICE), torch.empty(shape, device=DEVICE)
    by_kernel(True)
    FORMS[mode].unpack(packed, found)
    by_kernel(False)
    FORMS[mode].unpack(packed, wide)
    assert torch.equal(found, as_stored(wide, out))
    assert found.abs().max() > 0


@silent
@pytest.mark.parametrize("out", OUTPUTS, ids=str)
@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("shape", [(), (6, 1), (6, 2, 1)], ids=str)
def test_weights_of_a_file_are_unpacked_to_the_same_bits(draw, by_kernel, kind, shape, out):
    """All bytes, also those that are no finite numbers."""
    stored = torch.arange(6 * 48, device=DEVICE).to(torch.int8).view(6, 48)
    scale = draw(*shape).abs() * 1e-3 + 1e-4
    by_kernel(True)
    found = Coding(kind, (6, 48)).decode(stored, scale, out)
    by_kernel(False)
    wide = Coding(kind, (6, 48)).decode(stored, scale, torch.float32)
    assert found.dtype == out
    assert torch.equal(found.nan_to_num(7.0, 8.0, 9.0), as_stored(wide, out).nan_to_num(7.0, 8.0, 9.0))


@silent
def test_the_trial_refuses_kernels_that_unpack_wrong_numbers(monkeypatch):
    unpacking._try(unpack_kernels, DEVICE)
    monkeypatch.setattr(unpack_kernels, "KINDS", {"int8": 1})
    with pytest.raises(ValueError, match="stored as int8 are wrong"):
        unpacking._try(unpack_kernels, DEVICE)
    monkeypatch.undo()
    monkeypatch.setattr(unpack_kernels, "unpack_pairs", lambda *words: words[-1].zero_())
    with pytest.raises(ValueError, match="in pairs are wrong"):
        unpacking._try(unpack_kernels, DEVICE)


def test_weights_elsewhere_are_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(unpacking, "_kernels_on", lambda _: pytest.fail("no GPU"))
    assert not unpacking.unpacked(torch.zeros(2, 2, dtype=torch.int8), torch.ones(1), "int8", torch.zeros(2, 2))
