"""`export`: adapters and checkpoints in other layouts and dtypes, LoRAs merged, and what a header says.

Torch is imported inside the functions that need it: what a header says is told without it, in a moment.
"""

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from wangen.generator.errors import UsageError, many
from wangen.generator.experts import expert_of, lora_of_the_other
from wangen.generator.files import write_text
from wangen.generator.formats import WEIGHT_SUFFIXES
from wangen.generator.lora_config import is_safetensors, lora_file, lora_identity
from wangen.generator.session import Report
from wangen.generator.steps import Export
from wangen.runtime.lora_folder import find_lora
from wangen.runtime.lora_metadata import describe_file

if TYPE_CHECKING:
    from wangen.runtime.transformer_layout import TransformerLayout

log = logging.getLogger("wangen")

MAX_NAMES = 8


def run(options: Export) -> Report:
    """Do one of the four.

    Raises:
        WangenError: a file is of another kind, a LoRA does not fit, the disk is full or refuses.
    """
    _refuse(options)
    loras = tuple(find_lora(path, "--lora_weight") for path in options.lora_weight)
    options = dataclasses.replace(options, lora_weight=loras)
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
        _refuse_beside_metadata(options)
        return
    converts_dit = options.dit is not None and bool(options.layout)
    if not (options.lora_weight or converts_dit) or not options.save_path:
        needed = {"--lora_weight": options.lora_weight or converts_dit, "--save_path": options.save_path}
        missing = " and ".join(flag for flag, value in needed.items() if not value)
        cure = "wangen export --help"
        if options.dit and not options.lora_weight and not converts_dit:
            cure = "give a LoRA to merge, or --layout original or diffusers to convert --dit itself"
        raise UsageError(f"export needs {missing}", cure=cure)
    if options.dit:
        _refuse_whole(options, options.save_path)
    elif len(options.lora_weight) > 1:
        raise UsageError("one LoRA is converted at a time", cure="give one --lora_weight, or --dit to merge several")
    elif options.lora_multiplier:
        raise UsageError("--lora_multiplier belongs to merging", cure="give --dit, or leave it out")
    elif options.dtype == "fp8_scaled":
        raise UsageError("fp8_scaled is for whole checkpoints", cure="give --dtype float8_e4m3fn for a LoRA")
    elif "original" in options.layout:
        raise UsageError("--layout original is for whole transformers",
                         cure="leave it out: in comfyui a LoRA has the official names")  # fmt: skip
    elif options.layout == ("peft",):
        if options.dtype == "float8_e4m3fn" and is_safetensors(options.save_path):
            raise UsageError("a peft file cannot tell the alpha that float8 needs",
                             cure="name a folder, which gets an adapter_config.json")  # fmt: skip
    elif not is_safetensors(options.save_path):
        raise UsageError("--save_path must end in .safetensors", cure="only --layout peft writes a folder")
    elif "peft" in options.layout and options.dtype == "float8_e4m3fn":
        raise UsageError("a peft file cannot tell the alpha that float8 needs", cure="write a peft folder by itself")


def _refuse_beside_metadata(options: Export) -> None:
    """What only writing weights would read."""
    given = [f"--{name}" for name in ("lora_multiplier", "layout", "dtype") if getattr(options, name)]
    if options.overwrite and not options.save_path:
        given.append("--overwrite")
    if given:
        raise UsageError(f"--metadata reads a header and converts nothing: {', '.join(given)} would do nothing",
                         cure="leave out either")  # fmt: skip


def _refuse_whole(options: Export, save_path: Path) -> None:
    multipliers, loras = len(options.lora_multiplier), len(options.lora_weight)
    if multipliers and multipliers != loras:
        raise UsageError(f"{loras} --lora_weight and {multipliers} --lora_multiplier",
                         cure="give one multiplier per LoRA, or none")  # fmt: skip
    layout = _whole_layout(options)
    if options.layout and layout is None:
        raise UsageError("a whole transformer is written in one layout, original or diffusers",
                         cure="give one of the two, or merge without --layout to keep the names")  # fmt: skip
    if layout == "diffusers" and options.dtype in ("float8_e4m3fn", "fp8_scaled"):
        raise UsageError("diffusers loads no transformer in 8 bits", cure="give --layout original or another --dtype")
    folder = layout == "diffusers" and save_path.suffix.lower() not in WEIGHT_SUFFIXES
    if not folder and not is_safetensors(save_path):
        raise UsageError("--save_path must end in .safetensors",
                         cure="name such a file, or with --layout diffusers a folder")  # fmt: skip


def _whole_layout(options: Export) -> "TransformerLayout | None":
    """The layout of a whole transformer that is asked for; None: none, or not one alone."""
    if options.layout in (("original",), ("comfyui",)):  # ComfyUI reads the official names
        return "original"
    return "diffusers" if options.layout == ("diffusers",) else None


def _tell_metadata(options: Export) -> Report:
    path, flag = (options.dit, "--dit") if options.dit else (lora_file(options.lora_weight[0]), "--lora_weight")
    text = json.dumps(describe_file(path, flag), indent=2, ensure_ascii=False)
    if options.save_path:
        if options.save_path.exists() and not options.overwrite and not _is_told(options.save_path):
            raise UsageError("a file that does not hold what --metadata tells is there and would be replaced",
                             where=str(options.save_path),
                             cure="give another --save_path, or --overwrite as well")  # fmt: skip
        write_text(options.save_path, text + "\n")
        return Report(options.save_path.parent, f"the metadata of {path} are in {options.save_path}",
                      result={"file": options.save_path})  # fmt: skip
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a Windows console or pipe of the old kind
        text = json.dumps(json.loads(text), indent=2)
    print(text)  # noqa: T201
    return Report(None, f"the metadata of {path}")


def _is_told(path: Path) -> bool:
    """Whether a file is what `--metadata` made."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"kind", "tensors", "metadata"} <= found.keys()


def _convert(options: Export, path: Path, save_path: Path) -> Report:
    from wangen.runtime.convert import convert

    file = lora_file(path)
    layouts = tuple(dict.fromkeys(layout for layout in options.layout if layout != "original")) or ("comfyui",)
    converted = convert(path, layouts, options.dtype, save_path, overwrite=options.overwrite)
    for layout, written in converted.files.items():
        log.info("  %s: %s", layout, written)
    ranks = ", ".join(map(str, converted.ranks)) or "full"
    return Report(
        folder=save_path.parent,
        summary=f"{many(converted.num_modules, 'module')} of rank {ranks}: {converted.layout} to "
        f"{', '.join(converted.files)}",
        inputs={"lora_weight": file, "identity": lora_identity(path), "layout": converted.layout},
        counts={"modules": converted.num_modules, "ranks": converted.ranks},
        result={"files": list(converted.files.values())},
    )


def _merge(options: Export, dit: Path, save_path: Path) -> Report:
    from wangen.runtime.lora import read_lora
    from wangen.runtime.merge import Source, merge

    multipliers = options.lora_multiplier or (1.0,) * len(options.lora_weight)
    sources = [
        Source(lora_file(path), lora_identity(path), read_lora(path), multiplier)
        for path, multiplier in zip(options.lora_weight, multipliers, strict=True)
    ]
    own = expert_of(dit, "--dit")
    for path in options.lora_weight if own else ():
        if warning := lora_of_the_other(path, "--lora_weight", own):
            log.warning("  %s, and is merged into the %s-noise one", warning, own)
    layout = _whole_layout(options)
    merged = merge(dit, sources, save_path, options.dtype, layout=layout, overwrite=options.overwrite)
    for source, left_out in zip(sources, merged.left_out, strict=True):
        log.info("  LoRA %s at %g", source.path.name, source.multiplier)
        if left_out:
            more = " …" if len(left_out) > MAX_NAMES else ""
            log.warning("  %s: %s not in this checkpoint and left out: %s%s", source.path.name,
                        many(len(left_out), "module"), ", ".join(left_out[:MAX_NAMES]), more)  # fmt: skip
    counted = many(merged.num_tensors, "tensor")
    done = f"{many(merged.num_changed, 'weight')} of {counted} changed" if sources else counted
    return Report(
        folder=save_path.parent,
        summary=f"{merged.file}: {done}{f' in the layout {layout}' if layout else ''}",
        inputs={"dit": dit, "lora_weight": [source.path for source in sources],
                "lora_identity": [source.digest for source in sources], "lora_multiplier": list(multipliers)},
        counts={"changed": merged.num_changed, "tensors": merged.num_tensors, "bytes": merged.num_bytes,
                "left_out": [len(names) for names in merged.left_out]},
        result={"file": merged.file, "dtype": merged.dtype or "as before", "layout": layout or "as before",
                "left_out": list(merged.left_out)},
    )  # fmt: skip
