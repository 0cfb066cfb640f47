"""A LoRA's file in other layouts and dtypes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from wangen.generator.files import write_text
from wangen.generator.formats import Header
from wangen.generator.headers import read_header
from wangen.generator.lora_config import (
    ADAPTER_FILE,
    CONFIG_FILE,
    DIFFUSERS_METADATA,
    DIFFUSERS_PREFIX,
    STALE,
    config_text,
    is_safetensors,
    lora_file,
)
from wangen.generator.lora_keys import Layout, layout_of
from wangen.generator.workspace import require_writable
from wangen.runtime.lora import Lora, as_stored, lora_fields, name_tensors, read_lora
from wangen.runtime.safetensors_file import refuse_overwriting, require_space, write

CONVERTED = "wangen.converted"


@dataclass(frozen=True)
class Converted:
    """What converting did.

    Attributes:
        layout: of the file that was read; `mixed` or `bare` for what other trainers write.
        files: layout -> the file of its tensors.
        num_modules: how many modules the LoRA changes.
        ranks: the different ranks.
    """

    layout: str
    files: Mapping[Layout, Path]
    num_modules: int
    ranks: Sequence[int]


@dataclass(frozen=True)
class _Original:
    """The LoRA that is converted."""

    lora: Lora
    header: Header
    layout: str
    file: Path


def convert(path: Path, layouts: Sequence[Layout], dtype: str | None, save_path: Path) -> Converted:
    """Write a LoRA in other layouts; metadata stay, apart from digests of the tensors.

    Args:
        path: the LoRA, in any layout: a file, or a folder of peft or diffusers.
        layouts: at least one; the first goes to `save_path`, the others get their name as a suffix.
        dtype: torch's name of a dtype for the matrices; None keeps what is stored.
        save_path: a `.safetensors`; for peft also a folder, which gets an `adapter_config.json`.

    Raises:
        WangenError: no plain LoRA, a number that the dtype cannot hold, no room on the disk, the file is the one read.
    """
    file = lora_file(path)
    header = read_header(file)
    original = _Original(read_lora(path), header, layout_of(header.tensors), file)
    wanted: torch.dtype | None = getattr(torch, dtype) if dtype else None
    files: dict[Layout, Path] = {}
    for layout in layouts:
        target = save_path.with_name(f"{save_path.stem}-{layout}{save_path.suffix}") if files else save_path
        files[layout] = _write(original, layout, wanted, target)
    ranks = sorted({weight.rank for weight in original.lora.values()})
    return Converted(original.layout, files, len(original.lora), ranks)


def _write(original: _Original, layout: Layout, dtype: torch.dtype | None, target: Path) -> Path:
    """Write one layout and return the path of its tensors."""
    stored = as_stored(original.lora, layout, dtype)
    fields = lora_fields(stored)
    folder = layout == "peft" and not is_safetensors(target)
    file = target / ADAPTER_FILE if folder else target
    require_writable(file.parent)
    refuse_overwriting(file, [original.file])
    tensors = name_tensors(stored, layout)
    require_space(file, sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()))
    metadata = _metadata(original, layout, stored)
    if layout == "diffusers":
        own = {DIFFUSERS_PREFIX + key: value for key, value in fields.items()}
        metadata[DIFFUSERS_METADATA] = json.dumps(own, sort_keys=True)
    write(file, tensors, metadata)
    if folder:
        write_text(target / CONFIG_FILE, config_text(fields))
    return file


def _metadata(original: _Original, layout: Layout, stored: Lora) -> dict[str, str]:
    """The old file's metadata, without what is true of its tensors only, and what was changed."""
    kept = {key: value for key, value in original.header.metadata.items() if key not in (*STALE, DIFFUSERS_METADATA)}
    folded = any(weight.alpha != original.lora[name].alpha for name, weight in stored.items())
    note = {
        "from": original.layout,
        "to": layout,
        "from_dtype": sorted({info.dtype for info in original.header.tensors.values() if len(info.shape) > 1}),
        "alpha": "changed with the matrices, the scale of their product is the same" if folded else "kept",
    }
    return {"format": "pt", **kept, CONVERTED: json.dumps(note, sort_keys=True)}
