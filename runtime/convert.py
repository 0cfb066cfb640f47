"""A LoRA's file in other layouts and dtypes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from wangen.generator.errors import UsageError
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
from wangen.runtime.safetensors_file import require_free, require_space, write

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


@dataclass(frozen=True)
class _Made:
    """A file that is ready to be written."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    config: str

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors.values())


def convert(
    path: Path, layouts: Sequence[Layout], dtype: str | None, save_path: Path, *, overwrite: bool = False
) -> Converted:
    """Write a LoRA in other layouts; metadata stay, apart from digests of the tensors.

    Args:
        path: the LoRA, in any layout: a file, or a folder of peft or diffusers.
        layouts: at least one; the first goes to `save_path`, the others get their name as a suffix.
        dtype: torch's name of a dtype for the matrices; None keeps what is stored.
        save_path: a `.safetensors`; for peft alone also a folder, which gets an `adapter_config.json`.
        overwrite: replace any file that is in the way; without it only a LoRA is.

    Raises:
        WangenError: no plain LoRA, a number that the dtype cannot hold, no room on the disk, a file is in the way.
            All that is found before the first file is written.
    """
    file = lora_file(path)
    header = read_header(file)
    original = _Original(read_lora(path), header, layout_of(header.tensors))
    wanted: torch.dtype | None = getattr(torch, dtype) if dtype else None
    folder = not is_safetensors(save_path)
    files = _files(save_path / ADAPTER_FILE if folder else save_path, layouts)
    require_writable(files[layouts[0]].parent)
    for target in files.values():
        require_free(target, [file], lambda there: there.kind == "lora", overwrite)
        _refuse_config(target, folder, overwrite)
    made = {layout: _make(original, layout, wanted) for layout in layouts}
    require_space(files[layouts[0]], sum(content.num_bytes for content in made.values()))
    for layout, target in files.items():
        write(target, made[layout].tensors, made[layout].metadata)
        if folder:
            write_text(target.with_name(CONFIG_FILE), made[layout].config)
    ranks = sorted({weight.rank for weight in original.lora.values()})
    return Converted(original.layout, files, len(original.lora), ranks)


def _files(first: Path, layouts: Sequence[Layout]) -> dict[Layout, Path]:
    """Where each layout goes."""
    others = {layout: first.with_name(f"{first.stem}-{layout}{first.suffix}") for layout in layouts[1:]}
    return {layouts[0]: first, **others}


def _refuse_config(file: Path, folder: bool, overwrite: bool) -> None:
    """Stop when peft's configuration of another adapter lies where it would be replaced, or read with this file."""
    config = file.with_name(CONFIG_FILE)
    if file.name != ADAPTER_FILE or not config.exists():
        return
    if not folder:
        raise UsageError("its alphas would be read with this LoRA", where=str(config),
                         cure="give another name, or the folder with --layout peft")  # fmt: skip
    if not file.exists() and not overwrite:
        raise UsageError("the configuration of another adapter is there and would be replaced", where=str(config),
                         cure="give another --save_path, or --overwrite as well")  # fmt: skip


def _make(original: _Original, layout: Layout, dtype: torch.dtype | None) -> _Made:
    """One layout's file."""
    stored = as_stored(original.lora, layout, dtype)
    fields = lora_fields(stored)
    metadata = _metadata(original, layout, stored)
    if layout in ("diffusers", "peft"):  # for us also in peft's file, which may be copied without its configuration
        own = {DIFFUSERS_PREFIX + key: value for key, value in fields.items()}
        metadata[DIFFUSERS_METADATA] = json.dumps(own, sort_keys=True)
    return _Made(name_tensors(stored, layout), metadata, config_text(fields))


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
