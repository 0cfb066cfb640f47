"""`wangen preprocess`: long videos -> exact training clips, manifests, and a page that shows them all.

The way of a video: a prompt (`videos`) -> digest and facts -> signals, frame by frame (`analysis`) -> shots, windows,
a verdict on each (`candidates`) -> clip files (`cutting`) -> `train.jsonl`, `val.jsonl`, `dropped.jsonl` (`manifests`)
and the contact sheet (`sheet`). What is known of videos and clips stands in records, so that a run that was killed goes
on, and ends with the same bytes as one that was not.
"""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from wangen.generator.cautions import clip_cautions
from wangen.generator.dataset import Problem
from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.files import is_file, remove, write_text
from wangen.generator.footage import PAGES, SETTINGS, clip_stem, edited_manifests, text_digest, written_digests
from wangen.generator.install import require_library
from wangen.generator.lock import hold
from wangen.generator.prepare_steps import Preprocess
from wangen.generator.session import Report
from wangen.generator.table import options as options_of
from wangen.runtime.preprocess.analysis import find_ffmpeg
from wangen.runtime.preprocess.candidates import Window, held_out, reason_counts
from wangen.runtime.preprocess.cutting import is_made, stale, tidy
from wangen.runtime.preprocess.estimate import estimate, require_space
from wangen.runtime.preprocess.form import Form, Place, num_workers, read_form
from wangen.runtime.preprocess.manifests import Outcome, write_manifests
from wangen.runtime.preprocess.sheet import write_sheet
from wangen.runtime.preprocess.videos import NO_PROMPT, Known, Video, find_videos, name_in
from wangen.runtime.preprocess.work import cut_all, watch
from wangen.runtime.sources import read_sources

log = logging.getLogger("wangen")

MAX_SAID = 20
"""Problems that are said one by one."""

_CURES = {
    "short": "give fewer --frames, or where a cut is seen that is none a higher --cut_threshold",
    "outside": "mend start_s and end_s of the labels",
    "freeze": "give a higher --max_freeze, or --keep_all",
    "black": "give a higher --max_black, or --keep_all",
    "blur": "give a higher --max_blur, or --keep_all",
    "motion": "give a lower --min_motion, or --keep_all",
    "copy": "give a lower --min_difference, or --keep_all",
}
"""What to change by the reason for which windows are left out."""

_SILENT = {"dry_run", "num_workers", "config_file", "log_file", "report_dir", "lock", "output"}
"""Flags that decide nothing of what is written."""


def run(options: Preprocess) -> Report:
    """Make the clips of a folder of videos.

    A video that cannot be used is listed and the others go on; the report is not ok when no clip could be made.

    Raises:
        UsageError: a flag is wrong.
        WangenError: nothing can be used, ffmpeg is missing, or the disk is too small.
    """
    form, place = read_form(options), Place(options.output)
    _refuse_foreign(place)
    if not options.videos.exists() and _is_done(options, place):
        log.warning("  the footage is not there any more: %s; what was made of it stays", options.videos)
        return Report(folder=place.folder, summary="all clips are there, made by an earlier run with the same flags")
    require_library("av")
    find_ffmpeg()
    videos, problems = find_videos(options)
    if options.dry_run:
        _plan(videos, problems, form, place, options)
        return Report(folder=None, summary="nothing was written (--dry_run)")
    with hold(place.records / "lock"):
        place.make()
        known = _plan(videos, problems, form, place, options)
        _say_changes(options, place)
        outcome = _make(known, problems, form, place, options)
    counts = {name: len(getattr(outcome, name)) for name in ("train", "val", "dropped", "copies", "problems")}
    if not outcome.train:
        log.error("  %s", _why_none(outcome))
    summary = f"{many(counts['train'], 'clip')} to train on, {counts['val']} to validate, {counts['dropped']} left out"
    return Report(
        folder=place.folder,
        summary=summary + (f", {many(counts['problems'], 'problem')}" if problems else ""),
        inputs={"videos": {item.video.name: item.source.digest for item in known}},
        counts={"videos": len(known), **counts, "made": outcome.made, "reasons": reason_counts(outcome.dropped)},
        result={"form": form, **{name: place.folder / name for name in PAGES}},
        ok=bool(outcome.train),
    )


def _plan(
    videos: Sequence[Video], problems: list[Problem], form: Form, place: Place, options: Preprocess
) -> list[Known]:
    """The videos that can be read; what they cost is said and compared with the disk."""
    sources, errors = read_sources([video.path for video in videos], place.records)
    problems += map(_problem, errors)
    _say(problems, options.videos)
    known = [Known(video, sources[video.path]) for video in videos if video.path in sources]
    if not known:
        raise WangenError("no video can be used", where=str(options.videos), cure="mend what is listed above")
    for caution in clip_cautions({item.video.path: item.source.facts for item in known}):
        log.warning("  %s", caution)
    most = estimate(known, form, num_workers(options))
    log.info("  %s with %s", most.words(form), many(num_workers(options), "worker"))
    require_space(most, form, place)
    return known


def _make(known: Sequence[Known], problems: list[Problem], form: Form, place: Place, options: Preprocess) -> Outcome:
    """Find the windows, cut the clips, and write what is said of them."""
    unique, copies = _without_copies(known)
    windows, errors = watch(unique, form, place, options)
    unwatched = list(map(_problem, errors))
    good = [window for window in windows if window.signals and (options.keep_all or not window.reasons)]
    dropped = [window for window in windows if not window.signals or (window.reasons and not options.keep_all)]
    old = stale(good, form, place)
    unread = [problem for problem in (*problems, *unwatched)
              if problem.found != NO_PROMPT and problem.path != options.labels]  # fmt: skip
    _refuse_loss(unread, windows, old, place)
    if old or not all(is_made(window, form, place) for window in good):
        _refuse_edited(place)
        for manifest in place.manifests:  # a run that is stopped meanwhile must not leave what it made untrue
            remove(manifest)
    if gone := tidy(good, form, place):
        log.info("  %s of other videos or settings removed", many(gone, "clip"))
    made, uncut = cut_all(good, form, place, options)
    late = [*unwatched, *map(_problem, uncut.values())]
    _say(late, options.videos)
    problems += late
    good = [window for window in good if window.footage.source.digest not in uncut]
    val_digests = held_out([window.footage.source.digest for window in good], options.val_share, options.seed)
    if good and options.val_share and not val_digests:
        log.warning("  all clips are of one video: val.jsonl is empty, as validation must be of videos not trained on")
    val = [window for window in good if window.footage.source.digest in val_digests]
    train = [window for window in good if window.footage.source.digest not in val_digests]
    outcome = Outcome(train, val, dropped, copies, problems, made)
    write_manifests(outcome, form, place, options.videos)
    write_sheet(outcome, form, place)
    return outcome


def _why_none(outcome: Outcome) -> WangenError:
    """What mostly stood in the way where no clip could be made, and what to change."""
    reasons = reason_counts(outcome.dropped)
    if not reasons:
        return WangenError("no clip could be made: no video can be read to its end", cure="mend what is listed above")
    most = next(iter(reasons))
    said = next(reason for window in outcome.dropped for reason in window.reasons if reason.startswith(f"{most}:"))
    return WangenError(f"no clip could be made; the commonest reason, for {reasons[most]} of "
                       f"{many(len(outcome.dropped), 'window')}: {said}",
                       cure=f"{_CURES[most]}; dropped.jsonl has all reasons")  # fmt: skip


def _refuse_foreign(place: Place) -> None:
    """Refuse to write over manifests that no run of this step wrote.

    Raises:
        UsageError: one is there.
    """
    there = [path for path in place.manifests if path.exists()]
    if there and not place.settings.exists():
        raise UsageError(f"{there[0].name} is there already, and this step did not write it", where=str(there[0]),
                         cure="give another --output, or move it away")  # fmt: skip


def _refuse_edited(place: Place) -> None:
    """Refuse to change clips that a manifest names which somebody edited.

    Raises:
        UsageError: one was edited.
    """
    if edited := edited_manifests(place.folder):
        raise UsageError(f"{edited[0].name} was edited by hand, and clips that it may name have to be made or removed",
                         where=str(edited[0]), cure="move it away, run the same line again, then take from it what you "
                         "want")  # fmt: skip


def _refuse_loss(unread: Sequence[Problem], windows: Sequence[Window], old: Sequence[str], place: Place) -> None:
    """Refuse to remove the clips of a video that cannot be read this time; the split would change with them.

    Args:
        unread: what cannot be read: a video, or its caption.
        windows: of the videos that can be.
        old: names of the clips that would be removed.
        place: where they are.

    Raises:
        WangenError: there are such clips.
    """
    read = {window.footage.source.digest[:8] for window in windows}
    parts = (name.rsplit("-", 2) for name in old if place.clip(name).is_file())
    lost = Counter(stem for stem, *rest in parts if rest and rest[0] not in read)
    for problem in unread:
        if number := lost[clip_stem(problem.path.stem)]:
            raise WangenError(
                f"{many(number, 'clip')} of an earlier run would be removed, as this is wrong now: {problem.found}",
                where=str(problem.path),
                cure=f"{problem.cure}; to give the clips up, take the video out",
            )


def _say(problems: Sequence[Problem], videos: Path) -> None:
    for problem in problems[:MAX_SAID]:
        log.warning("  %s: %s; %s", name_in(videos, problem.path), problem.found, problem.cure)
    if len(problems) > MAX_SAID:
        log.warning("  … and %s more; a run that ends lists all in dropped.jsonl", len(problems) - MAX_SAID)


def _problem(error: WangenError) -> Problem:
    return Problem(Path(error.where), error.found, error.cure or "replace it or take it out")


def _say_changes(options: Preprocess, place: Place) -> None:
    """Say which flags differ from those of the last run, and remember the present ones.

    Raises:
        WangenError: the folder cannot be written.
    """
    now = _settings(options)
    before = _settings_before(place) or now
    changed = [f"--{name} {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if changed:
        log.info("  changed since the last run: %s; clips that are no longer right are made anew", ", ".join(changed))
    write_text(place.settings, _text_of(now))


def _settings(options: Preprocess) -> dict[str, str | None]:
    """The flags that decide what is written, as they are remembered, and what the labels say."""
    names = [option.name for option in options_of(Preprocess) if option.name not in _SILENT]
    now = {name: None if (value := getattr(options, name)) is None else str(value) for name in names}
    if options.labels and is_file(options.labels):
        now["labels"] = f"{options.labels} ({text_digest(options.labels.read_bytes())[:8]})"
    return now | {"videos": str(options.videos.resolve())}


def _settings_before(place: Place) -> dict[str, str | None]:
    """Those of the last run; empty where there was none."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(place.settings.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def _text_of(settings: dict[str, str | None]) -> str:
    return json.dumps(settings, indent=1) + "\n"


def _is_done(options: Preprocess, place: Place) -> bool:
    """Whether a run with these flags came to its end, and nobody took its manifests away."""
    known, now = written_digests(place.folder).get(SETTINGS), _settings(options)
    if options.labels and not is_file(options.labels):  # gone with the footage
        now["labels"] = _settings_before(place).get("labels")
    return known == text_digest(_text_of(now).encode()) and all(map(Path.is_file, place.manifests))


def _without_copies(known: Sequence[Known]) -> tuple[list[Known], list[tuple[Known, str]]]:
    """The videos without those whose bytes are another one's, and these with the name of the first."""
    first: dict[str, Known] = {}
    copies = []
    for item in known:
        same = first.setdefault(item.source.digest, item)
        if same is not item:
            copies.append((item, same.video.name))
    return list(first.values()), copies
