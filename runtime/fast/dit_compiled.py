"""A whole block of Wan's transformer as one function that torch.compile makes, with shapes that do not change.

It is written out of differentiable operations of torch alone, and every tensor it reads is an argument: so all blocks
of a transformer share one graph, and each bucket (tokens of the items, timesteps, rows of text, and what gets a
gradient) has one of its own. What is recomputed is part of the graph. The compiler then leaves out of the recomputation
all that the backward pass does not read, such as the last product of the block.

Letters in shapes: B items, T tokens of all of them, N tokens of one, D width of the model, H heads, L rows of text, I
inputs and O outputs of a linear layer, R rank.
"""

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from wangen.runtime.fast.attention import Kernel
from wangen.runtime.fast.attention_operators import by_products, has_few_keys
from wangen.runtime.fast.compiled_products import compiled_linear
from wangen.runtime.fast.dit_blocks import Tokens
from wangen.runtime.fast.dit_elementwise import PLAIN, compiled_gelu, failure, real_rms, separately_compiled
from wangen.runtime.fast.dit_functions import cast
from wangen.runtime.fast.dit_linear import Group
from wangen.runtime.fast.products import has_faster_onednn
from wangen.runtime.libraries import WanTransformerBlock
from wangen.runtime.models.compute import Checkpointing, Compute

log = logging.getLogger("wangen")

FEWEST_ROWS = 64
"""Texts are filled up to 64, 128, 256 or 512 rows: a graph for each length of a caption would be made for hours."""

_aten = torch.ops.aten
ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
"""What SDPA becomes in a graph."""


class Linears(NamedTuple):
    """The tensors of linear layers that share an input.

    Attributes:
        weights: (O, I) of each, frozen; or one of all, (sum of O, I), where they lie side by side.
        biases: of each or all likewise, or None.
        downs: the adapters' first halves, (R, I) each.
        ups: their second halves, (O, R) each.
    """

    weights: list[Tensor]
    biases: list[Tensor | None]
    downs: list[Tensor]
    ups: list[Tensor]


class AdapterNumbers(NamedTuple):
    """What of a layer's adapter is no tensor: the number of the layer in its group, and so on."""

    layer: int
    rank: int
    scale: float
    is_trained: bool


class Widths(NamedTuple):
    """What of `Linears` is no tensor: O of each layer, whether they are one product, and the adapters."""

    outputs: tuple[int, ...]
    are_joined: bool
    adapters: tuple[AdapterNumbers, ...]


Groups = Mapping[str, Sequence[Group]]
"""A block's linear layers by name, each list of groups sharing an input."""


class Norms(NamedTuple):
    """A block's own table (1, 6, D), and the weights (D,) of its norms; None where it has no such norm."""

    table: Tensor
    query: Tensor
    key: Tensor
    other_weight: Tensor | None
    other_bias: Tensor | None
    other_query: Tensor
    text_key: Tensor
    image_key: Tensor | None


class StepTensors(NamedTuple):
    """What every block of a step takes beside the tokens.

    Attributes:
        conditions: the timesteps' projection (runs, 6, D) in float32.
        rotations: cosines and sines of the positions, (N or T, channels of a head / 2, 2).
        text: (B, L, D).
        text_bias: (B, 1, 1, L) or None.
        images: (B, tokens, D) or None.
    """

    conditions: Tensor
    rotations: Tensor
    text: Tensor
    text_bias: Tensor | None
    images: Tensor | None


class Plan(NamedTuple):
    """What of a block and a step is no tensor: constants of the graph.

    Attributes:
        items: how many, of as many tokens each.
        runs: tokens of each run that shares a timestep.
        together: attention takes all items at once.
        heads: of attention.
        eps: of the norms.
        recomputed: in the backward pass: nothing, all, or all but self attention.
        onednn: is asked for large frozen products.
        linears: by name, those that share an input.
    """

    items: int
    runs: tuple[int, ...]
    together: bool
    heads: int
    eps: float
    recomputed: Checkpointing
    onednn: bool
    linears: tuple[tuple[str, tuple[Widths, ...]], ...]

    @property
    def is_trained(self) -> bool:
        """Whether an adapter of the block is."""
        return any(one.is_trained for _, groups in self.linears for group in groups for one in group.adapters)


class WholeBlocks:
    """The blocks of a transformer as compiled functions, where they can be.

    Args:
        compute: how a step runs.
        kernel: of attention.
    """

    def __init__(self, compute: Compute, kernel: Kernel) -> None:
        self._compute = compute
        self._kernel = kernel
        self._against: str | None = None  # why no block can be had as a whole
        if kernel.name != "sdpa":
            self._against = f"attention is {kernel.name}"
        elif kernel.widens:
            self._against = "this card computes no bfloat16"
        elif compute.offload and compute.checkpointing != "none":
            self._against = "what is kept waits in host memory"
        self._outcomes: Counter[str | None] = Counter()  # None: as a whole
        self._told: set[tuple[str, str | None]] = set()

    def __call__(
        self,
        beside: StepTensors,
        tokens: Tokens,
        module: WanTransformerBlock,
        groups: Groups,
        hidden: Tensor,
        *,
        swapped: bool,
        recomputes: bool,
    ) -> Tensor | None:
        """A block's output (T, D); None where it cannot be had as a whole.

        Args:
            beside: what all blocks of the step take.
            tokens: how the tokens divide.
            module: diffusers' block.
            groups: its linear layers by name.
            hidden: (T, D)
            swapped: its weights come and go.
            recomputes: it keeps nothing, or attention's output, for the backward pass.
        """
        reason = "their weights are swapped" if swapped else self._against or _reason(groups, tokens)
        output = None
        if reason is None:
            plan = Plan(
                items=len(tokens.items),
                runs=tokens.runs,
                together=not self._kernel.split,
                heads=module.attn1.heads,
                eps=module.norm1.eps,
                recomputed=self._compute.checkpointing if recomputes else "none",
                onednn=hidden.is_cpu and has_faster_onednn(),
                linears=tuple((name, tuple(map(_widths, each))) for name, each in groups.items()),
            )
            if torch.is_grad_enabled() and not hidden.requires_grad and plan.is_trained:
                hidden = hidden.detach().requires_grad_()  # so that the first block shares the graph of all others
            linears = {name: [_linears(group) for group in each] for name, each in groups.items()}
            output = self._run(plan, hidden, _norms(module), linears, beside)
        self._outcomes[reason or self._against] += 1
        return output

    def _run(
        self, plan: Plan, hidden: Tensor, norms: Norms, linears: dict[str, list[Linears]], beside: StepTensors
    ) -> Tensor | None:
        """The same; None, with one warning, where the compiler fails, which then is not asked again."""
        from torch._dynamo.exc import TorchDynamoException  # here: it loads the whole compiler

        tensors = (hidden, *norms, *beside)
        kind = [one if one is None else (one.shape, one.dtype, one.device, one.requires_grad) for one in tensors]
        try:
            with self._kernel.priority():
                return _compiled(plan, torch.is_grad_enabled(), *kind)(hidden, norms, linears, beside)
        except TorchDynamoException as error:
            self._against = "the compiler failed"
            log.warning("--compile: torch.compile fails on a whole block (%s), so only norms, rotations and gates are "
                        "compiled", failure(error))  # fmt: skip
            return None

    def tell(self) -> None:
        """Say after a pass how many blocks are compiled as a whole, and why others are not; the same only once."""
        outcomes, self._outcomes = self._outcomes, Counter()
        where = "" if torch.is_grad_enabled() else ", without gradients"
        if new := {(where, why) for why in outcomes} - self._told:
            self._told |= new
            whole = outcomes.pop(None, 0)
            others = [f"; of {count} norms, rotations and gates, since {why}" for why, count in outcomes.items()]
            log.info("--compile%s: %d blocks as a whole, one graph for each shape%s", where, whole, "".join(others))


def step_tensors(conditions: Tensor, tokens: Tokens) -> StepTensors:
    """What all blocks of a step take, its text filled up to a number of rows that comes again."""
    text, bias, rows = tokens.text, tokens.text_bias, tokens.text.shape[1]
    if bias is not None:  # None counts all of 512 rows
        more = max(FEWEST_ROWS, 1 << (rows - 1).bit_length()) - rows
        text, bias = functional.pad(text, (0, 0, 0, more)), functional.pad(bias, (0, more), value=-math.inf)
    return StepTensors(conditions, torch.view_as_real(tokens.rotations), text, bias, tokens.images)


def _reason(groups: Groups, tokens: Tokens) -> str | None:
    """Why a block with these linear layers is not had as a whole for these tokens; None where it can be."""
    if not tokens.alike:
        return "items of several sizes are packed, almost every step in another shape"
    frozen = [group.frozen for each in groups.values() for group in each]
    if any(one is None for one in frozen):
        return "their adapters are no plain low-rank ones, or their weights are trained"
    if any(type(layer) is not nn.Linear for one in frozen if one is not None for layer in one.layers):
        return "their weights are quantised"
    return None


def _norms(module: WanTransformerBlock) -> Norms:
    own, other, norm = module.attn1, module.attn2, module.norm2
    images = None if other.add_k_proj is None else other.norm_added_k.weight
    weight, bias = (None, None) if isinstance(norm, nn.Identity) else (norm.weight, norm.bias)
    return Norms(
        module.scale_shift_table, own.norm_q.weight, own.norm_k.weight, weight, bias, other.norm_q.weight,
        other.norm_k.weight, images,
    )  # fmt: skip


def _widths(group: Group) -> Widths:
    assert group.frozen is not None
    adapters = [
        AdapterNumbers(layer, one.down.shape[0], one.scale, one.down.requires_grad or one.up.requires_grad)
        for layer, one in group.adapters.present
    ]
    outputs = tuple(layer.out_features for layer in group.frozen.layers)
    return Widths(outputs, group.frozen.joined() is not None, tuple(adapters))


def _linears(group: Group) -> Linears:
    assert group.frozen is not None
    joined = group.frozen.joined()
    parts = [(layer.weight, layer.bias) for layer in group.frozen.layers] if joined is None else [joined]
    adapters = [one for _, one in group.adapters.present]
    return Linears(
        [weight for weight, _ in parts],
        [bias for _, bias in parts],
        [one.down for one in adapters],
        [one.up for one in adapters],
    )


@functools.cache
def _compiled(plan: Plan, *_kind: object) -> Callable[..., Tensor]:
    """The function for one kind of block: all blocks of that kind are calls of it."""

    def block(hidden: Tensor, norms: Norms, linears: dict[str, list[Linears]], beside: StepTensors) -> Tensor:
        def body(tokens: Tensor) -> Tensor:
            return _block(plan, tokens, norms, linears, beside)

        if plan.recomputed == "none":
            return body(hidden)
        output: Tensor = checkpoint(body, hidden, use_reentrant=False, **contexts)
        return output

    from torch._functorch import config  # here: it loads the whole compiler

    if hasattr(config, "force_non_lazy_backward_lowering"):  # older ones know no such choice
        config.force_non_lazy_backward_lowering = True  # else what fails would fail in the backward pass
    contexts: dict[str, Any] = {}
    if plan.recomputed == "selective":
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keeps)
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # it asks for care that is taken
    return separately_compiled(block, fullgraph=True, dynamic=False)


def _keeps(_context: object, operator: object, *arguments: Any, **_: Any) -> CheckpointPolicy:
    """Of a recomputed block self attention is kept; that to text is quickly done again."""
    own = operator in ATTENTION and arguments[0].shape == arguments[1].shape
    return CheckpointPolicy.MUST_SAVE if own else CheckpointPolicy.PREFER_RECOMPUTE


def _block(plan: Plan, hidden: Tensor, norms: Norms, linears: dict[str, list[Linears]], beside: StepTensors) -> Tensor:
    """(T, D) -> (T, D), as `dit_blocks.Block`."""
    widths = dict(plan.linears)

    def outputs(name: str, inputs: Tensor) -> list[Tensor]:
        groups = zip(linears[name], widths[name], strict=True)
        return [output for group, sizes in groups for output in _outputs(plan, inputs, group, sizes)]

    def look(query: Tensor, others: Tensor, pair: str, norm: Tensor, bias: Tensor | None) -> Tensor:
        key, value = outputs(pair, others.flatten(0, 1))
        key = real_rms(key, norm, None, plan.eps)
        return _attend(plan, query, key.view(others.shape), value.view(others.shape), bias)

    shift, scale, gate, forward_shift, forward_scale, forward_gate = (norms.table + beside.conditions).unbind(1)
    normed = PLAIN.modulated(hidden, scale + 1, shift, plan.eps, plan.runs)
    query, key, value = outputs("own", normed)
    query = real_rms(query, norms.query, beside.rotations, plan.eps)
    key = real_rms(key, norms.key, beside.rotations, plan.eps)
    (branch,) = outputs("own_out", _attend(plan, query, key, value, None))
    hidden = PLAIN.gated(hidden, branch, gate, plan.runs, True)

    normed = hidden
    if norms.other_weight is not None and norms.other_bias is not None:
        normed = PLAIN.norm(hidden, norms.other_weight, norms.other_bias, plan.eps)
    (query,) = outputs("query", normed)
    query = real_rms(query, norms.other_query, None, plan.eps)
    attended = look(query, beside.text, "text", norms.text_key, beside.text_bias)
    if beside.images is not None and norms.image_key is not None:
        attended = attended + look(query, beside.images, "image", norms.image_key, None)
    (branch,) = outputs("other_out", attended)
    hidden = hidden + branch

    normed = PLAIN.modulated(hidden, forward_scale + 1, forward_shift, plan.eps, plan.runs)
    (widened,) = outputs("up", normed)
    (branch,) = outputs("down", compiled_gelu(widened))
    return PLAIN.gated(hidden, branch, forward_gate, plan.runs, True)


def _outputs(plan: Plan, inputs: Tensor, linears: Linears, widths: Widths) -> list[Tensor]:
    """(T, I) -> for each layer (T, O)."""
    dtype = inputs.dtype
    products = [
        compiled_linear(inputs, cast(weight, dtype), None if bias is None else cast(bias, dtype), onednn=plan.onednn)
        for weight, bias in zip(linears.weights, linears.biases, strict=True)
    ]
    outputs = list(products[0].split_with_sizes(widths.outputs, 1)) if widths.are_joined else products
    if not widths.adapters:
        return outputs
    downs = cast(torch.cat(linears.downs), dtype)
    images = (inputs @ downs.t()).split_with_sizes([adapter.rank for adapter in widths.adapters], 1)
    for adapter, image, up in zip(widths.adapters, images, linears.ups, strict=True):
        before = outputs[adapter.layer]
        outputs[adapter.layer] = torch.addmm(before, image, cast(up, dtype).t(), alpha=adapter.scale)
    return outputs


def _attend(plan: Plan, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of each item by itself: (T, D), with keys and values (T, D) or (B, L, D) -> (T, D)."""
    own = key.ndim == 2
    sdpa = functools.partial(_sdpa, heads=plan.heads, keeps=own and plan.recomputed == "selective")
    query, keys, values = (part.reshape(plan.items, -1, part.shape[-1]) for part in (query, key, value))
    if plan.together:
        return sdpa(query, keys, values, bias).flatten(0, 1)
    biases = [None] * plan.items if bias is None else torch.split(bias, 1)
    rows = zip(*(torch.split(part, 1) for part in (query, keys, values)), biases, strict=True)
    return torch.cat([sdpa(*row) for row in rows]).flatten(0, 1)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, heads: int, keeps: bool) -> Tensor:
    """(B, N, D) and keys and values (B, L, D) -> (B, N, D); on the CPU as the operators of `attention_operators`."""
    dtype, on_cpu = query.dtype, query.device.type == "cpu"
    query, key, value = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in (query, key, value))
    if on_cpu and not keeps and has_few_keys(key):
        return by_products(query, key, value, bias).transpose(1, 2).flatten(2)
    if on_cpu and dtype.itemsize == 2:
        query, key, value = query.float(), key.float(), value.float()
    mask = None if bias is None else cast(bias, query.dtype)
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return cast(output.transpose(1, 2).flatten(2), dtype)
