"""Attention as its formula says, tensors for it, and functions that stand in for the packages' kernels.

These need a GPU. What stands in for them has their names and signatures and computes attention exactly; the one for
sage passes no gradient on, as the real one.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")

ON_CPU = {40: "_softmax", 80: "_scaled_dot_product_flash_attention_for_cpu"}
"""By the number of keys of `inputs`: the operator that one forward pass of attention on the CPU calls once."""


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
    "flash_attn_interface": {
        "flash_attn_func": lambda q, k, v, **rest: (by_token(q, k, v), q.new_zeros(()))
    },  # as its first
    "xformers": {},
    "xformers.ops": {"memory_efficient_attention": by_token},
    "sageattention": {"sageattn": sage},
}


def installer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What puts stand-ins where the packages would be; those that are really installed are hidden at once."""

    def put(*names: str, **functions: Callable[..., Any]) -> None:
        for name in names:
            module = ModuleType(name)
            for attribute, function in {**STAND_INS[name], **functions}.items():
                setattr(module, attribute, function)
            monkeypatch.setitem(sys.modules, name, module)

    for name in STAND_INS:
        monkeypatch.setitem(sys.modules, name, None)
    return put


class Calls(TorchDispatchMode):
    """Counts operators by name, and notes the number of items of every forward pass of attention on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.items: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        self.names[name] += 1
        if name in ON_CPU.values():
            self.items.append(len(args[0]))
        return function(*args, **(kwargs or {}))


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
