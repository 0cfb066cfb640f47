"""Rules of devices and precision. ROCm is simulated by its version string: no such build can be installed here."""

import importlib.metadata

import pytest
import torch

from wangen.generator.errors import UsageError, WangenError
from wangen.runtime.devices import choose_device, choose_dtype, choose_vae_dtype, set_attention


def test_the_vae_is_bfloat16_on_cuda_and_float32_on_a_cpu():
    assert choose_vae_dtype(None, torch.device("cuda")) == "bfloat16"
    assert choose_vae_dtype(None, torch.device("cpu")) == "float32"
    assert choose_vae_dtype("float16", torch.device("cuda")) == "float16"


def test_on_rocm_the_vae_is_always_float32(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2.13.0+rocm6.4")
    assert choose_vae_dtype(None, torch.device("cuda")) == "float32"
    assert choose_vae_dtype("bfloat16", torch.device("cuda")) == "float32"
    assert choose_dtype(None, torch.device("cuda")) == "bfloat16"


def test_a_device_that_is_not_there_is_named():
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(UsageError, match="--device warp"):
        choose_device("warp")


class Transformer:
    def set_attention_backend(self, name: str) -> None:
        self.backend = name


def test_auto_attention_takes_what_runs_and_others_are_refused_with_their_package():
    transformer = Transformer()
    assert set_attention(transformer, "auto", torch.device("cpu"), torch.float32, backward=True) == "sdpa"
    assert transformer.backend == "native"
    with pytest.raises(WangenError, match="pip install flash-attn"):
        set_attention(transformer, "flash", torch.device("cpu"), torch.float32, backward=True)
