"""What both caching steps do: judge what the samples need, encode what is missing, remove what nobody needs, report.

The encoding itself is the step's. Needs no torch where nothing is to be encoded.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from wangen import profiles
from wangen.generator.bulk import bulk
from wangen.generator.errors import UsageError, WangenError, in_line, many
from wangen.generator.session import Report
from wangen.generator.steps import CacheStep
from wangen.generator.vae_twins import vae_of
from wangen.runtime.cache import Encoder, Folder, Kind, Recipe
from wangen.runtime.cache.leftovers import sweep
from wangen.runtime.cache.needed import DatasetNeeds, NeedsError
from wangen.runtime.cache.packs import FOLDER as PACKS
from wangen.runtime.needs import EntryWriter, Need, Work, count_states, wanted, writer_of
from wangen.runtime.samples import Sample, by_cache_folder, folders_left_out
from wangen.runtime.shards import Shard

log = logging.getLogger("wangen")

Encode = Callable[[Work], int]
"""Fills what is missing; returns how many entries it computed."""

Record = tuple[DatasetNeeds, Encoder, set[str]]
"""What the dataset needs of one kind in one folder: the note beside it, the encoder, and the keys."""


def fill(options: CacheStep, samples: Sequence[Sample], encoders: Mapping[Kind, Encoder], encode: Encode) -> Report:
    """Judge what the samples need, encode what is not valid, remove what they need no longer, and report.

    Args:
        options: of the caching step.
        samples: of the whole dataset.
        encoders: of every kind that the step makes.
        encode: fills what is missing.

    Raises:
        UsageError: `--shard` is none, or a number is out of range.
        WangenError: whatever `encode` raises; the cache folder cannot be written.
    """
    _refuse(options)
    several = options.starts_processes
    shard = Shard.parse(options.shard)
    folders = [Folder(path) for path in by_cache_folder(samples)]
    wants = {kind: wanted(folders, samples, kind) for kind in encoders}
    records = _extended(options, folders, wants, encoders)  # before they are judged: what is found then stays there
    with bulk():
        needs = [Need(sample, recipe, folder, folder.judge(recipe, encoders[kind]))
                 for kind in encoders for sample, recipe, folder in wants[kind]]  # fmt: skip
    again = options.recache or not options.skip_existing
    missing = [need for need in needs if (again or need.verdict.state != "valid") and shard.has(need.recipe)]
    valid = [] if again else [need for need in needs if need.verdict.state == "valid"]
    why = Counter(f"{need.recipe.kind}: {need.verdict.reason or '--recache'}" for need in missing)
    for reason, count in why.most_common():
        log.info("  %d to encode, %s", count, reason)
    if missing and several:
        from wangen.runtime.training.launcher import encode_together  # loads torch's launcher

        encode_together(options)
        rest = replace(options, gpus="1", recache=False, skip_existing=True)
        computed, removed = len(missing), fill(rest, samples, encoders, encode).counts["removed"]
    else:
        work = Work(encoders, missing, valid, partial(writer_of, again=again, packed=options.packed))
        with _taken_back(records, work) as counted:
            computed = _encode(options, shard, counted, encode)
        removed = _tidy(options, shard, records)
    places = (place for folder in folders for place in (folder.path, folder.path / PACKS))
    for place in (*places, options.report_dir or options.dataset.parent):
        sweep(place)
    return Report(
        folder=options.dataset.parent,
        summary=f"{computed} entries encoded, {len(valid)} already valid, {removed} unneeded removed",
        inputs={"dataset_config": options.dataset, "encoders": _describe(encoders),
                "part": f"{shard.index}/{shard.count}"},
        counts={"computed": computed, "from_cache": len(valid), "removed": removed,
                "found": count_states(need.verdict for need in needs), "why": dict(why)},
        result={"folders": [str(folder.path) for folder in folders]},
    )  # fmt: skip


@contextmanager
def _taken_back(records: Iterable[Record], work: Work) -> Iterator[Work]:
    """Around encoding: what is refused before its first entry leaves the dataset's encoders as they were.

    Else all that they have made would count as stale, for the sake of entries that are not there.
    """
    writers: list[EntryWriter] = []

    def opened(folder: Path) -> EntryWriter:
        writers.append(work.open_writer(folder))
        return writers[-1]

    try:
        yield replace(work, open_writer=opened)
    except WangenError:
        if not any(writer.num_bytes for writer in writers):
            for record, _, _ in records:
                record.take_back()
        raise


def _encode(options: CacheStep, shard: Shard, work: Work, encode: Encode) -> int:
    """Encode in this process, and with `--packed` move what is valid into packs; how many entries were computed."""
    computed = encode(work) if work.missing else 0
    if options.packed:
        from wangen.runtime.cache.packing import fold_files  # numpy

        fold_files(need.verdict.entry for need in work.valid if shard.has(need.recipe))
    return computed


def _tidy(options: CacheStep, shard: Shard, records: Iterable[Record]) -> int:
    """Remove what the dataset needs no longer, and nobody else; how many entries that were."""
    if options.keep_cache or shard.count > 1:
        return 0
    shared = folders_left_out(options)  # other blocks need entries there that were not looked at
    removed = of_others = 0
    unclear: list[NeedsError] = []
    for record, encoder, keys in records:
        if record.folder.path in shared:
            continue
        try:
            count = record.reduce(keys, encoder)
        except NeedsError as error:  # what is encoded is good all the same
            unclear.append(error)
            continue
        removed += count
        of_others += count if record.encoder_before not in (None, encoder) else 0
    if unclear:
        log.warning("  what is not needed any more stays: %s", in_line(unclear[0]))
    if of_others:
        log.warning("  removed %s of the weights or the precision before: to keep those of several models, give "
                    "--keep_cache", many(of_others, "entry", "entries"))  # fmt: skip
    return removed


def _refuse(options: CacheStep) -> None:
    """Numbers that no run can have."""
    for name, least in (("batch_size", 1), ("num_workers", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} must be {least} or more, got {value}", cure=f"leave --{name} out")


def _extended(
    options: CacheStep,
    folders: Iterable[Folder],
    wants: Mapping[Kind, Iterable[tuple[Sample, Recipe, Folder]]],
    encoders: Mapping[Kind, Encoder],
) -> list[Record]:
    """The dataset's needs of every folder and kind, which are written there now."""
    vae = vae_of(profiles.model(options.task)) if options.task else ""
    records: list[Record] = []
    for folder in folders:
        for kind, encoder in encoders.items():
            keys = {recipe.key(encoder) for _, recipe, of in wants[kind] if of is folder}
            needs = DatasetNeeds(folder, options.dataset, kind, vae if kind == "latent" else "")
            needs.extend(keys, encoder)
            records.append((needs, encoder, keys))
    return records


def _describe(encoders: Mapping[Kind, Encoder]) -> dict[str, str]:
    return {kind: f"{encoder.identity[:16]} in {encoder.dtype}" for kind, encoder in encoders.items()}
