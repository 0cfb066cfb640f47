"""An adapter's file in other layouts and dtypes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from wangen.generator.adapter_parts import unfit_adapter
from wangen.generator.errors import UsageError
from wangen.generator.files import write_text
from wangen.generator.formats import Header
from wangen.generator.header_keys import CONVERTED
from wangen.generator.headers import read_header
from wangen.generator.kinds import Facts, judge
from wangen.generator.lora_config import (
    ADAPTER_FILE,
    CONFIG_FILE,
    DIFFUSERS_METADATA,
    STALE,
    config_text,
    is_safetensors,
    lora_file,
)
from wangen.generator.lora_keys import Layout, layout_of
from wangen.generator.workspace import require_writable
from wangen.runtime.adapters import Adapter, read_adapter
from wangen.runtime.lora import Lora, as_stored, described, lora_fields, name_tensors, needs_description, read_lora
from wangen.runtime.safetensors_file import require_free, require_space, write
from wangen.runtime.training.adapter_files import name_adapter


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
    """What is converted: a plain LoRA, or an adapter of another kind."""

    lora: Lora | None
    adapter: Adapter
    header: Header
    layout: str

    @property
    def num_modules(self) -> int:
        return len(self.lora or self.adapter)

    @property
    def ranks(self) -> list[int]:
        weights = (self.lora or self.adapter).values()
        return sorted({weight.rank for weight in weights if weight.rank})


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
    """Write a LoRA, DoRA, LoHa or LoKr in other layouts; metadata stay, apart from digests of the tensors.

    Args:
        path: the adapter, in any layout: a file, or a folder of peft or diffusers.
        layouts: at least one; the first goes to `save_path`, the others get their name as a suffix.
        dtype: torch's name of a dtype for the matrices; None keeps what is stored.
        save_path: a `.safetensors`; for peft alone also a folder, which gets an `adapter_config.json`.
        overwrite: replace any file that is in the way; without it only an adapter of the same kind is, and where the
            name has a layout as its suffix only a converted one.

    Raises:
        WangenError: no adapter that is read, a layout or dtype that it cannot have, a number that the dtype cannot
            hold, no room on the disk, a file is in the way. All that is found before the first file is written.
    """
    file = lora_file(path)
    header = read_header(file)
    original = _read(path, header)
    wanted: torch.dtype | None = getattr(torch, dtype) if dtype else None
    folder = not is_safetensors(save_path)
    files = _files(save_path / ADAPTER_FILE if folder else save_path, layouts)
    require_writable(files[layouts[0]].parent)
    judged = judge(header)
    own = judged.kind, judged.words

    def ours(there: Facts, *, named: bool) -> bool:
        """Only by name may a LoRA that nobody converted be replaced: it may be what somebody trained."""
        return (there.kind, there.words) == own and (named or CONVERTED in there.metadata)

    for target in files.values():
        require_free(target, [file], partial(ours, named=target == files[layouts[0]]), overwrite)
        _refuse_config(target, folder, overwrite)
    if original.lora is None:
        made = {layout: _make_adapter(original, layout, wanted) for layout in layouts}
    else:
        made = {layout: _make(original, original.lora, layout, wanted, folder=folder) for layout in layouts}
    require_space(files[layouts[0]], sum(content.num_bytes for content in made.values()))
    for layout, target in files.items():
        write(target, made[layout].tensors, made[layout].metadata)
        if folder:
            write_text(target.with_name(CONFIG_FILE), made[layout].config)
    return Converted(original.layout, files, original.num_modules, original.ranks)


def _read(path: Path, header: Header) -> _Original:
    """The adapter. A file of a strange kind is read as a plain LoRA, which says what it is instead."""
    layout = layout_of(header.tensors)
    if judge(header).kind == "lora-other" and not unfit_adapter(header.tensors):
        return _Original(None, read_adapter(path, "--lora_weight"), header, layout)
    return _Original(read_lora(path), {}, header, layout)


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


def _make_adapter(original: _Original, layout: Layout, dtype: torch.dtype | None) -> _Made:
    """One layout's file of a DoRA, LoHa or LoKr.

    A DoRA's magnitudes are over the norms of the base or of the changed weight, and only the base's weights tell one
    from the other.
    """
    first = next(iter(original.adapter.values()))
    cure = "train writes several layouts at once: --lora_layout comfyui diffusers"
    if layout == "peft" or dtype == torch.float8_e4m3fn:
        what = "--layout peft" if layout == "peft" else "float8"
        raise UsageError(f"{what} is for plain LoRAs", cure="give another")
    if first.magnitude is not None:
        for_comfyui = any(key.endswith("dora_scale") for key in original.header.tensors)
        wanted = layout in ("comfyui", "kohya")
        if wanted != for_comfyui and (wanted or first.over_base):
            raise UsageError(f"a DoRA's magnitudes for {layout} need the weights of its base", cure=cure)
    dtypes = {factor.dtype for weight in original.adapter.values() for factor in weight.factors.values()}
    own = dtypes.pop() if len(dtypes) == 1 else torch.float32  # which loses nothing of any
    tensors = name_adapter(original.adapter, layout, dtype or own)
    words = "in the first factor where the layout has none, the scale of the product is the same"
    return _Made(tensors, _metadata(original, layout, words), "")


def _make(original: _Original, lora: Lora, layout: Layout, dtype: torch.dtype | None, *, folder: bool) -> _Made:
    """One layout's file of a plain LoRA."""
    stored = as_stored(lora, layout, dtype)
    if layout == "peft" and not folder and any(weight.alpha != weight.rank for weight in stored.values()):
        raise UsageError("a peft file cannot tell the alpha that float8 needs",
                         cure="name a folder, which gets an adapter_config.json, or give --dtype bfloat16")  # fmt: skip
    fields = lora_fields(stored)
    folded = any(weight.alpha != lora[name].alpha for name, weight in stored.items())
    words = "changed with the matrices, the scale of their product is the same" if folded else "kept"
    metadata = _metadata(original, layout, words)
    # For us also in peft's file, which may be copied without its configuration.
    if layout in ("diffusers", "peft") or needs_description(stored, layout):
        metadata |= described(stored)
    return _Made(name_tensors(stored, layout), metadata, config_text(fields))


def _metadata(original: _Original, layout: Layout, alpha: str) -> dict[str, str]:
    """The old file's metadata, without what is true of its tensors only, and what was changed."""
    kept = {key: value for key, value in original.header.metadata.items() if key not in (*STALE, DIFFUSERS_METADATA)}
    note = {
        "from": original.layout,
        "to": layout,
        "from_dtype": sorted({info.dtype for info in original.header.tensors.values() if len(info.shape) > 1}),
        "alpha": alpha,
    }
    return {"format": "pt", **kept, CONVERTED: json.dumps(note, sort_keys=True)}
