"""A bar on a terminal, and nothing anywhere else."""

import io
import sys

from wangen.generator.progress import bar, byte_bar


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
