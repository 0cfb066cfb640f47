"""LoRAs added to the weights of a whole checkpoint, tensor by tensor: neither the old model nor the new is in memory.

A weight is read, dequantised where it has to be, changed in float32 and rounded once to what the new file stores.
The new file has the names of the old one, prefixes included, or those of another layout. Without a LoRA the layout is
all that changes.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from wangen.generator.companions import CLEAN_CONTROLS, Contents, sort_out, strip_prefix
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.experts import expert_of
from wangen.generator.files import write_text
from wangen.generator.formats import DOWNLOAD_AGAIN, Header, TensorInfo
from wangen.generator.header_keys import CONVERTED, EXPERT, MERGED
from wangen.generator.headers import has_clean_controls
from wangen.generator.kinds import expect, judge
from wangen.generator.lora_config import STALE
from wangen.generator.lora_keys import module_name
from wangen.generator.workspace import require_writable
from wangen.runtime.dtypes import FLOAT8, TORCH_DTYPES
from wangen.runtime.lora import Lora, LoraWeight, cast, nothing_matches, require_size
from wangen.runtime.progress import progress
from wangen.runtime.safetensors_file import Later, require_space, write
from wangen.runtime.transformer_layout import KNOWN, Form, TransformerLayout, in_layout
from wangen.runtime.weights.quantized import QUANTISATION, is_quantized, read_weight, refuse_other_forms
from wangen.runtime.weights.reading import read_tensor

SCALED = "fp8_scaled"
FLOAT32_MAX = torch.finfo(torch.float32).max
TRANSFORMERS = (*KNOWN, "wan-transformer-other")
BLOCK_MATRIX = re.compile(r"(?:transformer_)?blocks\.\d+\..+\.weight")


@dataclass(frozen=True)
class Source:
    """A LoRA to merge.

    Attributes:
        path: where it came from, for messages.
        digest: its identity, for the new file's metadata.
        lora: its weights.
        multiplier: its strength; 1 is as trained.
    """

    path: Path
    digest: str
    lora: Lora
    multiplier: float


@dataclass(frozen=True)
class Merged:
    """What merging did.

    Attributes:
        file: that was written.
        num_tensors: in the new file.
        num_changed: weights that a LoRA changed.
        left_out: for each LoRA the modules that the checkpoint lacks.
        num_bytes: of the new file's tensors.
        dtype: what was asked for, or bfloat16 for GGUF; None: each tensor as it was.
    """

    file: Path
    num_tensors: int
    num_changed: int
    left_out: tuple[list[str], ...]
    num_bytes: int
    dtype: str | None


Change = tuple[LoraWeight, float]
"""A module's factors and what their product is multiplied with."""


def merge(
    dit: Path,
    sources: Sequence[Source],
    save_path: Path,
    dtype: str | None,
    *,
    layout: TransformerLayout | None = None,
    overwrite: bool = False,
) -> Merged:
    """Write a checkpoint in which LoRAs are part of the weights, or the weights as they are in another layout.

    Args:
        dit: a transformer of Wan or Qwen-Image in any format and layout, whole, sharded or a diffusers folder.
        sources: the LoRAs, at least one where no layout is given.
        save_path: the safetensors file to write; for the layout of diffusers also its folder.
        dtype: `float32`, `bfloat16`, `float16`; `float8_e4m3fn` or `fp8_scaled` for the matrices of the blocks; None
            stores each tensor as it was (GGUF without a layout: bfloat16).
        layout: whose names the tensors get; None keeps those of `dit`.
        overwrite: replace any file at `save_path`; without it only what was made in the same way is.

    Raises:
        WangenError: no such transformer, a LoRA that does not fit, no room on the disk, a file is in the way.
    """
    header = expect(dit, KNOWN if layout else TRANSFORMERS, "--dit")
    contents = sort_out(header)
    refuse_other_forms(dit, header, contents)
    form = in_layout(dit, header, contents, layout, save_path, dtype) if layout else Form(header, contents, save_path)
    read = {info.place.file for info in header.tensors.values() if info.place} | {source.path for source in sources}
    note = MERGED if sources else CONVERTED
    form.require_free(read, lambda there: note in there.metadata and there.kind in TRANSFORMERS, overwrite)
    changes = _changes(form.contents, sources)
    if header.format == "gguf" and dtype is None and not layout:
        dtype = "bfloat16"
    tensors = _in_dtype(form.contents, changes, dtype) if dtype else _as_before(dit, form, changes)
    marks = {name: info for name, info in form.header.tensors.items() if strip_prefix(name) == CLEAN_CONTROLS}
    tensors |= {name: _copied(info) for name, info in marks.items()}
    if not marks and not form.config and has_clean_controls(dit, header):  # a configuration says it, which stays behind
        tensors[CLEAN_CONTROLS] = Later(torch.float32, (0,), partial(torch.zeros, 0))
    metadata = _metadata(header, sources, layout, dtype, expert_of(dit, "--dit"))
    _write(form, tensors, metadata, "merging" if sources else "converting")
    found = {module for name in form.contents.weights if (module := _module(name))}
    left_out = tuple([module for module in source.lora if module not in found] for source in sources)
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    return Merged(form.file, len(tensors), len(changes), left_out, num_bytes, dtype)


def _write(form: Form, tensors: Mapping[str, Later], metadata: Mapping[str, str], words: str) -> None:
    """The file, tensor by tensor; its configuration, without which it may be taken for another model, comes first."""
    require_writable(form.file.parent)
    require_space(form.file, sum(tensor.num_bytes for tensor in tensors.values()))
    if form.config:
        write_text(form.config_file, form.config)
    with progress(words, len(tensors)) as advance:

        def counted(tensor: Later) -> Later:
            def make() -> torch.Tensor:
                made = tensor.make()
                advance(1, "")
                return made

            return replace(tensor, make=make)

        write(form.file, {name: counted(tensor) for name, tensor in tensors.items()}, metadata)


def _module(name: str) -> str | None:
    """The module in diffusers' words that a weight without prefix belongs to, if a LoRA can change it."""
    return module_name(name.removesuffix(".weight")) if name.endswith(".weight") else None


def _changes(contents: Contents, sources: Sequence[Source]) -> dict[str, list[Change]]:
    """Weight name -> what is added to it, in the order of the LoRAs."""
    changes: dict[str, list[Change]] = {}
    for source in sources:
        fits = False
        for name, info in contents.weights.items():
            weight = source.lora.get(_module(name) or "")
            if weight is None:
                continue
            require_size(name, weight, info.shape, str(source.path))
            if not is_quantized(info) and not _dtype(info).is_floating_point:
                raise WangenError(f"{name} is stored as {info.dtype}, whole numbers whose scale nothing says",
                                  where=info.file, cure=DOWNLOAD_AGAIN)  # fmt: skip
            fits = True
            if abs(factor := source.multiplier * weight.scale) > FLOAT32_MAX:
                raise WangenError(f"strength {source.multiplier:g} times alpha / rank of {_module(name)} is too large",
                                  where=str(source.path), cure="give a smaller --lora_multiplier")  # fmt: skip
            if factor:
                changes.setdefault(name, []).append((weight, factor))
        if not fits:
            raise nothing_matches(source.lora, str(source.path))
    return changes


def _as_before(dit: Path, form: Form, changes: Mapping[str, Sequence[Change]]) -> dict[str, Later]:
    """Every tensor as the old file stores it, unchanged ones byte for byte; a changed fp8 weight gets a new scale."""
    tensors, contents = {name: _copied(info) for name, info in form.header.tensors.items()}, form.contents
    for weight, change in changes.items():
        info, name = contents.weights[weight], contents.names[weight]
        scale = contents.companions.get(weight, {}).get("scale")
        if scale is None:
            tensors[name] = _cast_later(info, None, change, _dtype(info), name)
            continue
        if math.prod(scale.shape) != 1:
            raise UsageError("this checkpoint's 8-bit weights have more than one scale each", where=str(dit),
                             cure="give --dtype bfloat16 or fp8_scaled")  # fmt: skip
        new = _scaled_later(info, scale, change, FLOAT8[info.dtype], _dtype(scale), scale.shape)
        tensors[name], tensors[contents.scale_names[weight]] = new
    return tensors


def _in_dtype(contents: Contents, changes: Mapping[str, Sequence[Change]], asked: str) -> dict[str, Later]:
    """Every weight in the dtype asked for; scales and markers of the old file are gone with its 8-bit weights."""
    tensors: dict[str, Later] = {}
    prefix = ""
    for weight, info in contents.weights.items():
        name = contents.names[weight]
        scale = contents.companions.get(weight, {}).get("scale")
        change = changes.get(weight, ())
        eight = asked in (SCALED, "float8_e4m3fn")
        matrix = BLOCK_MATRIX.fullmatch(weight) is not None and len(info.shape) == 2 and bool(_module(weight))
        if not is_quantized(info) and not _dtype(info).is_floating_point:
            tensors[name] = _copied(info)
        elif asked == SCALED and matrix:
            prefix = name.removesuffix(weight)
            scale_name = f"{name.removesuffix('.weight')}.scale_weight"
            tensors[name], tensors[scale_name] = _scaled_later(info, scale, change)
        else:
            own = torch.bfloat16 if is_quantized(info) else _dtype(info)
            dtype = own if eight and not matrix else getattr(torch, asked)
            tensors[name] = _cast_later(info, scale, change, dtype, name)
    if asked == SCALED:
        # Two elements tell ComfyUI to dequantise before it multiplies; one would ask for products in 8 bits.
        marker = partial(torch.zeros, 2, dtype=torch.float8_e4m3fn)
        tensors[f"{prefix}scaled_fp8"] = Later(torch.float8_e4m3fn, (2,), marker)
    return tensors


def _dtype(info: TensorInfo) -> torch.dtype:
    if info.dtype not in TORCH_DTYPES:
        raise WangenError(f"tensors stored as {info.dtype} cannot be written as they are",
                          where=info.file, cure="give --dtype bfloat16")  # fmt: skip
    return TORCH_DTYPES[info.dtype]


def _copied(info: TensorInfo) -> Later:
    return Later(_dtype(info), info.shape, partial(read_tensor, info))


def _cast_later(
    info: TensorInfo, scale: TensorInfo | None, change: Sequence[Change], dtype: torch.dtype, name: str
) -> Later:
    if not change and scale is None and TORCH_DTYPES.get(info.dtype) == dtype:
        return _copied(info)
    file = info.file
    return Later(dtype, info.shape, lambda: cast(_merged(info, scale, change), dtype, name, file))


def _scaled_later(
    info: TensorInfo,
    scale: TensorInfo | None,
    change: Sequence[Change],
    float8: torch.dtype = torch.float8_e4m3fn,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (),
) -> tuple[Later, Later]:
    """A weight in `float8` and its scale, one number. The scale stands elsewhere in the file: each is made anew.

    Args:
        info: the old weight.
        scale: its old scale.
        change: what is added.
        float8: which of the 8-bit types.
        dtype: of the new scale.
        shape: of the new scale.
    """
    max_float8 = torch.finfo(float8).max

    def scale_of(weight: torch.Tensor) -> torch.Tensor:
        # `abs` would make a second tensor of this size.
        largest = torch.stack(weight.aminmax()).abs().max() if weight.numel() else weight.new_zeros(())
        return torch.where(largest > 0, largest / max_float8, 1.0).to(dtype)

    def make_weight() -> torch.Tensor:
        weight = _merged(info, scale, change)
        return weight.div_(scale_of(weight)).clamp_(-max_float8, max_float8).to(float8)

    def make_scale() -> torch.Tensor:
        return cast(scale_of(_merged(info, scale, change)), dtype, "a scale").reshape(shape)

    return Later(float8, info.shape, make_weight), Later(dtype, shape, make_scale)


@torch.no_grad()
def _merged(info: TensorInfo, scale: TensorInfo | None, change: Sequence[Change]) -> torch.Tensor:
    """A weight in float32 with the changes added; no tensor of its size is made beside it."""
    weight = read_weight(info, scale, torch.float32)
    matrix = weight.view(weight.shape[0], -1) if change else weight
    for part, factor in change:
        matrix.addmm_(part.up.flatten(1).float(), part.down.flatten(1).float(), alpha=factor)
    return weight


def _metadata(
    header: Header, sources: Sequence[Source], layout: TransformerLayout | None, dtype: str | None, expert: str
) -> dict[str, str]:
    """The old file's metadata without what no longer holds, which LoRAs were added, whose names there were, and which
    of two experts it is, where that is known.
    """
    metadata = header.metadata if header.format == "safetensors" else {}
    stale = (*STALE, QUANTISATION) if dtype else STALE
    made = {"format": "pt", **{key: value for key, value in metadata.items() if key not in stale}}
    if expert:  # the new file's name need not say it
        made[EXPERT] = f"{expert}_noise"
    if layout:
        made[CONVERTED] = json.dumps({"from": judge(header).layout, "to": layout}, sort_keys=True)
    if sources:
        try:
            before = json.loads(metadata.get(MERGED, "[]"))
        except (ValueError, RecursionError):
            before = []
        added = [{"lora": source.digest, "multiplier": source.multiplier} for source in sources]
        made[MERGED] = json.dumps((before if isinstance(before, list) else []) + added, sort_keys=True)
    return made
