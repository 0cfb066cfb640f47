"""The GPU's kernels against PyTorch's operations, run by Triton's interpreter: no GPU is needed for what they compute.

Needs Triton, which PyTorch for the CPU does not bring: CI's part `kernels` installs it. Where there is a GPU, the tests
of the transformer go through the compiled kernels.
"""

import os

import pytest
import torch

# Read when a kernel is made, and so before the module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed: CI's part `kernels` has it")

from wangen.runtime.fast import dit_kernels, dit_norms

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Of the norm of a result: what two orders of adding up in float32 differ by, and one rounding to bfloat16."""


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
def test_layer_norm_and_its_gradient(draw, dtype, width):
    tokens, gradient = draw(5, width, dtype=dtype) * 2 + 1, draw(5, width, dtype=dtype)
    weight, bias = draw(width), draw(width)
    output, *moments = dit_kernels.layer_norm(tokens, weight, bias, EPS)
    exact = tokens.double().requires_grad_()
    expected = torch.nn.functional.layer_norm(exact, [width], weight.double(), bias.double(), EPS)
    assert_close(output, expected.to(dtype))
    (slope,) = torch.autograd.grad(expected, exact, gradient.double())
    assert_close(dit_kernels.layer_norm_back(gradient, tokens, *moments, weight), slope.to(dtype))


SHAPES = {
    "one norm over all heads": (96, (96,)),
    "query beside key": (96, (2, 48)),
    "a norm for each head": (96, (16,)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("turns", [True, False])
def test_rms_norm_with_rotation_and_its_gradient(draw, dtype, name, turns):
    channels, shape = SHAPES[name]
    apart = draw(6, channels + 8, dtype=dtype)  # rows that do not follow each other, as of a product of three layers
    inputs, gradient, weight = apart[:, :channels], draw(6, channels, dtype=dtype), draw(*shape)
    angles = draw(3, 8)  # positions of an item, of which there are two
    table = torch.polar(torch.ones_like(angles), angles) if turns else None
    output, roots = dit_kernels.rms_rotary(inputs, weight, table, EPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dit_norms, "kernels_for", lambda _: None)
        expected, expected_roots = dit_norms.rms_rotary(inputs, weight, table, EPS)
        slope = dit_norms.rms_rotary_back(gradient, inputs, expected_roots, weight, table)
    assert_close(output, expected)
    assert_close(roots, expected_roots)
    assert_close(dit_kernels.rms_rotary_back(gradient, inputs, roots, weight, table), slope)


@pytest.mark.parametrize("runs", [(7,), (3, 4)])
def test_gates_and_their_gradient(draw, dtype, runs, monkeypatch):
    residual, branch, gates = draw(7, 40, dtype=dtype), draw(7, 40, dtype=dtype), draw(len(runs), 40)
    monkeypatch.setattr(dit_norms, "kernels_for", lambda _: None)
    expected, slope = dit_norms.gated(residual, branch, gates, runs), dit_norms.gated_back(residual, gates, runs)
    monkeypatch.setattr(dit_norms, "kernels_for", lambda _: dit_kernels)
    assert_close(dit_norms.gated_back(residual, gates, runs), slope)
    assert_close(dit_norms.gated(residual, branch, gates, runs), expected)
    assert_close(dit_norms.gated(residual, branch, gates, runs, output=branch), expected)  # in place


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


def test_without_triton_pytorch_computes(caplog, monkeypatch):
    dit_norms.kernels_on.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "wangen.runtime.fast.dit_kernels", None)
    monkeypatch.delattr("wangen.runtime.fast.dit_kernels", raising=False)
    with caplog.at_level("INFO", "wangen"):
        assert dit_norms.kernels_on(torch.device("cuda", 0)) is None
    assert "Triton does not run here" in caplog.text
    dit_norms.kernels_on.cache_clear()
