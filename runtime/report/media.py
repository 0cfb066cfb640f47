"""Where the page finds a picture or video: inside itself, beside itself, or at the server that shows it live."""

import hashlib
import os
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from wangen.generator.errors import bytes_text, many
from wangen.runtime.report.run_files import MEDIA_SUFFIXES, RunFiles


class Media(Protocol):
    """Gives the address of a file of the run, or None of one that cannot be read."""

    def url(self, path: Path) -> str | None:
        """The address for `src`."""

    def note(self) -> str:
        """What the reader has to know of where the files are; empty for nothing."""


class InPage:
    """Files as data: URIs up to a budget, the most telling first; the rest as links relative to the page."""

    def __init__(self, page: Path, budget_bytes: int, wanted: Iterable[Path]) -> None:
        """Choose what goes into the page.

        Args:
            page: the file that is written.
            budget_bytes: of all files together, before their encoding, which makes them a third larger.
            wanted: the files, the most telling ones first.
        """
        self._page, self._budget_bytes = page, budget_bytes
        self._inside: set[Path] = set()
        self._linked: set[Path] = set()
        self._num_bytes = 0
        for path in wanted:
            num_bytes = path.stat().st_size if path.is_file() else 0
            if path not in self._inside and self._num_bytes + num_bytes <= budget_bytes:
                self._inside.add(path)
                self._num_bytes += num_bytes

    def url(self, path: Path) -> str | None:
        """A data: URI, or beyond the budget a relative link; on another drive of Windows a file: link."""
        if path in self._inside:
            try:
                return data_uri(path.read_bytes(), MEDIA_SUFFIXES[path.suffix.lower()])
            except OSError:
                return None
        self._linked.add(path)
        try:
            return quote(Path(os.path.relpath(path, self._page.parent)).as_posix())
        except ValueError:
            return path.as_uri()

    def note(self) -> str:
        """How much is inside, and what is not."""
        inside = f"{many(len(self._inside), 'picture and video', 'pictures and videos')} of this run are in this page"
        found = f"{inside} ({bytes_text(self._num_bytes)})." if self._inside else ""
        if self._linked:
            found += (
                f" {len(self._linked)} more are links to the files beside it, because the page takes at most "
                f"{bytes_text(self._budget_bytes)} (--max_embed_mb): move the page together with the folder."
            )
        return found.strip()


class Served:
    """Files by a name that the server knows; nothing else can be asked of it."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}

    def url(self, path: Path) -> str | None:
        """An address that changes when the file does, so that browsers may keep what they have."""
        try:
            stat = path.stat()
        except OSError:
            return None
        mark = f"{path} {stat.st_mtime_ns} {stat.st_size}".encode("utf-8", "surrogateescape")
        key = hashlib.sha256(mark).hexdigest()[:24] + path.suffix.lower()
        self.files[key] = path
        return f"media/{key}"

    def note(self) -> str:
        """Nothing has to be said."""
        return ""


def data_uri(data: bytes, mime: str) -> str:
    """The bytes of a file as an address.

    >>> data_uri(b"GIF", "image/gif")
    'data:image/gif;base64,R0lG'
    """
    return f"data:{mime};base64,{b64encode(data).decode()}"


def media_of_run(run: RunFiles) -> list[Path]:
    """The run's pictures and videos, the most telling first: the best checkpoint's, the base's, the newest samples."""
    evaluation = run.evaluation
    order: dict[Path, None] = {}
    for name in (evaluation.best, "base") if evaluation else ():
        for video in evaluation.videos if evaluation else ():
            for file in (*video.controls, video.files.get(name, "")):
                if path := run.inside(file):
                    order[path] = None
    for sample in sorted(run.samples, key=lambda sample: (-sample.step, sample.number)):
        order[sample.file] = None
    for video in evaluation.videos if evaluation else ():
        for file in video.files.values():
            if path := run.inside(file):
                order[path] = None
    return list(order)
