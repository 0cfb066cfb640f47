"""`export`: a LoRA in other layouts and dtypes, LoRAs merged into a checkpoint, and what a header says."""

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from wangen.generator import headers
from wangen.generator.errors import UsageError, many
from wangen.generator.files import write_text
from wangen.generator.formats import Header
from wangen.generator.session import Report
from wangen.generator.steps import Export
from wangen.generator.workspace import require_writable
from wangen.runtime import safetensors_file
from wangen.runtime.lora import Lora, as_stored, lora_fields, name_tensors, read_lora
from wangen.runtime.lora_config import (
    ADAPTER_FILE,
    CONFIG_FILE,
    DIFFUSERS_METADATA,
    DIFFUSERS_PREFIX,
    config_text,
    lora_file,
)
from wangen.runtime.lora_keys import Layout, layout_of
from wangen.runtime.lora_metadata import describe_file
from wangen.runtime.merge import SCALED, STALE, Source, merge, refuse_overwriting, require_space

log = logging.getLogger("wangen")

ENDING = ".safetensors"
CONVERTED = "wangen.converted"
MAX_NAMES = 8


def run(options: Export) -> Report:
    """Do one of the three.

    Raises:
        WangenError: a file is of another kind, a LoRA does not fit, the disk is full or refuses.
    """
    _refuse(options)
    if options.metadata:
        return _tell_metadata(options)
    assert options.save_path is not None
    if options.dit:
        return _merge(options, options.dit, options.save_path)
    return _convert(options, options.lora_weight[0], options.save_path)


def _refuse(options: Export) -> None:
    """Flags that contradict each other."""
    given = [*options.lora_weight, *([options.dit] if options.dit else [])]
    if options.metadata:
        if len(given) != 1:
            raise UsageError(
                f"--metadata reads one file, {len(given)} are given", cure="give one --lora_weight or --dit"
            )
        if options.save_path and options.save_path.suffix.lower() != ".json":
            raise UsageError("--metadata writes JSON", cure="end --save_path in .json, or leave it out to print")
        return
    if not options.lora_weight or not options.save_path:
        raise UsageError("export needs --lora_weight and --save_path", cure="wangen export --help")
    if options.dit:
        _refuse_merging(options)
    elif len(options.lora_weight) > 1:
        raise UsageError("one LoRA is converted at a time", cure="give one --lora_weight, or --dit to merge several")
    elif options.lora_multiplier:
        raise UsageError("--lora_multiplier belongs to merging", cure="give --dit, or leave it out")
    elif options.dtype == SCALED:
        raise UsageError("fp8_scaled is for whole checkpoints", cure="give --dtype float8_e4m3fn for a LoRA")
    elif not options.layout:
        raise UsageError("--layout is empty", cure="leave it out for comfyui")
    elif options.layout == ("peft",):
        if options.dtype == "float8_e4m3fn" and _is_file(options.save_path):
            raise UsageError("a peft file cannot tell the alpha that float8 needs",
                             cure="name a folder, which gets an adapter_config.json")  # fmt: skip
    elif not _is_file(options.save_path):
        raise UsageError("--save_path must end in .safetensors", cure="only --layout peft writes a folder")
    elif "peft" in options.layout and options.dtype == "float8_e4m3fn":
        raise UsageError("a peft file cannot tell the alpha that float8 needs", cure="write a peft folder by itself")


def _refuse_merging(options: Export) -> None:
    multipliers, loras = len(options.lora_multiplier), len(options.lora_weight)
    if multipliers and multipliers != loras:
        raise UsageError(f"{loras} --lora_weight and {multipliers} --lora_multiplier",
                         cure="give one multiplier per LoRA, or none")  # fmt: skip
    if options.layout != ("comfyui",):
        raise UsageError("a merged checkpoint keeps the names of --dit", cure="leave --layout out")
    if options.save_path and not _is_file(options.save_path):
        raise UsageError("--save_path must end in .safetensors")


def _is_file(path: Path) -> bool:
    return path.suffix.lower() == ENDING


# --- metadata


def _tell_metadata(options: Export) -> Report:
    path, flag = (options.dit, "--dit") if options.dit else (lora_file(options.lora_weight[0]), "--lora_weight")
    text = json.dumps(describe_file(path, flag), indent=2, ensure_ascii=False)
    if options.save_path:
        write_text(options.save_path, text + "\n")
        return Report(options.save_path.parent, f"the metadata of {path} are in {options.save_path}",
                      result={"file": options.save_path})  # fmt: skip
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a Windows console or pipe of the old kind
        text = json.dumps(json.loads(text), indent=2)
    print(text)  # noqa: T201
    return Report(None, f"the metadata of {path}")


# --- conversion


@dataclass(frozen=True)
class _Original:
    """The LoRA that is converted."""

    lora: Lora
    header: Header
    layout: str


def _convert(options: Export, path: Path, save_path: Path) -> Report:
    file = lora_file(path)
    original = _Original(read_lora(path), header := headers.read_header(file), layout_of(header.tensors))
    dtype: torch.dtype | None = getattr(torch, options.dtype) if options.dtype else None
    written = []
    for number, layout in enumerate(dict.fromkeys(options.layout)):
        target = save_path if number == 0 else save_path.with_name(f"{save_path.stem}-{layout}{save_path.suffix}")
        written.append(_write(original, layout, dtype, target, file))
        log.info("  %s: %s", layout, written[-1])
    ranks = sorted({weight.rank for weight in original.lora.values()})
    return Report(
        folder=written[0].parent,
        summary=f"{many(len(original.lora), 'module')} of rank {', '.join(map(str, ranks))}: "
        f"{original.layout} to {', '.join(dict.fromkeys(options.layout))}",
        inputs={"lora_weight": file, "identity": headers.identity(file), "layout": original.layout},
        counts={"modules": len(original.lora), "ranks": ranks},
        result={"files": written},
    )


def _write(original: _Original, layout: Layout, dtype: torch.dtype | None, target: Path, read: Path) -> Path:
    """Write one layout and return the path of its tensors."""
    stored = as_stored(original.lora, layout, dtype)
    fields = lora_fields(stored)
    folder = layout == "peft" and not _is_file(target)
    file = target / ADAPTER_FILE if folder else target
    require_writable(file.parent)
    refuse_overwriting(file, [read])
    tensors = name_tensors(stored, layout)
    require_space(file, sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()))
    metadata = _metadata(original, layout, stored)
    if layout == "diffusers":
        own = {DIFFUSERS_PREFIX + key: value for key, value in fields.items()}
        metadata[DIFFUSERS_METADATA] = json.dumps(own, sort_keys=True)
    safetensors_file.write(file, tensors, metadata)
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


# --- merging


def _merge(options: Export, dit: Path, save_path: Path) -> Report:
    multipliers = options.lora_multiplier or (1.0,) * len(options.lora_weight)
    sources = [
        Source(file := lora_file(path), headers.identity(file), read_lora(path), multiplier)
        for path, multiplier in zip(options.lora_weight, multipliers, strict=True)
    ]
    require_writable(save_path.parent)
    refuse_overwriting(save_path, [source.path for source in sources])
    merged = merge(dit, sources, save_path, options.dtype)
    for source, left_out in zip(sources, merged.left_out, strict=True):
        log.info("  LoRA %s at %g", source.path.name, source.multiplier)
        if left_out:
            more = " …" if len(left_out) > MAX_NAMES else ""
            log.warning("  %s: %s not in this checkpoint and left out: %s%s", source.path.name,
                        many(len(left_out), "module"), ", ".join(left_out[:MAX_NAMES]), more)  # fmt: skip
    return Report(
        folder=save_path.parent,
        summary=f"{save_path}: {many(merged.num_changed, 'weight')} of {many(merged.num_tensors, 'tensor')} changed",
        inputs={"dit": dit, "lora_weight": [source.path for source in sources],
                "lora_identity": [source.digest for source in sources], "lora_multiplier": list(multipliers)},
        counts={"changed": merged.num_changed, "tensors": merged.num_tensors, "bytes": merged.num_bytes,
                "left_out": [len(names) for names in merged.left_out]},
        result={"file": save_path, "left_out": list(merged.left_out)},
    )  # fmt: skip
