"""A bar on a terminal, and nothing anywhere else."""

import io
import sys

from wangen.generator.progress import bar


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
