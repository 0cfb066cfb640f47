"""Reading ahead: results in the order of the jobs, worked on in threads while the caller uses earlier ones."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

ASKED_EVERY_S = 1.0


class StoppedError(Exception):
    """The caller wanted to stop while it waited for a result."""


def ahead(
    jobs: Iterable[Callable[[], T]], num_workers: int, stop: Callable[[float], bool] | None = None
) -> Generator[T, None, None]:
    """The results of the jobs in order, at most `num_workers` ahead; 0 works in the caller's thread.

    Closing the generator drops the jobs that have not begun. What a job raises, the caller gets in its place.

    Args:
        jobs: each gives a result.
        num_workers: threads.
        stop: asked every second while a thread is waited for, which a disk may hold up for long, with the seconds that
            this has taken.

    Raises:
        StoppedError: it said so.

    >>> list(ahead([lambda: 1, lambda: 2], num_workers=4))
    [1, 2]
    """
    if num_workers <= 0:
        for job in jobs:
            yield job()
        return
    waiting: deque[Future[T]] = deque()
    pool, waits = ThreadPoolExecutor(num_workers), False  # after an error others may hang where it came from
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > num_workers:
                yield _result(waiting.popleft(), stop)
        while waiting:
            yield _result(waiting.popleft(), stop)
        waits = True
    except GeneratorExit:
        waits = True
        raise
    finally:
        pool.shutdown(wait=waits, cancel_futures=True)


def _result(future: Future[T], stop: Callable[[float], bool] | None) -> T:
    began = time.monotonic()
    while stop:
        wait([future], ASKED_EVERY_S)
        if future.done():
            break
        if stop(time.monotonic() - began):
            raise StoppedError
    return future.result()
