"""Attention whose forward pass can be kept: PyTorch's own operators, called apart from their autograd.

`torch.nn.functional.scaled_dot_product_attention` picks one of these and saves for its backward pass what the operator
returns beside the output. Called here by themselves, they let a recomputation put back what the forward pass returned.
The arguments follow the operators' schemas, and how PyTorch's derivatives.yaml hands one's results to the other.

Shapes: B items, H heads, N queries, L keys, D channels of a head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from wangen.runtime.fast.attention_backends import laid_out
from wangen.runtime.fast.attention_stash import Stash

Gradients = tuple[Tensor, Tensor, Tensor]
Function = Callable[[Tensor, Tensor, Tensor], Tensor]

_aten = torch.ops.aten


class Operator(Protocol):
    """softmax(q k^T / sqrt(D)) v and its gradient, as two functions."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor | None]:
        """The output (B, H, N, D), and what else `backward` needs."""
        ...

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Sequence[Tensor | None]
    ) -> Gradients:
        """The gradients of query, key and value.

        Args:
            gradient: of the output, (B, H, N, D).
            query: (B, H, N, D)
            key: (B, H, L, D)
            value: (B, H, L, D)
            kept: what `forward` returned.
        """
        ...


@dataclass(frozen=True)
class CpuFlash:
    """The CPU's. Numbers of 16 bits are computed in float32.

    So the output and the values' gradient are off by their rounding alone, and all gradients by less than in the
    operator's own way with 16 bits. On a CPU without AMX it also takes 0.6 of the time (256 to 2048 tokens).

    Attributes:
        bias: (B, 1, 1, L), added to the scores.
    """

    bias: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor | None]:
        """The output and the scores' logsumexp, (B, H, N)."""
        output, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
            _wide(query), _wide(key), _wide(value), attn_mask=self._mask(query)
        )
        return output.to(query.dtype), logsumexp

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Sequence[Tensor | None]
    ) -> Gradients:
        """See `Operator`."""
        output, logsumexp = kept
        assert output is not None
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _wide(gradient), _wide(query), _wide(key), _wide(value), _wide(output), logsumexp, 0.0, False,
            attn_mask=self._mask(query),
        )  # fmt: skip
        return _three(gradient.to(query.dtype) for gradient in gradients)

    def _mask(self, query: Tensor) -> Tensor | None:
        """The bias in the dtype of the computation: the operator would read another one's bytes as numbers of it."""
        return None if self.bias is None else self.bias.to(torch.promote_types(query.dtype, torch.float32))


@dataclass(frozen=True)
class CpuProducts:
    """The CPU's for few keys: products of matrices, whose probabilities (B, H, N, L) are kept.

    On two cores of a Zen 4 it takes 0.8 to 0.9 of `CpuFlash`'s time in float32 and 0.3 to 0.6 in bfloat16 (256 tokens
    and keys, or 47 keys). Scores are computed in float32; numbers of 16 bits are rounded where a product takes them in.

    Attributes:
        bias: (B, 1, 1, L), added to the scores.
    """

    bias: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor | None]:
        """The output and the probabilities."""
        scores = _product(_wide(query), _wide(key).mT, _scale(query))
        if self.bias is not None:
            scores += self.bias
        probabilities = torch.softmax(scores, -1).to(query.dtype)
        return probabilities @ value, probabilities

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Sequence[Tensor | None]
    ) -> Gradients:
        """See `Operator`."""
        _, probabilities = kept
        assert probabilities is not None
        to_scores = _aten._softmax_backward_data(gradient @ value.mT, probabilities, -1, probabilities.dtype)
        to_value = probabilities.mT @ gradient
        scale = _scale(query)
        return _product(to_scores, key, scale), _product(to_scores.mT, query, scale), to_value


class CudaFlash:
    """FlashAttention, as PyTorch brings it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor | None]:
        """The output, the logsumexp, and dropout's state, which is not used."""
        output, logsumexp, starts_q, starts_k, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            query, key, value
        )
        return output, logsumexp, starts_q, starts_k, seed, offset

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Sequence[Tensor | None]
    ) -> Gradients:
        """See `Operator`."""
        output, logsumexp, starts_q, starts_k, seed, offset = kept
        return _three(_aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, output, logsumexp, starts_q, starts_k, query.shape[2], key.shape[2],
            0.0, False, seed, offset,
        ))  # fmt: skip


class CudaCudnn:
    """cuDNN's, whose backward pass wants the gradient laid out as the output."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor | None]:
        """The output, the logsumexp, and dropout's state, which is not used."""
        output, logsumexp, starts_q, starts_k, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True
        )
        return output, logsumexp, starts_q, starts_k, seed, offset

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Sequence[Tensor | None]
    ) -> Gradients:
        """See `Operator`."""
        output, logsumexp, starts_q, starts_k, seed, offset = kept
        assert output is not None
        return _three(_aten._scaled_dot_product_cudnn_attention_backward(
            laid_out(gradient, output.stride()), query, key, value, output, logsumexp, seed, offset, None,
            starts_q, starts_k,
            query.shape[2], key.shape[2], 0.0, False,
        ))  # fmt: skip


class CudaEfficient:
    """The memory-efficient kernel: the one for float32 and for older cards."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor | None]:
        """The output, the logsumexp, and dropout's state, which is not used."""
        results: Sequence[Tensor] = _aten._scaled_dot_product_efficient_attention(query, key, value, None, True)
        return results

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Sequence[Tensor | None]
    ) -> Gradients:
        """See `Operator`."""
        output, logsumexp, seed, offset = kept
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, None, output, logsumexp, seed, offset, 0.0, [True, True, True, False]
        )
        return _three(gradients[:3])


@dataclass(frozen=True)
class ForwardOnly:
    """A kernel without a backward pass, as sage: the gradient is the exact one, of the same attention computed again.

    Attributes:
        function: the kernel.
        exact: attention that has a gradient.
    """

    function: Function
    exact: Function

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor | None]:
        """The output alone."""
        return (self.function(query, key, value),)

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Sequence[Tensor | None]
    ) -> Gradients:
        """See `Operator`."""
        inputs = _three(tensor.detach().requires_grad_() for tensor in (query, key, value))
        with torch.enable_grad():
            output = self.exact(*inputs)
        return _three(torch.autograd.grad(output, inputs, gradient))


_CUDA: dict[int, Operator] = {
    SDPBackend.FLASH_ATTENTION.value: CudaFlash(),
    SDPBackend.EFFICIENT_ATTENTION.value: CudaEfficient(),
    SDPBackend.CUDNN_ATTENTION.value: CudaCudnn(),
}


def operator_for(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Operator | None:
    """The operator that SDPA would pick here; None for its plain matrix products, of which nothing can be kept.

    On the CPU it is `CpuProducts` where it `has_few_keys`.

    Args:
        query: (B, H, N, D)
        key: (B, H, L, D)
        value: (B, H, L, D)
        bias: (B, 1, 1, L), added to the scores; on the CPU alone.
    """
    choice = torch._fused_sdp_choice(query, key, value)
    if query.device.type == "cpu":
        if choice != SDPBackend.FLASH_ATTENTION.value:
            return None
        return CpuProducts(bias) if has_few_keys(key) else CpuFlash(bias)
    assert bias is None
    # SDPA itself fills heads up to a multiple of 8 before it calls an operator.
    return _CUDA.get(choice) if query.shape[-1] % 8 == 0 else None


def has_few_keys(key: Tensor) -> bool:
    """Whether as many probabilities as there are keys (B, H, L, D) are no more than a query and a key have numbers."""
    return key.shape[2] <= 2 * key.shape[3]


def by_products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """`CpuProducts` made of differentiable operations, for a compiler: (B, H, N, D), arguments as of `operator_for`."""
    scores = _wide(query) @ _wide(key).mT * _scale(query)
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores, -1).to(query.dtype) @ value


def attend(query: Tensor, key: Tensor, value: Tensor, operator: Operator, stash: Stash | None = None) -> Tensor:
    """Attention by an operator, (B, H, N, D), differentiable in query, key and value.

    Args:
        query: (B, H, N, D)
        key: (B, H, L, D)
        value: (B, H, L, D)
        operator: computes it.
        stash: holds in the forward pass what the operator returns, and gives it back in the recomputation.
    """
    output: Tensor = _Attend.apply(query, key, value, operator, stash)  # type: ignore[no-untyped-call]
    return output


def held(query: Tensor, key: Tensor, value: Tensor, operator: Operator, stash: Stash | None) -> Sequence[Tensor | None]:
    """What the operator returns for `attend`'s arguments, or returned in the pass that the stash replays."""
    if stash is not None and stash.replays:
        return stash.take()
    kept = operator.forward(query, key, value)
    if stash is not None and stash.records:
        stash.put(kept)
    return kept


class _Attend(torch.autograd.Function):
    """It saves equally many tensors in the forward pass and in the recomputation: checkpointing insists on that."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, operator: Operator, stash: Stash | None) -> Tensor:
        kept = held(query, key, value, operator, stash)
        ctx.operator = operator
        ctx.save_for_backward(query, key, value, *kept)
        assert kept[0] is not None
        return kept[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        return *ctx.operator.backward(gradient, query, key, value, kept), None, None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() == 2 else tensor


def _scale(query: Tensor) -> float:
    """What scores are multiplied by."""
    return 1 / math.sqrt(query.shape[-1])


def _product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """(B, H, M, K) times (B, H, K, L) times a number -> (B, H, M, L)."""
    nothing = left.new_empty(())
    product = torch.baddbmm(nothing, left.flatten(0, 1), right.flatten(0, 1), beta=0, alpha=scale)
    return product.view(*left.shape[:2], *product.shape[1:])


def _three(tensors: Any) -> Gradients:
    query, key, value = tensors
    return query, key, value
