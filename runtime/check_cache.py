"""`check_cache`: which entries are valid, stale, missing or corrupt. Needs no torch."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wangen.generator import headers
from wangen.generator.bulk import bulk
from wangen.generator.errors import bytes_text, many
from wangen.generator.session import Report
from wangen.generator.steps import CheckCache
from wangen.generator.tomls import DatasetEntry
from wangen.profiles import Model
from wangen.runtime.cache import EDIT_NAMES, NO_ENCODER, TEXT_KINDS, Encoder, Folder, Kind, decoded_by
from wangen.runtime.cache.leftovers import repair
from wangen.runtime.decoders.choice import DECODERS
from wangen.runtime.models import model_of_cache, text_encoder_identity, vae_identity
from wangen.runtime.needs import (
    WORDS,
    Need,
    count_states,
    encoders_before,
    expected_encoder,
    foreign_latents,
    judge,
    latent_kinds,
    listing,
    problem,
    step_for,
)
from wangen.runtime.rocm import vae_dtype
from wangen.runtime.samples import Sample, by_cache_folder, read_samples

log = logging.getLogger("wangen")

Encoders = Mapping[Kind, Encoder | None]


@dataclass(frozen=True)
class Row:
    """A line of the table: what one block of the TOML needs of one kind."""

    dataset: str
    kind: Kind
    needs: Sequence[Need]

    @property
    def states(self) -> dict[str, int]:
        """How many entries are in each state."""
        return count_states(need.verdict for need in self.needs)

    @property
    def num_bytes(self) -> int:
        """Size of the valid entries."""
        entries = (need.verdict.entry for need in self.needs if need.verdict.state == "valid")
        return sum(entry.num_bytes for entry in entries if entry)

    def facts(self) -> dict[str, Any]:
        """The line for the report; coverage is in percent."""
        coverage = 100 * self.states["valid"] / len(self.needs)
        return {"dataset": self.dataset, "kind": self.kind, **self.states, "coverage": round(coverage, 1),
                "bytes": self.num_bytes}  # fmt: skip


@bulk()
def run(options: CheckCache) -> Report:
    """Judge every entry that the caching steps would make for the task; fails unless all are valid.

    Raises:
        WangenError: the dataset or a weight file cannot be read; it is open which encoder's entries training takes.
    """
    model = model_of_cache(options.task, vae=options.vae)
    samples = read_samples(options, model, trust_memo=not options.deep)
    folders = [Folder(path, deep=options.deep) for path in by_cache_folder(samples)]
    if options.repair:
        _repair(folders)
    encoders = _encoders(options, model, folders, samples)
    rows = _rows(folders, samples, encoders)
    needs = _unique(need for row in rows for need in row.needs)
    bad = [need for need in needs if need.verdict.state != "valid"]
    foreign = foreign_latents(needs, model, options.dataset)
    problems = [problem(need) for need in bad] or _others(options, folders, samples, encoders)
    problems += [foreign] if foreign else []
    _print(rows, bad, problems)
    named = _by_name(model, needs)
    if named:
        log.info("  valid: %s", ", ".join(f"{name} {number}" for name, number in named["by_name"].items()))
    _say_how_deep(options.deep)
    whole = Row("", "latent", needs)
    return Report(
        folder=options.dataset.parent,
        summary=f"{whole.states['valid']} entries valid ({bytes_text(whole.num_bytes)}), {len(problems)} not: "
        + (_to_run(options, bad) if problems else "training finds all it needs"),
        inputs={"dataset_config": options.dataset, "samples": len(samples)},
        counts={kind: count_states(need.verdict for need in needs if need.recipe.kind == kind) for kind in encoders},
        result={**named, "problems": problems, "bytes": whole.num_bytes,
                "datasets": [row.facts() for row in rows], "why": dict(_reasons(bad))},
        ok=not problems,
    )  # fmt: skip


def _by_name(model: Model, needs: Sequence[Need]) -> dict[str, Any]:
    """Of models that are asked through a template: how many valid entries hold each of the six tensors of an item."""
    if model.prompt is None:
        return {}
    valid = Counter(need.recipe.kind for need in needs if need.verdict.state == "valid")
    return {"by_name": {name: valid[kind] for name, kind in EDIT_NAMES.items()}}


def _encoders(options: CheckCache, model: Model, folders: list[Folder], samples: list[Sample]) -> Encoders:
    """Every kind that is needed, with the encoder to judge against; CLIP's views only when they were asked for."""
    encoders = {kind: _encoder(options, folders, samples, kind) for kind in latent_kinds(model, clip=True) + TEXT_KINDS}
    if "clip" in encoders and not options.clip and encoders["clip"] is None:
        del encoders["clip"]
        log.warning("  no CLIP views: %s trains without its image branch", model.name)
    return encoders


def _encoder(options: CheckCache, folders: list[Folder], samples: list[Sample], kind: Kind) -> Encoder | None:
    """The encoder to judge a kind against: what the flags name, and for the rest what training would take.

    No flag names the decoder: it is that of the entries which are there.
    """
    if kind == "mask":
        return NO_ENCODER
    dtype: str | None
    if kind == "clip":
        identity = headers.identity(options.clip, "--clip") if options.clip else None
        dtype = options.clip_dtype
    elif kind in TEXT_KINDS:
        fp8, model = options.fp8_t5, model_of_cache(options.task)
        identity = text_encoder_identity(options.t5, options.tokenizer, fp8=fp8, model=model) if options.t5 else None
        dtype = options.t5_dtype
    else:
        identity = vae_identity(options.vae, options.vae_tile) if options.vae else None
        dtype = vae_dtype(options.vae_dtype)
    if identity and kind not in TEXT_KINDS:
        before = {encoder.identity for encoder in encoders_before(folders, samples, kind, options.dataset)}
        decoded = (decoded_by(identity, decoder) for decoder in DECODERS)
        identity = next((one for one in decoded if one in before), identity)
    return expected_encoder(folders, samples, kind, options.dataset, identity=identity, dtype=dtype)


def _rows(folders: list[Folder], samples: list[Sample], encoders: Encoders) -> list[Row]:
    """One for each block of the TOML and each kind of which it needs something."""
    blocks: dict[int, list[Sample]] = {}
    for sample in samples:
        blocks.setdefault(id(sample.entry), []).append(sample)
    names = _names([members[0].entry for members in blocks.values()])
    rows = [
        Row(name, kind, judge(folders, members, kind, encoder))
        for name, members in zip(names, blocks.values(), strict=True)
        for kind, encoder in encoders.items()
    ]
    return [row for row in rows if row.needs]


def _names(entries: Sequence[DatasetEntry]) -> list[str]:
    """What each block is called: by its folder, and where two have one name also by the folder above and the media."""
    places = [entry.manifest or entry.directory for entry in entries]
    sizes = ["{}x{}".format(*entry.resolution) for entry in entries]
    counts = Counter((place.name, size) for place, size in zip(places, sizes, strict=True))
    return [
        f"{place.parent.name}/{place.name}/{entry.media}s {size}"
        if counts[place.name, size] > 1
        else f"{place.name} {size}"
        for place, size, entry in zip(places, sizes, entries, strict=True)
    ]


def _unique(needs: Iterable[Need]) -> list[Need]:
    """Each entry once: blocks that share a folder share entries."""
    return list({(need.folder.path, need.recipe.content_key): need for need in needs}.values())


def _others(options: CheckCache, folders: list[Folder], samples: list[Sample], encoders: Encoders) -> list[str]:
    """One line for each kind of which training would take entries of another encoder than was judged against."""
    lines = []
    for kind, judged in encoders.items():
        taken = expected_encoder(folders, samples, kind, options.dataset) if kind != "mask" else judged
        if taken and judged and taken != judged:
            lines.append(
                f"every {kind} of {judged.identity[:8]} in {judged.dtype} is there, but training takes those of the "
                f"last caching run, {taken.identity[:8]} in {taken.dtype}"
            )
    return lines


def _repair(folders: Iterable[Folder]) -> None:
    for folder in folders:
        corrupt, left = repair(folder)
        entries, files = many(corrupt, "corrupt entry", "corrupt entries"), many(left, "file")
        log.info("  %s: removed %s and %s of killed writers", folder.path.name, entries, files)


def _print(rows: Sequence[Row], bad: Sequence[Need], problems: Sequence[str]) -> None:
    width = max([len(row.dataset) for row in rows] + [len("dataset")])
    log.info("  %-*s  %-25s %7s %7s %7s %7s %9s %11s", width, "dataset", "kind", "valid", "stale", "missing", "corrupt",
             "coverage", "size")  # fmt: skip
    for row in rows:
        facts = row.facts()
        log.info("  %-*s  %-25s %7d %7d %7d %7d %7.1f %% %11s", width, row.dataset, row.kind, facts["valid"],
                 facts["stale"], facts["missing"], facts["corrupt"], facts["coverage"],
                 bytes_text(facts["bytes"]))  # fmt: skip
    for reason, count in _reasons(bad).most_common():
        log.info("  %d %s", count, reason)
    for line in listing(problems):
        log.error("%s", line)


def _reasons(bad: Iterable[Need]) -> Counter[str]:
    """How often each state and its cause occur, in words."""
    return Counter(f"{WORDS[need.recipe.kind]} {need.verdict.state}: {need.verdict.reason}" for need in bad)


def _say_how_deep(deep: bool) -> None:
    if os.name == "nt" and not deep:
        log.info("  sizes and times were compared: on Windows an edit that keeps both is seen only with --deep")
    elif deep:
        log.info("  every payload and every source was read: on Windows the only way to see an edit that keeps size "
                 "and time")  # fmt: skip


def _to_run(options: CheckCache, bad: Iterable[Need]) -> str:
    bad = list(bad)
    steps = sorted({step_for(need.recipe.kind) for need in bad})
    again = f"run {' and '.join(steps) or 'cache_latents and cache_text'} again"
    again += " with --clip" if any(need.recipe.kind == "clip" for need in bad) else ""
    # The steps judge headers alone: a payload that only --deep sees would stay.
    damaged = options.deep and any(need.verdict.state == "corrupt" for need in bad)
    return f"run check_cache again with --deep --repair, then {again}" if damaged else again
