"""Reading ahead: in order, so many at a time and no more."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from wangen.runtime.ahead import ahead


@pytest.mark.parametrize("num_workers", [-1, 0, 1, 3, 50])
def test_results_come_in_the_order_of_the_jobs(num_workers: int):
    def job(number: int) -> Callable[[], int]:
        return lambda: (time.sleep(0.003 * (number % 3 == 0)), number)[1]

    assert list(ahead((job(number) for number in range(20)), num_workers)) == list(range(20))
    assert list(ahead([], num_workers)) == []


def test_it_stays_so_many_ahead():
    begun: list[int] = []

    def jobs() -> Iterator[Callable[[], None]]:
        for number in range(20):
            begun.append(number)
            yield lambda: None

    results = ahead(jobs(), 3)
    assert begun == []
    next(results)
    assert len(begun) == 4
    next(results)
    assert len(begun) == 5
    results.close()


def test_without_workers_the_caller_does_it():
    assert set(ahead([threading.get_ident] * 3, 0)) == {threading.get_ident()}
    assert threading.get_ident() not in set(ahead([threading.get_ident] * 3, 2))


def test_an_error_comes_in_the_place_of_its_result_and_ends_it():
    results = ahead([lambda: 1, lambda: 1 // 0, lambda: 3], 2)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(results) == []
