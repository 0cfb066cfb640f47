"""Wan's transformer as a training step runs it: diffusers' module and weights, peft's adapters, and shorter ways.

The numbers are those of `WanTransformer3DModel.forward` but for rounding. What is shorter: padding of texts is one key,
nothing before the blocks takes part in the backward pass, layers that share an input are one product together with
their adapters, norms and gates are one pass each, and a recomputation ends where nothing is needed any more.

In bfloat16 no autocast is used: frozen products, the residual stream and attention are bfloat16; the norms' weights,
modulation, time embedding, rotations and the adapters' masters are float32, and each function rounds its output once.

Letters in shapes: B items, C channels, F h w of latents, N tokens of one item, T of all items, D width of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from wangen.generator.memory import num_token_pieces
from wangen.generator.small_steps import is_small
from wangen.runtime.dtypes import float_dtype
from wangen.runtime.fast.attention import Kernel
from wangen.runtime.fast.dit_blocks import Block, Tokens, linears_of
from wangen.runtime.fast.dit_checkpoint import Passage
from wangen.runtime.fast.dit_compiled import WholeBlocks, step_tensors
from wangen.runtime.fast.dit_elementwise import FUSED
from wangen.runtime.fast.dit_linear import drops
from wangen.runtime.fast.dit_shared import FastModel
from wangen.runtime.fast.dit_text import rows_step, text_rows
from wangen.runtime.fast.dit_token_wise import cut
from wangen.runtime.libraries import LoraLinear, WanTransformer3DModel
from wangen.runtime.memory.blocks import BlockWeights
from wangen.runtime.models.compute import Compute
from wangen.runtime.models.inputs import Controls, Inputs, require_width, with_condition
from wangen.runtime.weights.quantized import DequantizingLinear

Sizes = tuple[int, int, int]

KEPT_ROTATIONS = 8
"""Tables of positions, one for each size of latents: 16.8 MB for 81 frames of 832x480."""


@dataclass(frozen=True)
class Times:
    """The timesteps of a step.

    Attributes:
        values: one per run of tokens that share it, float32 on the device.
        runs: tokens of each run.
    """

    values: Tensor
    runs: tuple[int, ...]


class StepInputs(NamedTuple):
    """All tensors that a step's blocks take beside their weights: the tokens, and what `Tokens` says of them."""

    hidden: Tensor
    conditions: Tensor
    text: Tensor
    text_bias: Tensor | None
    images: Tensor | None
    rotations: Tensor


class FastWan(FastModel):
    """A velocity model on the weights of a Wan 2.1 or 2.2, as `FastModel`."""

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        compute: Compute,
        kernel: Kernel,
        swap: BlockWeights | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(transformer, compute, kernel, swap, dtype)
        does_compile = compute.compile and self._elementwise is not FUSED
        self._whole = WholeBlocks(compute, self._kernel) if does_compile else None
        self._linears = [linears_of(module) for module in transformer.blocks]
        self._rotations: dict[tuple[Sizes, torch.device], Tensor] = {}  # what was used last comes last

    def __call__(
        self,
        latents: Tensor,
        timesteps: Tensor,
        texts: Sequence[Tensor],
        *,
        condition: Tensor | None = None,
        image_tokens: Tensor | None = None,
        controls: Controls | None = None,
    ) -> Tensor:
        """The velocity noise - clean that the model predicts.

        Args:
            latents: (B, C, F, h, w), noisy.
            timesteps: (B,) in [0, 1000], or (B, N) where tokens differ: those are looked at, and so belong in host
                memory.
            texts: B embeddings (L, text_dim) without padding.
            condition: of image-to-video, (B, 20, F, h, w).
            image_tokens: of Wan 2.1 image-to-video, (B, 257, 1280).
            controls: Wan takes none.

        Returns:
            (B, C, F, h, w) in the dtype of the transformer's products.

        Raises:
            WangenError: embeddings of another text encoder.
        """
        assert controls is None, "not in this family"
        items = torch.split(with_condition(latents, condition), 1)
        with torch.autocast(latents.device.type, enabled=False):
            return torch.cat(self._run(items, timesteps, texts, image_tokens))

    def packed(self, passes: Sequence[Inputs]) -> list[Tensor]:
        """The velocities of several batches of any shapes as one sequence: attention looks at each item alone.

        Batches whose tokens have timesteps of their own go one after the other.
        """
        if any(one.timesteps.dim() > 1 for one in passes):
            return [self(one.latents, one.timesteps, one.texts, **one.given) for one in passes]
        items = [item for one in passes for item in torch.split(with_condition(one.latents, one.condition), 1)]
        views = [one.image_tokens for one in passes if one.image_tokens is not None]
        texts = [text for one in passes for text in one.texts]
        timesteps = torch.cat([one.timesteps for one in passes])
        with torch.autocast(items[0].device.type, enabled=False):
            found = iter(self._run(items, timesteps, texts, torch.cat(views) if views else None))
        return [torch.cat([next(found) for _ in one.texts]) for one in passes]

    def _run(
        self, latents: Sequence[Tensor], timesteps: Tensor, texts: Sequence[Tensor], image_tokens: Tensor | None
    ) -> list[Tensor]:
        """For each item (1, C, F, h, w) its velocity; items may differ in size where timesteps are (B,)."""
        require_width(texts, self._transformer.config.text_dim, "umT5-xxl")
        sizes = [self._sizes(item) for item in latents]
        num_tokens = tuple(frames * height * width for frames, height, width in sizes)
        device, dtype = latents[0].device, self._transformer.patch_embedding.weight.dtype
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._prefix_has_gradient()):
            hidden = torch.cat([self._patches(item.to(dtype)) for item in latents])
            times = _times(timesteps, num_tokens, device)
            embedded, conditions = self._embed_times(times.values)
            tokens = self._tokens(sizes, num_tokens, times, texts, image_tokens)
        hidden = self._through(self._traced(hidden), conditions, tokens)
        return self._head(hidden.to(dtype), embedded, tokens, sizes)

    def _sizes(self, latents: Tensor) -> Sizes:
        """Tokens in each direction."""
        frames, height, width = (
            size // step for size, step in zip(latents.shape[2:], self._transformer.config.patch_size, strict=True)
        )
        return frames, height, width

    def _prefix_has_gradient(self) -> bool:
        """Whether something of what comes before the blocks is trained."""
        outer = (self._transformer.patch_embedding, self._transformer.condition_embedder)
        return any(parameter.requires_grad for module in outer for parameter in module.parameters())

    def _patches(self, latents: Tensor) -> Tensor:
        """(1, C, F, h, w) -> (N, D). A convolution whose steps are as long as its kernel is a product."""
        embedding = self._transformer.patch_embedding
        if type(embedding) is not nn.Conv3d:
            embedded: Tensor = embedding(latents)
            return embedded.flatten(2)[0].t().contiguous()
        pieces = latents[0]
        for axis, step in enumerate(embedding.kernel_size):
            place = 1 + 2 * axis
            pieces = pieces.reshape(*pieces.shape[:place], -1, step, *pieces.shape[place + 1 :])
        pieces = pieces.permute(1, 3, 5, 0, 2, 4, 6).flatten(3).flatten(0, 2)
        return functional.linear(pieces, embedding.weight.flatten(1), embedding.bias)

    def _embed_times(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Timesteps (runs,) -> their embedding (runs, D) and its projection (runs, 6, D), both in float32."""
        embedder = self._transformer.condition_embedder
        waves = embedder.timesteps_proj(values)
        embedded = embedder.time_embedder(waves.to(float_dtype(embedder.time_embedder))).float()
        active, projection = embedder.act_fn(embedded), embedder.time_proj
        if type(projection) is not nn.Linear:
            if not isinstance(projection, DequantizingLinear):  # which computes in what it is given
                active = active.to(float_dtype(projection))
            return embedded, projection(active).float().view(len(values), 6, -1)
        # Part by part: of a large model the whole in float32 would be more memory than a block.
        parts = zip(projection.weight.chunk(6), projection.bias.chunk(6), strict=True)
        projected = [functional.linear(active, weight.float(), bias.float()) for weight, bias in parts]
        return embedded, torch.stack(projected, dim=1)

    def _tokens(
        self,
        sizes: Sequence[Sizes],
        num_tokens: tuple[int, ...],
        times: Times,
        texts: Sequence[Tensor],
        image_tokens: Tensor | None,
    ) -> Tokens:
        embedder = self._transformer.condition_embedder
        device, dtype = times.values.device, self._transformer.patch_embedding.weight.dtype
        step = rows_step(device, is_small=is_small(sum(num_tokens), self._dim))
        rows = text_rows(texts, device, dtype, self._pad_copies(), step)
        images = None
        if image_tokens is not None:
            images = embedder.image_embedder(image_tokens.to(device, dtype))
        alike = len(set(sizes)) == 1
        tables = [self._rotation(size, device) for size in (sizes[:1] if alike else sizes)]
        return Tokens(
            items=num_tokens,
            runs=times.runs,
            rotations=tables[0] if len(tables) == 1 else torch.cat(tables),
            text=embedder.text_embedder(rows.rows),
            text_bias=rows.bias,
            images=images,
            pieces=cut(num_tokens, times.runs, self._num_pieces(sum(num_tokens)) if alike else 1),
        )

    def _num_pieces(self, num_tokens: int) -> int:
        pieces = num_token_pieces(num_tokens, self._dim, self._transformer.config.ffn_dim)
        return pieces if self._compute.tricks.pieces else 1

    @property
    def _dim(self) -> int:
        config = self._transformer.config
        return int(config.num_attention_heads * config.attention_head_dim)

    def _pad_copies(self) -> int:
        """Keys that stand for a text's padding; 0 keeps every row, as where each loses other numbers to dropout."""
        layers = list(self._transformer.condition_embedder.text_embedder.children())
        layers += [layer for block in self._transformer.blocks for layer in (block.attn2.to_k, block.attn2.to_v)]
        dropouts = (one for layer in layers if isinstance(layer, LoraLinear) for one in layer.lora_dropout.values())
        return self._kernel.pad_copies if self._compute.tricks.collapse_text and not any(map(drops, dropouts)) else 0

    def _rotation(self, sizes: Sizes, device: torch.device) -> Tensor:
        """The positions' complex numbers (N, channels of a head / 2), as diffusers' tables have them."""
        key = (sizes, device)
        table = self._rotations.pop(key, None)
        if table is None:
            shape = [size * step for size, step in zip(sizes, self._transformer.config.patch_size, strict=True)]
            cosines, sines = self._transformer.rope(torch.empty(1, 1, *shape, device=device))
            table = torch.complex(cosines[0, :, 0, 0::2].float(), sines[0, :, 0, 1::2].float()).to(device)
        self._rotations[key] = table
        if len(self._rotations) > KEPT_ROTATIONS:
            del self._rotations[next(iter(self._rotations))]
        return table

    def _through(self, hidden: Tensor, conditions: Tensor, tokens: Tokens) -> Tensor:
        """What the blocks make of the tokens, (T, D) -> (T, D)."""

        def blocks(inputs: StepInputs) -> Tensor:
            own = replace(
                tokens, text=inputs.text, text_bias=inputs.text_bias, images=inputs.images, rotations=inputs.rotations
            )
            return self._blocks(inputs.hidden, inputs.conditions, own)

        inputs = StepInputs(hidden, conditions, tokens.text, tokens.text_bias, tokens.images, tokens.rotations)
        return self._passed(inputs, (tokens.items, tokens.runs), blocks)

    def _blocks(self, hidden: Tensor, conditions: Tensor, tokens: Tokens) -> Tensor:
        modules = self._transformer.blocks
        layers = self._layers_for(hidden)
        hidden, tokens = hidden.to(layers.dtype), tokens.to(layers.dtype)
        whole = None if self._whole is None else partial(self._whole, step_tensors(conditions, tokens), tokens)
        passage = Passage(self._compute, self._swap, len(modules), hidden.device)
        # Whether adapters before the blocks gave a gradient to what every block takes beside the tokens.
        beside = any(one is not None and one.requires_grad for one in (conditions, tokens.text, tokens.images))
        for index, module in enumerate(modules):
            again = passage.recomputes(index, module, has_gradient=hidden.requires_grad or beside)
            stash = passage.stash(again)
            swapped = passage.swaps(index)
            block = Block(
                module, self._linears[index], layers, conditions, tokens, self._kernel, self._compute.tricks,
                self._elementwise, stash,
                swapped=swapped,
            )  # fmt: skip
            if whole is not None:
                output = whole(module, block.groups, hidden, swapped=swapped, recomputes=again)
                if output is not None:
                    hidden = output
                    continue
            hidden = passage.run(index, block, hidden, stash, recomputes=again)
        if self._whole is not None:
            self._whole.tell()
        return hidden

    def _head(self, hidden: Tensor, embedded: Tensor, tokens: Tokens, sizes: Sequence[Sizes]) -> list[Tensor]:
        """(T, D) -> for each item (1, C, F, h, w)."""
        transformer = self._transformer
        shift, scale = (transformer.scale_shift_table + embedded[:, None]).unbind(1)
        normed = self._elementwise.modulated(hidden, scale + 1, shift, transformer.norm_out.eps, tokens.runs)
        pieces = transformer.proj_out(normed).split(tokens.items)
        patch = transformer.config.patch_size
        outputs = []
        for piece, (frames, height, width) in zip(pieces, sizes, strict=True):
            parts = piece.view(1, frames, height, width, *patch, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
            outputs.append(parts.flatten(6, 7).flatten(4, 5).flatten(2, 3))
        return outputs


def _times(timesteps: Tensor, num_tokens: Sequence[int], device: torch.device) -> Times:
    """Timesteps (B,) or (B, N) -> those of the runs of tokens that share one.

    >>> times = _times(torch.tensor([[0.0, 0.0, 5.0, 5.0], [7.0, 7.0, 7.0, 7.0]]), (4, 4), torch.device("cpu"))
    >>> times.values.tolist(), times.runs
    ([0.0, 5.0, 7.0], (2, 2, 4))
    """
    if timesteps.ndim == 1:
        return Times(timesteps.to(device, torch.float32, non_blocking=True), tuple(num_tokens))
    values, runs = [], []
    for row in timesteps.cpu():
        numbers, counts = torch.unique_consecutive(row, return_counts=True)
        values.append(numbers)
        runs += counts.tolist()
    return Times(torch.cat(values).to(device, torch.float32, non_blocking=True), tuple(runs))
