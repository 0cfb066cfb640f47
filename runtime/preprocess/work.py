"""The two passes over the videos, shared out among threads: watching them, and cutting clips from them."""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from wangen.generator.errors import WangenError, bytes_text, many
from wangen.generator.geometry import manner
from wangen.generator.prepare_steps import Preprocess
from wangen.runtime.preprocess.analysis import StoppedError, Tell, analyse, load, save
from wangen.runtime.preprocess.candidates import Footage, Window, drop_copies, find_windows
from wangen.runtime.preprocess.cutting import Job, clip_key, cut, is_made, jobs_of
from wangen.runtime.preprocess.form import Form, Place, num_workers
from wangen.runtime.preprocess.videos import Known
from wangen.runtime.progress import progress

log = logging.getLogger("wangen")

T = TypeVar("T")


def watch(
    known: Sequence[Known], form: Form, place: Place, options: Preprocess
) -> tuple[list[Window], list[WangenError]]:
    """The windows of all videos, judged, in the order of videos and times; and what is wrong with the other videos."""
    total = sum(math.ceil(item.source.facts.duration_s * form.fps) for item in known)
    jobs = [partial(_watch_one, item, form, place, options) for item in known]
    found: list[Window] = []
    errors = []
    for windows in _shared_out(jobs, "watching", total, num_workers(options)):
        if isinstance(windows, WangenError):
            errors.append(windows)
        else:
            found += windows
    return drop_copies(found, form, options), errors


def _watch_one(item: Known, form: Form, place: Place, options: Preprocess, tell: Tell) -> list[Window] | WangenError:
    """The windows of a video, from an earlier run's record or by decoding it; or why it cannot be decoded."""
    path = place.analysis(item.source.digest, form.fps)
    unusual = manner(item.source.facts, form.fps)
    seen = load(path, unusual)
    if seen is not None:
        tell(len(seen))
    else:
        try:
            seen = analyse(item.video.path, form.fps, tell)
            item.source.require_unchanged(item.video.path)
        except WangenError as error:
            return error
        save(seen, path, unusual)
    return find_windows(Footage(item.video, item.source, seen.stamps, seen.aspect), seen, form, options)


def cut_all(
    kept: Sequence[Window], form: Form, place: Place, options: Preprocess
) -> tuple[int, dict[str, WangenError]]:
    """Make the clips that are not there yet: how many, and by its digest what is wrong with a video.

    Raises:
        OSError: the disk refused.
    """
    missing = [window for window in kept if not is_made(window, form, place)]
    jobs = jobs_of(missing, form)
    number = sum(len(job.starts) for job in jobs)
    if there := len({window.name(form) for window in kept}) - number:
        log.info("  %s there from an earlier run", many(there, "clip is", "clips are"))
    keys = {window.name(form): clip_key(window, form) for window in missing}
    work = [partial(_cut_job, job, [keys[name] for name in job.names], form, place) for job in jobs]
    made = num_bytes = 0
    errors = {}
    for job, result in zip(jobs, _shared_out(work, "cutting", number, num_workers(options)), strict=True):
        if isinstance(result, WangenError):
            errors[job.footage.source.digest] = result
        else:
            made += len(job.starts)
            num_bytes += result
    log.info("  %s cut, %s", many(made, "clip"), bytes_text(num_bytes))
    return made, errors


def _cut_job(job: Job, keys: Sequence[str], form: Form, place: Place, tell: Tell) -> int | WangenError:
    try:
        return cut(job, keys, form, place, tell)
    except WangenError as error:
        return error


def _shared_out(jobs: Sequence[Callable[[Tell], T]], label: str, total: int, workers: int) -> Iterator[T]:
    """The results of the jobs in order, worked on in threads, with progress; the jobs tell how far they are.

    When the caller stops, the jobs that are under way stop at the next thing they tell.
    """
    stop, lock = threading.Event(), threading.Lock()
    with progress(label, total) as advance:

        def tell(more: int) -> None:
            if stop.is_set():
                raise StoppedError
            with lock:
                advance(more, "")

        pool = ThreadPoolExecutor(workers)
        try:
            for result in [pool.submit(job, tell) for job in jobs]:
                yield result.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
