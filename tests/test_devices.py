"""Rules of devices and precision."""

from types import SimpleNamespace

import pytest
import torch

from wangen.generator.errors import UsageError, WangenError
from wangen.generator.memory import GIB
from wangen.runtime import devices
from wangen.runtime.communication import all_there
from wangen.runtime.devices import (
    choose_decoder_dtype,
    choose_device,
    choose_vae_dtype,
    enough_memory,
    exact,
    fixed_order,
    set_attention,
    set_precision,
    within_range,
)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of compute capability 8.9, as torch would describe it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (8, 9))


def test_the_vae_runs_in_the_most_accurate_precision_that_costs_nothing(card, monkeypatch):
    assert choose_vae_dtype(None, torch.device("cuda")) == "float16"
    assert choose_vae_dtype(None, torch.device("cpu")) == "float32"
    assert choose_vae_dtype("bfloat16", torch.device("cuda")) == "bfloat16"
    assert choose_decoder_dtype(None, torch.device("cuda")) == "bfloat16"
    assert choose_decoder_dtype(None, torch.device("cpu")) == "float32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (6, 1))  # computes float16 slowly
    assert choose_vae_dtype(None, torch.device("cuda")) == "float32"


def test_float32_means_float32_while_encoding():
    before = torch.backends.cudnn.allow_tf32
    with torch.autocast("cpu", torch.bfloat16), exact("float32"):
        assert not torch.backends.cudnn.allow_tf32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with exact("float16"):
        assert torch.backends.cudnn.allow_tf32 == before
    assert torch.backends.cudnn.allow_tf32 == before


def test_a_full_memory_is_one_message_and_other_errors_stay():
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
                  RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
                  RuntimeError("CUDA error: out of memory"), RuntimeError("Triton Error [CUDA]: out of memory"),
                  RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")):  # fmt: skip
        with (
            pytest.raises(WangenError, match=r"out of memory encoding cat\.jpg"),
            enough_memory("encoding cat.jpg", "x"),
        ):
            raise error
    with pytest.raises(RuntimeError, match="shapes"), enough_memory("encoding", "x"):
        raise RuntimeError("shapes do not fit")


def test_what_nccl_has_no_memory_for_is_not_the_loss_of_another_process():
    with pytest.raises(RuntimeError, match="out of memory"), all_there():
        raise RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'")


@pytest.mark.parametrize("asked", [True, False])
def test_an_order_that_is_asked_for_is_kept_strictly_for_a_while(asked):
    try:
        if asked:
            set_precision(deterministic=True, tf32=False)
        with fixed_order():
            assert torch.are_deterministic_algorithms_enabled() == asked
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() == asked
        assert torch.is_deterministic_algorithms_warn_only_enabled() == asked
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_device_that_is_not_there_is_named():
    assert choose_device("cpu").type == "cpu"
    for name in ("warp", "meta"):
        with pytest.raises(UsageError, match=f"--device {name}"):
            choose_device(name)


def test_a_gpu_that_nobody_asked_for_by_name_is_not_called_a_wrong_flag(monkeypatch: pytest.MonkeyPatch):
    """There is one, and it does not answer."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match=r"^the GPU: ") as error:
        choose_device(None)
    assert error.value.cure == "give --device cpu"


class Transformer:
    def set_attention_backend(self, name: str) -> None:
        self.backend = name


def test_auto_attention_takes_what_runs_and_it_replaces_others_with_a_word_on_their_package(caplog):
    transformer = Transformer()
    assert set_attention(transformer, "auto", torch.device("cpu"), torch.float32, backward=True) == "sdpa"
    assert transformer.backend == "native"
    assert not caplog.messages
    assert set_attention(transformer, "flash", torch.device("cpu"), torch.float32, backward=True) == "sdpa"
    assert transformer.backend == "native"
    (told,) = caplog.messages
    assert told == (
        "attention kernel flash does not run here (there is no GPU): sdpa takes its place; flash needs a GPU and "
        "`pip install flash-attn`"
    )


@pytest.mark.parametrize(("dtype", "tried"), [("float16", ["float16", "float32"]), ("bfloat16", ["bfloat16"])])
def test_what_leaves_float16_is_encoded_in_float32(dtype, tried, monkeypatch, caplog):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    asked = []

    def encode(name: str) -> torch.Tensor:
        asked.append((name, torch.backends.cudnn.allow_tf32))
        return torch.tensor([1.0 if name == "float32" else torch.inf])

    with exact(dtype):
        found = within_range(encode, dtype, "cat.jpg")
    assert asked == [(name, name != "float32") for name in tried]
    assert found.isfinite().all() == (dtype == "float16")
    assert ("cat.jpg leaves the range of float16" in caplog.text) == (dtype == "float16")


@pytest.mark.parametrize(("platform", "held"), [("windows", True), ("wsl", True), ("linux", False)])
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_on_windows_pytorch_keeps_to_what_is_free_on_the_card(name, platform, held, monkeypatch):
    told = []
    monkeypatch.setattr(devices, "host_platform_name", lambda: platform)
    numbered = torch.device("cuda", 0 if name == "cuda" else 1)
    place = SimpleNamespace(device=numbered, cpu=lambda: None)
    monkeypatch.setattr(torch, "empty", lambda *_, device: place)  # the card is not there
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((10 - index) * GIB, 12 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *arguments: told.append(arguments))
    assert choose_device(name) == numbered, "a thread of its own would take the first for the name alone"
    # what is free and what this process has already, less a quarter of a GiB for libraries
    assert told == ([((10.75 - numbered.index) / 12, numbered.index)] if held else [])
