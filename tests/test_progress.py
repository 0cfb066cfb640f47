"""A bar on a terminal, and nothing anywhere else."""

import errno
import io
import sys

import pytest

from wangen.generator.errors import duration_text
from wangen.generator.progress import bar, byte_bar
from wangen.runtime.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch, stream: io.StringIO, total: int | None) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with bar("publishing", total) as advance:
        advance("a [bold]cat.jpg")
        advance("b.jpg")
    return stream.getvalue()


def test_a_bar_on_a_terminal(monkeypatch):
    assert "publishing" in shown(monkeypatch, Terminal(), 2)
    assert "2/?" in shown(monkeypatch, Terminal(), None)


def test_nothing_in_a_log_or_without_work(monkeypatch):
    assert shown(monkeypatch, io.StringIO(), 2) == ""
    assert shown(monkeypatch, Terminal(), 0) == ""


class Closed(Terminal):
    """A terminal that is closed after the first line."""

    def write(self, text: str) -> int:
        if self.tell() > 40:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)

    def flush(self) -> None:
        self.write("")


@pytest.mark.parametrize("make", [bar, progress])
def test_a_terminal_that_is_closed_meanwhile_stops_nothing(make, monkeypatch, caplog):
    caplog.set_level("INFO", "wangen")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream := Closed())
    done = []
    with make("working", 3) as advance:
        for number in range(3):
            advance(*(("name",) if make is bar else (1, "words")))
            done.append(number)
    assert done == [0, 1, 2]
    assert "working" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds_each", "rate", "left"), [(8.0, "8 s each", "2 h 13 min left"), (0.25, "4/s", "4 min 10 s left")]
)
def test_a_log_says_how_long_one_takes_and_all_that_are_left(seconds_each, rate, left, monkeypatch, caplog):
    caplog.set_level("INFO", "wangen")
    now_s = [1000.0]
    monkeypatch.setattr("wangen.runtime.progress.time.monotonic", lambda: now_s[0])
    with progress("train", 1040, 0) as advance:
        for _ in range(40):
            now_s[0] += seconds_each
            advance(1, "loss 0.1")
    last = [message for message in caplog.messages if "train 40/1040" in message]
    assert last == [f"  train 40/1040  {rate}  loss 0.1  {left}"]


@pytest.mark.parametrize(("number", "seconds"), [(1, 111.0), (2, 137.0), (9, 8 * 3600.0)])
def test_what_happened_once_does_not_stretch_the_time_that_is_left_for_long(number, seconds, monkeypatch, caplog):
    """Compiling for the first items, or a machine that slept."""
    caplog.set_level("INFO", "wangen")
    now_s = [1000.0]
    monkeypatch.setattr("wangen.runtime.progress.time.monotonic", lambda: now_s[0])
    with progress("train", 1000, 500) as advance:
        for done in range(1, 91):
            now_s[0] += seconds if done == number else 0.25
            advance(1, "")
    step = 500 + number + 80  # a line every ten seconds
    left_s = (1000 - step) / 4
    assert caplog.messages[-1] == f"  train {step}/1000  4/s  {duration_text(left_s)} left"


def test_a_bar_below_another_outlives_the_terminal_as_well(monkeypatch, caplog):
    """rich has put itself in the place of standard error then."""
    caplog.set_level("INFO", "wangen")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Closed())
    done = []
    with progress("training", 2) as advance:
        for number in range(2):
            with progress("samples", 1) as below:
                below(1, "words")
            advance(1, "words")
            done.append(number)
    assert done == [0, 1]


@pytest.mark.parametrize("make", [bar, progress])
def test_a_process_without_standard_error_works_as_well(make, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with make("working", 1) as advance:
        advance(*(("name",) if make is bar else (1, "words")))
    with byte_bar("file", 10) as tell:
        tell("fetching", 10)


def test_the_bytes_of_a_file_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with byte_bar("a [bold]file", 4_000_000) as tell:
            tell("fetching", 1_000_000)
            tell("fetching", 4_000_000)
            tell("verifying", 2_000_000)
        said = stream.getvalue()
        assert ("fetching a [bold]file" in said and "verifying" in said and "4.0/4.0 MB" in said) == stream.isatty()
