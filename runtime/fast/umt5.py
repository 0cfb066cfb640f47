"""umT5's embeddings at the captions' true lengths, the encoder streamed from the disk one matrix at a time.

A caption alone needs no mask, and what padding adds is exactly nothing, so that this equals transformers to rounding.
All captions of a group go through one matrix while a thread reads the next; of the embedding only the rows that occur
are read. The encoder never is in memory.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from wangen.runtime.ahead import ahead
from wangen.runtime.fast.umt5_blocks import PARTS, Weights, make_packs, normalize, run_block
from wangen.runtime.fast.umt5_weights import Umt5Weights, open_umt5
from wangen.runtime.weights.tokenizer import load_tokenizer, token_ids

CPU_GROUP_BYTES = 64 * 2**20
"""Of hidden states: in float32 4096 tokens, about 50 captions. Computing them takes longer than reading all weights."""
GPU_GROUP_BYTES = 512 * 2**20
"""In 16 bits 65,536 tokens, about 800 captions; 2.8 GB with all that lies between two matrices."""
GPU_PACK_TOKENS = 4096
"""Rows of one matrix product on a GPU."""

Ids = tuple[int, ...]


def load_prompt_encoder(
    t5: Path, tokenizer: Path | None, *, dtype: torch.dtype, device: torch.device | str = "cpu", fp8: bool = False
) -> "PromptEncoder":
    """A umT5 encoder that stays on the disk.

    Args:
        t5: a file or folder as `load_text_encoder` takes it.
        tokenizer: None looks for it near and inside the weights.
        dtype: of weights, activations and embeddings.
        device: where it computes.
        fp8: compute with weights that were rounded to 8 bits with one scale per row, as `load_text_encoder` does.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors, no tokenizer.
    """
    weights = open_umt5(t5, dtype, torch.device(device), fp8=fp8)
    return PromptEncoder(weights, load_tokenizer(tokenizer or t5))


class PromptEncoder:
    """Prompts -> embeddings, by the weights of a file."""

    def __init__(self, weights: Umt5Weights, tokenizer: Tokenizer) -> None:
        self._weights = weights
        self._tokenizer = tokenizer
        on_cpu = weights.device.type == "cpu"
        self.group_tokens = (CPU_GROUP_BYTES if on_cpu else GPU_GROUP_BYTES) // (
            weights.sizes.dim * weights.dtype.itemsize
        )
        # A caption that is computed by itself has the same bits whichever others there are.
        self.pack_tokens = 0 if on_cpu else GPU_PACK_TOKENS
        self._copies: torch.cuda.Stream | None = None
        if weights.device.type == "cuda":
            self._copies = torch.cuda.Stream(weights.device)  # type: ignore[no-untyped-call]

    def encode(
        self,
        prompts: Sequence[str],
        on_block: Callable[[int, int], None] = lambda done, total: None,
        *,
        pictures: Sequence[Sequence[Any]] | None = None,
    ) -> list[torch.Tensor]:
        """The embedding of each prompt, in their order.

        Args:
            prompts: raw texts; they are cleaned here. The empty text is the `</s>` token alone.
            on_block: called after each block with how many are done and how many there will be: a block goes over
                thousands of tokens, and for each `group_tokens` all blocks are read again.
            pictures: umT5 sees none.

        Returns:
            For each prompt (L, dim) on the CPU, where L counts the `</s>` and is at most 512; a longer prompt is cut
            and keeps its `</s>`. Equal prompts are computed once and share one tensor.

        Raises:
            WangenError: the weights cannot be read, or the tokenizer is not theirs.
        """
        texts = [tuple(ids) for ids in token_ids(self._tokenizer, prompts)] if prompts else []
        groups = self._groups(sorted(set(texts), key=lambda ids: (len(ids), ids)))
        total, done = len(groups) * self._weights.sizes.num_layers, count(1)
        found: dict[Ids, torch.Tensor] = {}
        for group in groups:
            found |= zip(group, self._encode_group(group, lambda: on_block(next(done), total)), strict=True)
        return [found[ids] for ids in texts]

    def _groups(self, texts: Sequence[Ids]) -> list[list[Ids]]:
        """Texts in their order, in groups that are computed together."""
        groups: list[list[Ids]] = []
        num_tokens = 0
        for ids in texts:
            num_tokens += len(ids)
            if not groups or num_tokens > self.group_tokens:
                groups.append([])
                num_tokens = len(ids)
            groups[-1].append(ids)
        return groups

    @torch.no_grad()
    def _encode_group(self, texts: Sequence[Ids], on_block: Callable[[], None]) -> list[torch.Tensor]:
        """(L, dim) on the CPU for each text."""
        sizes = self._weights.sizes
        packs = make_packs([len(ids) for ids in texts], self.pack_tokens)
        hidden = self._embed(texts)  # (N, D)
        with closing(self._parts()) as parts:
            for _ in range(sizes.num_layers):
                run_block(hidden, packs, sizes.num_heads, parts)
                on_block()
        normed = normalize(hidden, packs, self._weights.final_norm()).cpu()
        return [rows.clone() for rows in torch.split(normed, [len(ids) for ids in texts])]

    def _embed(self, texts: Sequence[Ids]) -> torch.Tensor:
        occurring = sorted({i for ids in texts for i in ids})
        row_of = {i: row for row, i in enumerate(occurring)}
        rows = torch.tensor([row_of[i] for ids in texts for i in ids], device=self._weights.device)
        return self._weights.embedding_rows(occurring)[rows]

    def _parts(self) -> Generator[Weights, None, None]:
        """The parts of all blocks in their order, the next one always being read."""
        jobs = (
            partial(self._read, number, names) for number in range(self._weights.sizes.num_layers) for names in PARTS
        )
        for part in ahead(jobs, 1):
            yield part
            if self._copies:
                # The thread takes over this part's memory, and must not write it while it is still being used.
                torch.cuda.current_stream(self._weights.device).synchronize()

    def _read(self, number: int, names: Sequence[str]) -> Weights:
        """Some weights of a block, in a stream of its own on a GPU: copying need not wait for what is computed."""
        if self._copies is None:
            return self._weights.block(number, names)
        with torch.cuda.stream(self._copies):
            part = self._weights.block(number, names)
        self._copies.synchronize()
        return part
