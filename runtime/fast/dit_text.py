"""Texts for cross attention without their padding: equal zero rows become one key with a bias.

The model sees 512 rows, zeros behind each text, and attends to all of them. Zero rows stay equal to each other through
the text projection, keys, values and their adapters, unless dropout takes other numbers from each. So n of them are one
key whose score has log n added; its gradient is the sum of theirs.

Letters in shapes: B items, L rows of text, M rows that are left of 512.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wangen.generator.errors import WangenError
from wangen.runtime.fast.attention import pad_biases
from wangen.runtime.models.inputs import WAN_TEXT_ROWS

GPU_ROWS_STEP = 8
"""The memory-efficient kernel of CUDA takes a bias only for such a number of keys."""

GRAPH_ROWS_STEP = 64
"""Rows of a recorded step: captions of many lengths share a graph."""


@dataclass(frozen=True)
class Rows:
    """Texts as cross attention reads them.

    Attributes:
        rows: (B, M, dim), zeros behind each text.
        bias: (B, 1, 1, M) in float32, added to the scores; None where nothing is left out.
    """

    rows: Tensor
    bias: Tensor | None


def rows_step(device: torch.device, *, is_small: bool) -> int:
    """There are as many rows as a multiple of this; `is_small` of a step whose kernels are replayed, if they can be."""
    if device.type != "cuda":
        return 1
    return GRAPH_ROWS_STEP if is_small else GPU_ROWS_STEP


def text_rows(texts: Sequence[Tensor], device: torch.device, dtype: torch.dtype, copies: int, step: int = 1) -> Rows:
    """The rows of B texts (L_i, dim), on the device and in the dtype of the computation.

    Args:
        texts: each with its own number of rows, at most 512.
        device: where they go.
        dtype: theirs.
        copies: keys that stand for the padding (`Kernel.pad_copies`); 0 pads to 512 rows, as the official code does.
        step: there are as many rows as a multiple of it.

    Raises:
        WangenError: a text has more than 512 rows.
    """
    longest = max(len(text) for text in texts)
    if longest > WAN_TEXT_ROWS:
        raise WangenError(f"a text of {longest} rows, where Wan reads {WAN_TEXT_ROWS}",
                          cure="use the umT5-xxl encoder for caching and sampling")  # fmt: skip
    wanted = math.ceil((longest + copies) / step) * step
    num_rows = wanted if copies and wanted < WAN_TEXT_ROWS else WAN_TEXT_ROWS
    rows = torch.zeros(len(texts), num_rows, texts[0].shape[1], device=device, dtype=dtype)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    if num_rows == WAN_TEXT_ROWS:
        return Rows(rows, None)
    biases = torch.tensor([_biases(len(text), num_rows, copies) for text in texts])
    return Rows(rows, biases[:, None, None].to(device, non_blocking=True))


def _biases(length: int, num_rows: int, copies: int) -> list[float]:
    """For a text of `length` rows: 0 for these, then the padding's, then -inf for rows that do not count."""
    padding = WAN_TEXT_ROWS - length
    standing = pad_biases(padding, min(copies, padding))
    return [0.0] * length + list(standing) + [-math.inf] * (num_rows - length - len(standing))
