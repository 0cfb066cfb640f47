import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from helpers import every
from parity import DITS, no_less_exact, predicted, rel_rms
from peft import LoHaConfig, LoKrConfig, LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from test_transformers import write_gguf, write_like_comfyui
from torch.overrides import TorchFunctionMode

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.runtime.memory import quantize
from wangen.runtime.memory.quantize import FORMS, NF4, QuantLinear, in_blocks, quantize_blocks, quantized
from wangen.runtime.weights import transformer
from wangen.runtime.weights.quantized import Coding
from wangen.runtime.weights.transformer import load_transformer

MODES = tuple(FORMS)
NAME = "dit_t2v21"

# Root mean square errors relative to the plain model's, as docs/memory.md states them.
WEIGHT_BOUNDS = {"fp8": 0.027, "int8": 0.0068, "nf4": 0.096}
FORWARD_BOUNDS = {"fp8": 0.045, "int8": 0.011, "nf4": 0.15}
GRADIENT_BOUNDS = {"fp8": 0.085, "int8": 0.02, "nf4": 0.30}


class Constants(TorchFunctionMode):
    """Counts those that are made: each waits for a GPU."""

    made = 0

    def __torch_function__(self, func, _types, args=(), kwargs=None):
        self.made += func is torch.tensor
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["Q4_0", "Q3_K", "Q6_K"])
def test_weights_in_ggufs_blocks_are_decoded_without_new_constants(kind):
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    coding, stored = Coding(kind, (4, size)), torch.arange(4 * num_bytes).reshape(4, -1).to(torch.int8)
    first = coding.decode(stored, None, torch.float32)
    with Constants() as constants:
        assert coding.decode(stored, None, torch.float32).equal(first)
    assert constants.made == 0


def linear(rows: int = 96, columns: int = 256, *, dtype: torch.dtype = torch.float32, bias: bool = True):
    """A layer with weights as those of a trained model lie: normally distributed, each row with its own size."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(columns, rows, bias=bias, dtype=dtype)
    with torch.no_grad():
        sizes = torch.rand(rows, 1, generator=generator) + 0.1
        layer.weight.copy_(torch.randn(rows, columns, generator=generator) * sizes * 0.03)
    return layer.requires_grad_(False)


def adapt(model: torch.nn.Module, kind: str = "lora") -> dict[str, torch.nn.Parameter]:
    """Add an adapter whose every tensor is drawn, so that every gradient says something."""
    targets = profiles.model("i2v-14B").lora_targets
    config = {
        "lora": lambda: LoraConfig(r=4, lora_alpha=4, target_modules=targets),
        "dora": lambda: LoraConfig(r=4, lora_alpha=4, target_modules=targets, use_dora=True),
        "loha": lambda: LoHaConfig(r=4, alpha=4, target_modules=targets),
        "lokr": lambda: LoKrConfig(r=4, alpha=4, target_modules=targets),
    }[kind]()
    before = {id(parameter) for parameter in model.parameters()}
    model.add_adapter(config)
    parameters = {name: value for name, value in model.named_parameters() if id(value) not in before}
    generator = torch.Generator().manual_seed(1)
    for name, parameter in parameters.items():
        parameter.data = parameter.data.float()
        if "magnitude" not in name:
            scale = 0.05 if "lora_B" in name else 0.05 if kind in ("loha", "lokr") else parameter.shape[1] ** -0.5
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        parameter.requires_grad_(True)
    return parameters


def step(model: torch.nn.Module, name: str = NAME, kind: str = "lora") -> tuple[torch.Tensor, torch.Tensor]:
    """The velocity, and the gradient of all adapter parameters in one row."""
    parameters = adapt(model, kind)
    output = predicted(model, name)
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in parameters.values())
    return output.detach(), torch.cat([parameters[key].grad.flatten() for key in sorted(parameters)])


def plain_copy(model: torch.nn.Module) -> torch.nn.Module:
    """The model with ordinary linear layers that have the dequantised weights."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantLinear):
            plain = torch.nn.Linear(layer.in_features, layer.out_features, device="meta")
            plain.weight = torch.nn.Parameter(layer.dequantized(torch.float32), requires_grad=False)
            plain.bias = layer.bias
            model.set_submodule(name, plain)
    return model


# ---- one layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_weights_keep_to_the_stated_error_and_size(mode):
    layer = linear(512, 1024)
    packed = quantized(layer, mode)
    error = rel_rms(packed.dequantized(torch.float32), layer.weight)
    assert WEIGHT_BOUNDS[mode] / 1.3 < error < WEIGHT_BOUNDS[mode]
    stored = sum(value.numel() * value.element_size() for value in (packed.numbers, packed.scale))
    assert stored * 8 == FORMS[mode].bits * layer.weight.numel()
    assert packed.bias is layer.bias


@pytest.mark.parametrize("mode", MODES)
def test_a_scale_per_block_follows_rows_and_columns_of_different_size(mode):
    """One outlier costs its block of 64 its digits, and no other."""
    layer = linear(8, 256)
    layer.weight.data[3, 70] = 50.0
    error = (quantized(layer, mode).dequantized(torch.float32) - layer.weight).abs()
    elsewhere = torch.ones_like(error, dtype=torch.bool)
    elsewhere[3, 64:128] = False
    assert error[3, 64:128].max() > 0.01
    assert error[elsewhere].max() < 0.03
    assert error[3, 70] < 50.0 * 0.04


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantised_weights_are_rounded_once(mode, dtype):
    packed = quantized(linear(64, 192), mode)
    exact = packed.dequantized(torch.float64 if mode == "nf4" else torch.float32)
    assert torch.equal(packed.dequantized(dtype), exact.to(torch.float32).to(dtype))


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_zeros_and_of_tiny_numbers_and_of_any_even_width(mode):
    layer = linear(4, 96)
    layer.weight.data[0] = 0
    layer.weight.data[1] *= 1e-30
    weight = quantized(layer, mode).dequantized(torch.float32)
    assert not weight[0].any()
    assert rel_rms(weight[1] * 1e30, layer.weight[1] * 1e30) < 0.12
    assert rel_rms(weight[2:], layer.weight[2:]) < 0.12


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad):
    layer = linear()
    layer.weight.data[5, 7] = bad
    with pytest.raises(WangenError, match="NaN or infinite"):
        quantized(layer, "int8")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_and_its_gradient_are_those_of_the_dequantised_weight(mode, bias):
    layer = linear(bias=bias)
    packed = quantized(layer, mode)
    inputs = torch.randn(3, 5, 256, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = packed(inputs)
    assert not kept, "nothing may keep a weight for the backward pass"
    direction = torch.randn_like(output)
    (gradient,) = torch.autograd.grad((output * direction).sum(), inputs)
    weight = packed.dequantized(torch.float32)
    assert torch.equal(output, inputs @ weight.T if layer.bias is None else inputs @ weight.T + layer.bias)
    torch.testing.assert_close(gradient, direction @ weight)


def test_under_autocast_the_product_is_in_its_dtype():
    packed = quantized(linear(), "int8")
    with torch.autocast("cpu", torch.bfloat16):
        output = packed(torch.randn(2, 256))
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", MODES)
def test_no_cast_of_the_model_touches_the_numbers(mode):
    packed = quantized(linear(), mode)
    before = packed.dequantized(torch.float32)
    packed.to(torch.float16).to(torch.float32)
    assert torch.equal(packed.dequantized(torch.float32), before)
    again = quantized(linear(), mode)
    again.numbers.data.zero_()
    again.load_state_dict(packed.state_dict())
    assert torch.equal(again.dequantized(torch.float32), before)


def test_the_weight_attribute_describes_and_cannot_be_mistaken_for_numbers():
    packed = quantized(linear(dtype=torch.bfloat16), "nf4")
    assert (packed.weight.shape, packed.weight.dtype) == ((96, 256), torch.bfloat16)
    assert packed.weight.isnan().all()
    with pytest.raises(RuntimeError):
        packed.weight.data += 1  # as peft merges
    with pytest.raises(AttributeError):
        packed.dequantise  # noqa: B018


@pytest.mark.parametrize("mode", MODES)
def test_a_change_can_be_added_for_good(mode):
    layer = linear()
    packed = quantized(layer, mode)
    change = torch.randn(96, 256) * 0.01
    packed.add_(change)
    assert rel_rms(packed.dequantized(torch.float32), layer.weight + change) < 1.6 * WEIGHT_BOUNDS[mode]


def test_nf4_is_the_format_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes").functional
    packed = quantized(linear(), "nf4")
    state = functional.QuantState(
        absmax=packed.scale.view(torch.bfloat16).float().reshape(-1), shape=torch.Size((96, 256)), blocksize=64,
        quant_type="nf4", code=torch.tensor(NF4), dtype=torch.float32,
    )  # fmt: skip
    numbers = packed.numbers.reshape(-1, 1)
    assert torch.equal(functional.dequantize_4bit(numbers, state), packed.dequantized(torch.float32))


def test_the_kernel_of_bitsandbytes_is_asked_on_a_gpu_and_its_absence_is_no_error(monkeypatch):
    """No GPU here: a stand-in with the library's signature fills `out`, and must be given the same bytes."""
    packed = quantized(linear(), "nf4")
    wanted = packed.dequantized(torch.float32)

    def dequantize_4bit(numbers, state, out):
        assert (state.blocksize, state.quant_type, state.dtype) == (64, "nf4", torch.float32)
        code = state.code
        high, low = code[(numbers >> 4).int()], code[(numbers & 15).int()]
        values = torch.cat([high, low], dim=1).reshape(-1, 64) * state.absmax[:, None]
        return out.copy_(values.reshape(out.shape))

    stand_in = SimpleNamespace(dequantize_4bit=dequantize_4bit, QuantState=SimpleNamespace)
    monkeypatch.setattr(quantize, "_bitsandbytes", lambda _device: stand_in)

    class OnGpu(torch.Tensor):
        is_cuda = True

    out = torch.empty(96, 256).as_subclass(OnGpu)
    quantize._unpack_nf4(quantize.Packed(packed.numbers, packed.scale.view(torch.bfloat16)), out)
    assert torch.equal(out.as_subclass(torch.Tensor), wanted)
    monkeypatch.undo()


def test_a_bitsandbytes_that_does_not_run_is_not_asked(monkeypatch):
    """Without a library for this CUDA it can be imported, and raises when it is first used."""

    def raising(_numbers, _state, out):
        raise RuntimeError("Configured CUDA binary not found")

    def wrong(_numbers, _state, out):
        return out.fill_(1)

    def right(numbers, state, out):
        pairs = torch.stack([state.code[(numbers >> 4).int()], state.code[(numbers & 15).int()]], dim=-1)
        return out.copy_(pairs.reshape(out.shape) * state.absmax[:, None])

    def found(library):
        monkeypatch.setitem(sys.modules, "bitsandbytes.functional", library)
        quantize._bitsandbytes.cache_clear()
        return quantize._bitsandbytes(torch.device("cpu"))

    assert found(None) is None
    for dequantize_4bit in (raising, wrong):
        assert found(SimpleNamespace(dequantize_4bit=dequantize_4bit, QuantState=SimpleNamespace)) is None
    library = SimpleNamespace(dequantize_4bit=right, QuantState=SimpleNamespace)
    assert found(library) is library
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert found(library) is None
    quantize._bitsandbytes.cache_clear()


# ---- a transformer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", every(2, sorted(DITS), pytest.mark.slow))
def test_velocity_and_adapter_gradients_keep_to_the_stated_error(mode, name):
    wanted, wanted_gradient = step(load_transformer(DITS[name], dtype=torch.float32), name)
    output, gradient = step(load_transformer(DITS[name], dtype=torch.float32, quantize=mode), name)
    forward_error, gradient_error = rel_rms(output, wanted), rel_rms(gradient, wanted_gradient)
    assert FORWARD_BOUNDS[mode] / 4 < forward_error < FORWARD_BOUNDS[mode]
    assert GRADIENT_BOUNDS[mode] / 4 < gradient_error < GRADIENT_BOUNDS[mode]


SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("loha", "lokr")]


@pytest.mark.parametrize("kind", ["lora", "dora", *SLOW_KINDS])
@pytest.mark.parametrize("mode", every(2, [*MODES, "stored"], pytest.mark.slow))
def test_every_adapter_gets_the_exact_gradient_of_the_dequantised_model(tmp_path: Path, mode, kind):
    path = DITS[NAME]
    if mode == "stored":
        write_like_comfyui(path := tmp_path / "fp8.safetensors", style="scaled")
    model = load_transformer(path, dtype=torch.float32, quantize="none" if mode == "stored" else mode)
    assert {layer.mode for layer in model.modules() if isinstance(layer, QuantLinear)} == {mode}
    plain = plain_copy(model)
    exact, exact_gradient = step(copy.deepcopy(plain).double(), kind=kind)
    assert exact.dtype == torch.float64
    wanted, wanted_gradient = step(plain, kind=kind)
    output, gradient = step(model, kind=kind)
    assert no_less_exact(output, wanted, exact)
    assert no_less_exact(gradient, wanted_gradient, exact_gradient)


def test_only_linear_layers_of_the_blocks_are_quantised_and_loading_does_the_same():
    whole = load_transformer(DITS[NAME], dtype=torch.bfloat16)
    shapes = [layer.weight.shape for layer in whole.modules() if isinstance(layer, torch.nn.Linear)]
    assert quantize_blocks(whole, "int8") == 20
    loaded = load_transformer(DITS[NAME], dtype=torch.bfloat16, quantize="int8", pack_on=torch.device("cpu"))
    assert [layer.weight.shape for layer in loaded.modules() if isinstance(layer, torch.nn.Linear)] == shapes
    assert loaded.state_dict().keys() == whole.state_dict().keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name
        plain = not name.startswith("blocks.") or "norm" in name or "table" in name or name.endswith("bias")
        assert value.is_floating_point() == plain, name
    assert quantize_blocks(whole, "int8") == 20, "once is enough"


def test_each_layer_is_quantised_as_soon_as_it_is_read(monkeypatch):
    """So no more than one layer of the blocks is ever there in full."""
    seen: list[torch.nn.Linear] = []

    def watched(mode, _pack_on):
        def convert(name, layer):
            assert type(layer) is torch.nn.Linear
            assert not layer.weight.is_meta
            made = in_blocks(mode)(name, layer)
            seen.append(made)
            return made

        return convert

    monkeypatch.setattr(transformer, "in_blocks", watched)
    model = load_transformer(DITS[NAME], dtype=torch.float32, quantize="fp8")
    assert sum(isinstance(layer, QuantLinear) for layer in seen) == 20
    assert set(seen) <= set(model.modules())
    assert not [layer for layer in model.blocks.modules() if type(layer) is torch.nn.Linear]


@pytest.mark.parametrize(
    ("kind", "mode", "kept"),
    [("Q8_0", "nf4", False), ("Q8_0", "int8", False), ("Q4_0", "nf4", False), ("Q4_0", "fp8", True),
     ("Q4_0", "none", True), ("Q8_0", "none", True)],
)  # fmt: skip
def test_bytes_of_a_quantised_file_are_kept_where_they_are_no_more(tmp_path: Path, kind, mode, kept):
    meant = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    model = load_transformer(tmp_path / "model.gguf", dtype=torch.float32, quantize=mode)
    layer = model.blocks[1].ffn.net[2]
    assert layer.mode == ("stored" if kept else mode)
    weight = meant["blocks.1.ffn.2.weight"]
    error = rel_rms(layer.dequantized(torch.float32), weight)
    assert error == 0 if kept else 0 < error < 0.12


@pytest.mark.parametrize("style", ["plain", "scaled", "rows", "blocks"])
def test_files_in_8_bits_keep_their_bytes(tmp_path: Path, style):
    meant = write_like_comfyui(tmp_path / "fp8.safetensors", style=style)
    model = load_transformer(tmp_path / "fp8.safetensors", dtype=torch.bfloat16, quantize="fp8")
    layer = model.blocks[0].attn1.to_q
    assert layer.mode == "stored"
    assert layer.dtype == torch.bfloat16
    assert rel_rms(layer.dequantized(torch.float32), meant["blocks.0.self_attn.q.weight"]) < 0.01


def test_adapters_come_after_quantising():
    model = load_transformer(DITS[NAME], dtype=torch.float32)
    adapt(model)
    with pytest.raises(AssertionError, match="before adapters"):
        quantize_blocks(model, "int8")


def test_an_adapter_that_is_switched_off_leaves_the_quantised_base():
    model = load_transformer(DITS[NAME], dtype=torch.float32, quantize="int8")
    with torch.no_grad():
        base = predicted(model, NAME)
        adapt(model)
        assert not torch.equal(predicted(model, NAME), base)
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.enable_adapters(False)
        assert torch.equal(predicted(model, NAME), base)


def test_the_vectors_weights_are_packed_within_the_bounds():
    for path in DITS.values():
        for name, weight in load_file(path).items():
            if name.startswith("blocks.") and weight.ndim == 2:
                layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                layer.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
                for mode in MODES:
                    assert rel_rms(quantized(layer, mode).dequantized(torch.float32), weight) < WEIGHT_BOUNDS[mode]
