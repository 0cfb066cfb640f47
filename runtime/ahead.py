"""Reading ahead: results in the order of the jobs, worked on in threads while the caller uses earlier ones."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(jobs: Iterable[Callable[[], T]], num_workers: int) -> Generator[T, None, None]:
    """The results of the jobs in order, at most `num_workers` ahead; 0 works in the caller's thread.

    Closing the generator drops the jobs that have not begun. What a job raises, the caller gets in its place.

    >>> list(ahead([lambda: 1, lambda: 2], num_workers=4))
    [1, 2]
    """
    if num_workers <= 0:
        for job in jobs:
            yield job()
        return
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(num_workers)
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
