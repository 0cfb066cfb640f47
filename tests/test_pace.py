"""A run says when it becomes slow, and when it waits: `wangen.runtime.training.pace`."""

import logging
import threading
import time

import pytest
import torch
from tiny import TinyRun

from wangen.runtime import train
from wangen.runtime.ahead import StoppedError, ahead
from wangen.runtime.training import loop, pace
from wangen.runtime.training.pace import Pace, patient

CPU = torch.device("cpu")
USUAL = {"steps": 100, "seconds": 70.0, "waited_s": 1.0, "work": 100.0}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().strip() for record in caplog.records if record.name == "wangen"]


def windows(pace_: Pace, count: int, **changes: float) -> None:
    for _ in range(count):
        pace_.add(**{**USUAL, **changes})


def test_what_takes_longer_for_the_same_work_is_said_once(caplog: pytest.LogCaptureFixture):
    watched = Pace(CPU)
    windows(watched, 5)
    windows(watched, 1, seconds=300.0)  # one long window is chance
    windows(watched, 1)
    windows(watched, 1, seconds=208.0)
    assert warned(caplog) == []
    windows(watched, 9, seconds=208.0)
    assert warned(caplog) == ["steps have become slow: the same work takes 3.0 times as long as before. Does something "
                              "else compute on this machine?"]  # fmt: skip


def test_larger_items_are_not_slow_and_a_slow_start_is_no_measure(caplog: pytest.LogCaptureFixture):
    watched = Pace(CPU)
    windows(watched, 1, seconds=700.0)  # something is compiled
    windows(watched, 4)
    windows(watched, 4, seconds=700.0, work=1000.0)
    windows(watched, 4, seconds=600.0, waited_s=200.0, work=500.0)  # nor is it slow to wait for a disk
    assert warned(caplog) == []


def test_a_run_that_is_slow_from_its_start_is_as_it_is(caplog: pytest.LogCaptureFixture):
    windows(Pace(CPU), 9, seconds=700.0)
    assert warned(caplog) == []


def test_short_times_are_put_together(caplog: pytest.LogCaptureFixture):
    """Of 0.7 s each, every eighth step ten times as long: no window of a minute is slow."""
    watched = Pace(CPU)
    for step in range(2000):
        watched.add(steps=1, seconds=7.0 if step % 8 == 7 else 0.7, waited_s=0.0, work=1.0)
    assert warned(caplog) == []


def test_waiting_for_the_cache_is_said_once(caplog: pytest.LogCaptureFixture):
    watched = Pace(CPU)
    windows(watched, 1, waited_s=50.0)
    assert warned(caplog) == []
    windows(watched, 5, waited_s=49.0)
    (line,) = warned(caplog)
    assert line.startswith("70 % of the time goes into waiting for the cache")
    windows(Pace(CPU, reads_cache=False), 9, waited_s=49.0)  # encoders are at work
    assert len(warned(caplog)) == 1


@pytest.mark.parametrize(("free", "cause"), [(1 << 30, "the driver for Windows"), (12 << 30, "nvidia-smi shows both")])
def test_on_a_gpu_its_free_memory_is_looked_at(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, free: int, cause: str
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 24 << 30))
    watched = Pace(torch.device("cuda"))
    windows(watched, 3)
    windows(watched, 2, seconds=700.0)
    (line,) = warned(caplog)
    assert cause in line


def test_a_run_that_becomes_slow_says_so(
    tiny_run: TinyRun, tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(pace, "WINDOW_S", 0.0)
    monkeypatch.setattr(pace, "WINDOW_STEPS", 1)
    step = loop.optimizer_step

    def slower(run, *words):
        result = step(run, *words)
        time.sleep(1.0 if run.step > 6 else 0.0)
        return result

    monkeypatch.setattr(loop, "optimizer_step", slower)
    with caplog.at_level(logging.WARNING, "wangen"):
        train.run(tiny_run.options(tmp_path, max_train_steps=9))
    assert len([line for line in warned(caplog) if line.startswith("steps have become slow")]) == 1


def test_a_disk_that_does_not_answer_is_named_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pace, "STALLED_S", 0.2)
    monkeypatch.setattr("wangen.runtime.ahead.ASKED_EVERY_S", 0.1)
    gate, asked = threading.Event(), []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 6

    reader = ahead([lambda: 1, gate.wait, lambda: 2], 1, patient(stop))
    assert next(reader) == 1
    with pytest.raises(StoppedError):
        next(reader)
    gate.set()
    (line,) = warned(caplog)
    assert line.startswith("nothing has come from the cache for 0 s: does its disk answer?")
