"""What the fast transformers of all families have in common: how one block and the whole are made for a step.

T: tokens of the step, D: width of the model.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wangen.generator.small_steps import is_small
from wangen.runtime.fast.attention import Kernel, Stash
from wangen.runtime.fast.dit_elementwise import Elementwise, elementwise_of
from wangen.runtime.fast.dit_linear import Group, Layers
from wangen.runtime.fast.graphs import Graphs, Inputs
from wangen.runtime.memory.blocks import BlockWeights
from wangen.runtime.models.compute import Compute, Tricks

Linears = Mapping[str, Sequence[nn.Module]]
"""A block's linear layers by name, those together that share an input."""


class StepBlock:
    """One block for one step; a family's own says in `_run` what is computed, and what of it is trained.

    Args:
        block: diffusers' module.
        linears: its linear layers.
        beside: a named tuple of what it takes beside the tokens, each a tensor or None. A part may have a gradient
            where something before the blocks is trained.
        layers: the linear layers as they are in this step.
        kernel: of attention.
        tricks: which short cuts are taken.
        elementwise: how norms and gates are computed.
        stash: where the output of self attention is kept for the recomputation; None keeps nothing.
        swapped: its weights come and go.

    Attributes:
        groups: its linear layers by name, in groups that share an input.
    """

    def __init__(
        self,
        block: nn.Module,
        linears: Linears,
        beside: Any,
        layers: Layers,
        kernel: Kernel,
        tricks: Tricks,
        elementwise: Elementwise,
        stash: Stash | None,
        swapped: bool,
    ) -> None:
        self.beside = beside
        self.groups: dict[str, list[Group]] = {}
        for name, modules in linears.items():
            parts = [modules] if tricks.grouped else [[module] for module in modules]
            self.groups[name] = [layers.group(part, resident=not swapped) for part in parts]
        self._is_training = block.training
        self._kernel = kernel
        self._tricks = tricks
        self._elementwise = elementwise
        self._stash = stash

    @property
    def trains_numbers(self) -> bool:
        """Whether its shifts, scales and gates get a gradient."""
        raise NotImplementedError

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, as adapters that are not low-rank alone, or have dropout, may."""
        return self._is_training and not all(group.is_plain for groups in self.groups.values() for group in groups)

    def __call__(self, hidden: Tensor) -> Tensor:
        """(T, D) -> (T, D). All of the module's tensors are read here, since they may be elsewhere at other times."""
        return self._run(hidden, self.beside, valued=True)

    def again(self, hidden: Tensor, beside: Any) -> Tensor:
        """The same for its gradients alone, with `beside` in place of its own; what comes out may be anything."""
        return self._run(hidden, beside, valued=not self._tricks.short_recompute)

    def recomputed_back(self, gradient: Tensor, hidden: Tensor, *, has_gradient: bool) -> tuple[Tensor | None] | None:
        """Run it again and go back without autograd; None where that cannot be, as in a family without such gradients.

        Args:
            gradient: of what came out, (T, D).
            hidden: what went in, (T, D).
            has_gradient: that of the input is wanted.

        Returns:
            The gradient of the input, or None in its place. Those of the parameters were added to theirs.
        """
        del gradient, hidden, has_gradient
        return None

    def _run(self, hidden: Tensor, beside: Any, *, valued: bool) -> Tensor:
        raise NotImplementedError

    def _project(self, name: str, inputs: Tensor) -> list[Tensor]:
        """What all layers of that name make of their input (T, …)."""
        return [output for group in self.groups[name] for output in group(inputs)]

    def _linear(self, name: str, inputs: Tensor, *, valued: bool = True) -> Tensor:
        """What the one layer of that name makes of (T, …); `valued` as in `Group`."""
        return self.groups[name][0](inputs, valued=valued)[0]

    def _kernel_on(
        self, query: Tensor, key: Tensor, value: Tensor, heads: int, bias: Tensor | None = None, *, own: bool = True
    ) -> Tensor:
        """(B, N, D) and keys and values (B, L, D) -> (B, N, D); attention to their `own` tokens may be kept."""
        query, key, value = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in (query, key, value))
        if own and self._stash is not None:
            return self._kernel.kept(query, key, value, self._stash).transpose(1, 2).flatten(2)
        return self._kernel(query, key, value, bias).transpose(1, 2).flatten(2)


class FastModel:
    """A velocity model on the weights of a diffusers transformer with peft adapters injected.

    Args:
        transformer: frozen but for its adapters, or trained as a whole.
        compute: how. `attention` and `plain` are not looked at: see `kernel`.
        kernel: of attention.
        swap: brings the weights of the blocks in `swap.swapped`; those blocks are always recomputed.
        dtype: what the blocks compute in, where it is not that of the weights: trained ones are masters in float32.
    """

    def __init__(
        self,
        transformer: Any,
        compute: Compute,
        kernel: Kernel,
        swap: BlockWeights | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._transformer = transformer
        self._compute = compute
        self._kernel = kernel.by_item() if compute.split_attention else kernel
        self._swap = swap
        self._dtype = dtype
        self._elementwise = elementwise_of(compute, transformer.device)
        self._layers: dict[tuple[torch.dtype, torch.device], Layers] = {}
        nvidia = transformer.device.type == "cuda" and torch.version.hip is None
        stays = swap is None and not compute.offload and not compute.compile
        self._graphs = Graphs(transformer) if compute.graphs and nvidia and stays else None

    @property
    def attention(self) -> str:
        """The name of the attention kernel."""
        return self._kernel.name

    def _passed(self, inputs: Inputs, key: Hashable, blocks: Callable[[Inputs], Tensor]) -> Tensor:
        """What the blocks make of their inputs, (T, D), by a CUDA graph where that may be.

        Args:
            inputs: the tokens (T, D), and what there is beside them.
            key: what of the step is no tensor.
            blocks: inputs -> (T, D).
        """
        hidden = inputs[0]
        assert hidden is not None
        draws = self._transformer.training  # which is only where something drops out
        if draws or not torch.is_grad_enabled() or any(one is not None and one.requires_grad for one in inputs):
            return blocks(inputs)
        if self._graphs is None or not is_small(*hidden.shape):
            return blocks(inputs)
        return self._graphs.run(inputs, key, blocks)

    def _layers_for(self, hidden: Tensor) -> Layers:
        """The linear layers as they are in the step that begins with these tokens."""
        key = self._dtype or hidden.dtype, hidden.device
        layers = self._layers.get(key)
        if layers is None:
            layers = self._layers[key] = Layers(*key)
        layers.begin()
        return layers

    def _traced(self, hidden: Tensor) -> Tensor:
        """What goes into the first block: without `Tricks.no_input_gradient` it takes part in the backward pass."""
        if not self._compute.tricks.no_input_gradient and torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()
        return hidden
