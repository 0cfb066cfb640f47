"""Qwen-Image's transformer as a training step runs it: diffusers' module and weights, peft's adapters, shorter ways.

The numbers are those of `QwenImageTransformer2DModel.forward` but for rounding. What is shorter: items of different
sizes are one pass, nothing before the blocks takes part in the backward pass, layers that share an input are one
product together with their adapters, norms and gates are one pass each, a recomputation ends where nothing is needed
any more, and the head sees the target's tokens alone.

In bfloat16 no autocast is used: frozen products, tokens and attention are bfloat16; modulation, norms and rotations are
computed in float32 and rounded once.

Letters in shapes: B items, C channels, h and w latents, L tokens of a text, T tokens of all items, D width of the
model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wangen.runtime.dtypes import float_dtype
from wangen.runtime.fast.dit_checkpoint import Passage
from wangen.runtime.fast.dit_shared import FastModel
from wangen.runtime.models.inputs import Controls, Inputs, require_width
from wangen.runtime.models.qwen_image_edit.blocks import Block, Tokens
from wangen.runtime.models.qwen_image_edit.transformer import SIDE, pack, unpack


class Item(NamedTuple):
    """What the model sees of one item: its pictures' latents (1, C, 1, h, w), the noisy one first, and its text."""

    pictures: list[Tensor]
    text: Tensor

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Tokens of each picture in each direction, as diffusers' table of positions takes them."""
        return [(1, picture.shape[3] // SIDE, picture.shape[4] // SIDE) for picture in self.pictures]

    @property
    def sizes(self) -> list[int]:
        """Tokens of each picture."""
        return [height * width for _, height, width in self.shapes]


class StepInputs(NamedTuple):
    """All tensors that a step's blocks take beside their weights: the tokens, and what `Tokens` says of them."""

    hidden: Tensor
    times: Tensor
    numbers: Tensor
    picture_turns: Tensor
    text_turns: Tensor


class FastQwen(FastModel):
    """A velocity model on the weights of a Qwen-Image or one of its Edit models, as `FastModel`."""

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
        """The velocity noise - clean for the target's tokens.

        Args:
            latents: (B, C, 1, h, w), noisy.
            timesteps: (B,) in [0, 1000].
            texts: B embeddings (L, dim) without padding.
            condition: there is none in this family.
            image_tokens: there are none in this family.
            controls: for each item the latents of its control images, (C, 1, h, w) each, of any sizes.

        Returns:
            (B, C, 1, h, w) in the dtype of the transformer's products.

        Raises:
            WangenError: embeddings of another text encoder.
        """
        assert condition is None, "not in this family"
        assert image_tokens is None, "not in this family"
        return torch.cat(self._run(_items(latents, texts, controls), timesteps))

    def packed(self, passes: Sequence[Inputs]) -> list[Tensor]:
        """The velocities of several batches of any shapes in one pass: attention looks at each item alone."""
        items = [item for one in passes for item in _items(one.latents, one.texts, one.controls)]
        found = iter(self._run(items, torch.cat([one.timesteps for one in passes])))
        return [torch.cat([next(found) for _ in one.texts]) for one in passes]

    def _run(self, items: Sequence[Item], timesteps: Tensor) -> list[Tensor]:
        """For each item its velocity, (1, C, 1, h, w)."""
        transformer = self._transformer
        require_width([item.text for item in items], transformer.config.joint_attention_dim, "Qwen2.5-VL 7B")
        device, dtype = items[0].pictures[0].device, float_dtype(transformer.img_in)
        patches = torch.cat([pack(picture.to(device, dtype))[0] for item in items for picture in item.pictures])
        texts = torch.cat([item.text.to(device, dtype) for item in items])
        tokens = self._tokens(items, device)
        with torch.autocast(device.type, enabled=False):
            with torch.set_grad_enabled(torch.is_grad_enabled() and self._prefix_has_gradient()):
                pictures = transformer.img_in(patches)
                hidden = torch.cat([pictures, transformer.txt_in(transformer.txt_norm(texts))])
                times = self._embed_times(timesteps.to(device, torch.float32, non_blocking=True))
            hidden = self._through(self._traced(hidden), times, tokens)
            return self._head(hidden.to(dtype), times[: len(items)], items)

    def _prefix_has_gradient(self) -> bool:
        """Whether what comes before the blocks is trained."""
        transformer = self._transformer
        outer = (transformer.img_in, transformer.txt_norm, transformer.txt_in, transformer.time_text_embed)
        return any(parameter.requires_grad for module in outer for parameter in module.parameters())

    def _embed_times(self, values: Tensor) -> Tensor:
        """Timesteps (B,) -> their embedding behind its SiLU, (B, D) in float32; with that of clean images behind them.

        Edit 2511 shows its control images as what they are: clean, timestep 0.
        """
        if self._transformer.zero_cond_t:
            values = torch.cat([values, values.new_zeros(1)])
        embedder = self._transformer.time_text_embed
        waves = embedder.time_proj(values / 1000)  # whose scale is 1000
        waves = waves.to(float_dtype(embedder.timestep_embedder))
        return functional.silu(embedder.timestep_embedder(waves).float())

    def _tokens(self, items: Sequence[Item], device: torch.device) -> Tokens:
        runs, times = [], []
        for number, item in enumerate(items):
            target, *controls = item.sizes
            clean = sum(controls) if self._transformer.zero_cond_t else 0
            runs.append(target + sum(controls) - clean)
            times.append(number)
            if clean:
                runs.append(clean)
                times.append(len(items))
        texts = tuple(len(item.text) for item in items)
        alike = all(item.shapes == items[0].shapes for item in items) and len(set(texts)) == 1
        turns = [
            self._transformer.pos_embed([item.shapes], max_txt_seq_len=len(item.text), device=device)
            for item in (items[:1] if alike else items)
        ]
        picture_turns, text_turns = (one[0] if alike else torch.cat(one) for one in zip(*turns, strict=True))
        return Tokens(
            pictures=tuple(sum(item.sizes) for item in items),
            texts=texts,
            runs=(*runs, *texts),
            times=torch.tensor(times).to(device, non_blocking=True),
            picture_turns=picture_turns,
            text_turns=text_turns,
        )

    def _through(self, hidden: Tensor, times: Tensor, tokens: Tokens) -> Tensor:
        """What the blocks make of the tokens, (T, D) -> (T, D)."""

        def blocks(inputs: StepInputs) -> Tensor:
            hidden, times, numbers, pictures, texts = inputs
            return self._blocks(hidden, times, replace(tokens, times=numbers, picture_turns=pictures, text_turns=texts))

        inputs = StepInputs(hidden, times, tokens.times, tokens.picture_turns, tokens.text_turns)
        return self._passed(inputs, (tokens.pictures, tokens.texts, tokens.runs), blocks)

    def _blocks(self, hidden: Tensor, times: Tensor, tokens: Tokens) -> Tensor:
        modules, tricks = self._transformer.transformer_blocks, self._compute.tricks
        layers = self._layers_for(hidden)
        hidden, times = hidden.to(layers.dtype), times.to(layers.dtype)
        passage = Passage(self._compute, self._swap, len(modules), hidden.device)
        for index, module in enumerate(modules):
            again = passage.recomputes(index, module, has_gradient=hidden.requires_grad or times.requires_grad)
            stash = passage.stash(again)
            block = Block(
                module, layers, times, tokens, self._kernel, tricks, self._elementwise, stash,
                swapped=passage.swaps(index),
            )  # fmt: skip
            hidden = passage.run(index, block, hidden, stash, recomputes=again)
        return hidden

    def _head(self, hidden: Tensor, times: Tensor, items: Sequence[Item]) -> list[Tensor]:
        """(T, D) -> for each item (1, C, 1, h, w)."""
        transformer = self._transformer
        linear = transformer.norm_out.linear
        scale, shift = linear(times.to(hidden.dtype)).float().chunk(2, dim=1)
        targets = [item.sizes[0] for item in items]
        starts = hidden[: sum(sum(item.sizes) for item in items)].split_with_sizes([sum(item.sizes) for item in items])
        rows = torch.cat([own[:number] for own, number in zip(starts, targets, strict=True)])
        normed = self._elementwise.modulated(rows, scale + 1, shift, transformer.norm_out.norm.eps, targets)
        outputs = transformer.proj_out(normed).split_with_sizes(targets)
        sizes = [item.shapes[0] for item in items]
        return [unpack(output[None], height, width) for output, (_, height, width) in zip(outputs, sizes, strict=True)]


def _items(latents: Tensor, texts: Sequence[Tensor], controls: Controls | None) -> list[Item]:
    """A batch (B, C, 1, h, w) as its items."""
    given = controls or [()] * len(latents)
    return [
        Item([target, *(control[None].to(target.device) for control in own)], text)
        for target, text, own in zip(torch.split(latents, 1), texts, given, strict=True)
    ]
