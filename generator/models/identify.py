"""`wangen models identify`: what a file or folder is, from its header alone."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from wangen import profiles
from wangen.generator.bundle import files_below
from wangen.generator.errors import WangenError, bytes_text, many, printable
from wangen.generator.headers import INDEX, PIPELINE, read_header, shards
from wangen.generator.kinds import KINDS, Facts, examine
from wangen.generator.models.adapters import AdapterFacts, describe_lora

PIPELINE_FOLDERS = ("transformer", "transformer_2", "vae", "text_encoder", "image_encoder")
"""The models of a diffusers pipeline, each a folder."""

TOLD = ("modelspec.", "general.", "ss_base_model_version", "ss_network_", "ss_steps", "ss_training_comment")
"""The beginnings of metadata keys that are shown; `--json` has all."""

ENDINGS = (".safetensors", ".gguf", ".pth", ".bin", ".pt")
"""How the names of weight files end: what is looked at in a folder that is not one model's."""

_NUM_TOLD, _MAX_TEXT = 16, 100

Answer = tuple[Facts, AdapterFacts | None] | WangenError
"""What a file is, with the facts of an adapter, or why nobody can say."""

_ADAPTERS = ("lora", "lora-other")


def run(paths: Sequence[Path], as_json: bool) -> int:
    """Say what each file is.

    Args:
        paths: weight files, shards, indexes or folders; the shards of one model are shown once.
        as_json: print one list for programs.

    Returns:
        1 when one of them cannot be read or is broken; the others are shown all the same.
    """
    answers: dict[tuple[Any, ...], tuple[Path, Answer]] = {}
    for path in _spread(paths):
        answer = _look(path)
        same = (answer.found, answer.where) if isinstance(answer, WangenError) else answer[0].files
        answers.setdefault(same, (path, answer))
    found = [*answers.values()]
    if as_json:
        click.echo(json.dumps([_plain(path, answer) for path, answer in found], indent=2))
    else:
        for path, answer in found:
            click.echo(printable(str(path)))
            for line in _lines(answer):
                click.echo(f"  {line}")
    return int(any(isinstance(answer, WangenError) for _, answer in found))


def parameters_text(number: int) -> str:
    """A number of parameters for people.

    >>> parameters_text(14_288_491_584), parameters_text(126_892_531), parameters_text(960)
    ('14.29 B', '126.9 M', '960')
    """
    for factor, unit, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "k", 1)):
        if number >= factor:
            return f"{number / factor:.{digits}f} {unit}"
    return str(number)


def _spread(paths: Sequence[Path]) -> Iterator[Path]:
    """The paths, with every model of a pipeline for its folder, and every weight file below a folder of many."""
    for path in paths:
        parts = [path / name for name in PIPELINE_FOLDERS if (path / name).is_dir()]
        if (path / PIPELINE).is_file() and parts:
            yield from parts
        elif path.is_dir():
            inside = [path / name for name in files_below(path) if name.suffix in ENDINGS or INDEX.fullmatch(name.name)]
            yield from [path] if _is_model(path, inside) else inside or [path]
        else:
            yield path


def _is_model(folder: Path, inside: Sequence[Path]) -> bool:
    """Whether a folder is one model's: its files are all the weight files below it."""
    try:
        return set(shards(folder)) == {path for path in inside if path.suffix in ENDINGS}
    except WangenError:
        return False


def _look(path: Path) -> Answer:
    try:
        facts = examine(path)
        return facts, describe_lora(facts.files[0], read_header(path)) if facts.kind in _ADAPTERS else None
    except WangenError as error:
        return error


def _lines(answer: Answer) -> Iterator[str]:
    if isinstance(answer, WangenError):
        yield from str(answer).splitlines()
        return
    facts, adapter = answer
    yield facts.words
    if facts.hint:
        yield f"({facts.hint})"
    layout = adapter.layout if adapter else facts.layout
    names = f", {layout} names" if layout else ""
    yield _row("format", f"{facts.format}{names}")
    yield _row("parameters", f"{parameters_text(facts.num_parameters)} ({facts.num_parameters:,})")
    dtypes = ", ".join(f"{dtype} {bytes_text(size)}" for dtype, size in facts.dtypes.items())
    yield _row("dtypes", dtypes + (f"; quantised: {facts.quantisation}" if facts.quantisation else ""))
    yield _row("size", f"{bytes_text(facts.num_bytes)} in {many(len(facts.files), 'file')}")
    if adapter:
        for line in adapter.lines():
            yield _row(adapter.kind, line)
    if facts.sizes:
        yield _row("sizes", ", ".join(f"{name} {value}" for name, value in facts.sizes.items()))
    yield _row("fits", _fits(_flag(facts, adapter), facts))
    told = [(key, text) for key, text in sorted(facts.metadata.items()) if key.startswith(TOLD) and text]
    for key, text in told[:_NUM_TOLD]:
        yield _row("metadata", f"{_short(key)}: {_short(text)}")


def _flag(facts: Facts, adapter: AdapterFacts | None) -> str:
    """What takes such a file; empty for one that is refused."""
    if adapter is None:
        return KINDS[facts.kind][1]
    return "" if adapter.unfit else KINDS["lora"][1]


def _fits(flag: str, facts: Facts) -> str:
    """What takes a file: the flag, and the tasks whose sizes it has; those of a LoRA are told with it."""
    if not flag:
        return "nothing in wangen takes it"
    if facts.kind in _ADAPTERS:
        return flag
    tasks = facts.profiles
    if "high-noise" in facts.hint:
        flag, tasks = "--dit_high_noise", tuple(task for task in tasks if profiles.model(task).experts)
    return f"{flag} of {', '.join(tasks)}" if tasks else f"{flag}; no known task has these sizes"


def _row(name: str, text: str) -> str:
    return f"{name:<10}  {text}"


def _short(text: str) -> str:
    """Metadata are anybody's text: one short line."""
    return printable(text) if len(text) <= _MAX_TEXT else f"{printable(text[:_MAX_TEXT])}…"


def _plain(path: Path, answer: Answer) -> dict[str, Any]:
    """What a program reads."""
    if isinstance(answer, WangenError):
        error = {"found": answer.found, "where": answer.where, "do": answer.cure}
        return {"path": str(path), "error": error}
    facts, adapter = answer
    fields = {
        "kind": facts.kind,
        "words": facts.words,
        "hint": facts.hint,
        "flag": _flag(facts, adapter),
        "profiles": facts.profiles,
        "format": facts.format,
        "layout": adapter.layout if adapter else facts.layout,
        "num_parameters": facts.num_parameters,
        "dtypes": dict(facts.dtypes),
        "quantisation": facts.quantisation,
        "num_bytes": facts.num_bytes,
        "files": [str(file) for file in facts.files],
        "sizes": dict(facts.sizes),
        "metadata": dict(facts.metadata),
    }
    if adapter:
        fields["lora"] = adapter.fields()
    return {"path": str(path), **fields}
