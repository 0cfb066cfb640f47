"""The weights of a umT5 encoder that stays on the disk: its parts are read when their turn comes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from wangen.generator.errors import WangenError
from wangen.generator.formats import TensorInfo, rows
from wangen.generator.kinds import expect
from wangen.runtime.dtypes import TORCH_DTYPES
from wangen.runtime.weights.filling import Checkpoint, compare, open_checkpoint
from wangen.runtime.weights.quantized import Coding, is_quantized, read_coded, read_scale, read_weight, to_fp8
from wangen.runtime.weights.reading import read_bytes, read_tensor
from wangen.runtime.weights.umt5_names import EMBEDDING, FINAL_NORM, Umt5Sizes, block_names, umt5_names, umt5_sizes

PIECE = 2**22
"""Numbers of a matrix that are decoded at a time, so that a whole one in float32 is never beside its result."""


@dataclass(frozen=True)
class Umt5Weights:
    """The weights of an encoder as they will be computed with.

    Attributes:
        checkpoint: the file.
        sizes: of the encoder.
        dtype: what is read becomes this.
        device: where it goes.
        fp8: the matrices of linear layers are rounded to 8 bits with a scale per row, as `load_text_encoder` does.
    """

    checkpoint: Checkpoint
    sizes: Umt5Sizes
    dtype: torch.dtype
    device: torch.device
    fp8: bool

    def block(self, number: int, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Some weights of a block by their official names.

        Raises:
            WangenError: they cannot be read or decoded.
        """
        full = block_names(number)
        return {name: self._read(full[name], linear=name.startswith(("attn.", "ffn."))) for name in names}

    def final_norm(self) -> torch.Tensor:
        """(dim,) the scale of the norm behind the last block.

        Raises:
            WangenError: it cannot be read.
        """
        return self._read(FINAL_NORM)

    def embedding_rows(self, ids: Sequence[int]) -> torch.Tensor:
        """(len(ids), dim) rows of the embedding; no other row is read.

        Raises:
            WangenError: there is no such row, or it cannot be read or decoded.
        """
        info, scale = self._tensor(EMBEDDING)
        if ids and max(ids) >= self.sizes.vocabulary:
            raise WangenError(
                f"the tokenizer gives the id {max(ids)}, and the embedding has {self.sizes.vocabulary} rows",
                where=str(self.checkpoint.path),
                cure="name the tokenizer that belongs to these weights with --tokenizer",
            )
        if not _by_rows(info):
            return read_weight(info, scale, self.dtype)[list(ids)].to(self.device)
        stored = torch.stack([read_bytes(rows(info, row, row + 1)) for row in ids])
        if not is_quantized(info):
            return stored.view(TORCH_DTYPES[info.dtype]).to(self.device, self.dtype)
        factor = read_scale(info, scale, "cpu")
        if factor is not None and factor.ndim:
            factor = factor[list(ids)]
        return Coding(info.dtype, info.shape).decode(stored.view(torch.int8), factor, self.dtype).to(self.device)

    def _tensor(self, name: str) -> tuple[TensorInfo, TensorInfo | None]:
        old = self.checkpoint.names[name]
        contents = self.checkpoint.contents
        return contents.weights[old], contents.companions.get(old, {}).get("scale")

    def _read(self, name: str, *, linear: bool = False) -> torch.Tensor:
        info, scale = self._tensor(name)
        if linear and (self.fp8 or is_quantized(info)):
            return self._decoded(info, scale)
        return read_weight(info, scale, self.dtype, self.device)

    def _decoded(self, info: TensorInfo, scale: TensorInfo | None) -> torch.Tensor:
        """A matrix that is stored quantised or becomes so, as the numbers that it then stands for."""
        num_rows, columns = info.shape
        factor = read_scale(info, scale, self.device)
        step = max(1, PIECE // columns) if _by_rows(info) else num_rows
        weight = torch.empty(info.shape, dtype=self.dtype, device=self.device)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            piece = info if end - begin == num_rows else rows(info, begin, end)
            scales = factor if factor is None or not factor.ndim else factor[begin:end]
            weight[begin:end] = self._piece(piece, scales)
        return weight

    def _piece(self, info: TensorInfo, factor: torch.Tensor | None) -> torch.Tensor:
        if is_quantized(info):
            stored, coding = read_coded(info, self.device)
            return coding.decode(stored, factor, self.dtype)
        stored, factor = to_fp8(read_tensor(info, None, self.device))
        return Coding("F8_E4M3", info.shape).decode(stored.view(torch.int8), factor, self.dtype)


def open_umt5(path: Path, dtype: torch.dtype, device: torch.device, *, fp8: bool) -> Umt5Weights:
    """A umT5 encoder's file, compared with what its own sizes imply; nothing but the header is read.

    Raises:
        WangenError: as `load_text_encoder`.
    """
    checkpoint = open_checkpoint(path, expect(path, "umt5-encoder", "--t5"), umt5_names)
    sizes = umt5_sizes(checkpoint)
    compare(checkpoint, sizes.shapes())
    return Umt5Weights(checkpoint, sizes, dtype, device, fp8)


def _by_rows(info: TensorInfo) -> bool:
    return info.place is not None and info.place.strides is None
