"""The server of a live page: on 127.0.0.1, for those who know its token, with nothing to be read but what it lists."""

import hmac
import json
import os
import re
import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

from wangen.runtime.report.run_files import MEDIA_SUFFIXES

HOST = "127.0.0.1"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_HEADERS = {
    "Connection": "close",  # so that a page notices at once when the server has ended
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Shown(Protocol):
    """What is served."""

    def page(self) -> str:
        """The whole page."""

    def state(self) -> tuple[str, object]:
        """A mark that changes when anything does, and what the page's script needs, as JSON's types."""

    def file(self, key: str) -> Path | None:
        """The picture or video of a key that the page holds; None of any other."""


class LiveServer(ThreadingHTTPServer):
    """Serves one run at `http://127.0.0.1:PORT/TOKEN/`."""

    daemon_threads = True
    # On Windows the option would let another program take the port over.
    allow_reuse_address = os.name == "posix"

    def __init__(self, port: int, token: str, shown: Shown) -> None:
        """Bind the port.

        Args:
            port: 0 takes a free one.
            token: that every address has to begin with.
            shown: what is served.

        Raises:
            OSError: the port is taken, or may not be used.
        """
        super().__init__((HOST, port), _Handler)
        self.token, self.shown = token, shown

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Tell of an error, but not of a browser that goes away in the middle of an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "wangen", ""
    timeout = 30

    def log_message(self, format: str, *args: object) -> None:
        """The terminal is for people."""

    def do_GET(self) -> None:
        """Answer, if host and token are right; else say nothing of what there is."""
        if self.headers.get("Host") not in (f"{HOST}:{self.server.server_port}",
                                            f"localhost:{self.server.server_port}"):  # fmt: skip
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST)  # another name that leads here: DNS rebinding
        token, *rest = self.path.partition("?")[0].removeprefix("/").split("/")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            return self._refuse(HTTPStatus.NOT_FOUND)
        match rest:
            case [""]:
                return self._answer(self.server.shown.page().encode("utf-8", "replace"), "text/html; charset=utf-8")
            case ["state"]:
                return self._state()
            case ["media", key] if path := self.server.shown.file(key):
                return self._file(path)
        return self._refuse(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET  # noqa: N815 - the library's name

    def _state(self) -> None:
        mark, found = self.server.shown.state()
        quoted = f'"{mark}"'
        if self.headers.get("If-None-Match") == quoted:
            return self._answer(b"", "application/json", HTTPStatus.NOT_MODIFIED, {"ETag": quoted})
        return self._answer(json.dumps(found).encode(), "application/json", HTTPStatus.OK, {"ETag": quoted})

    def _file(self, path: Path) -> None:
        """A file, or the part of it that a video player asks for."""
        try:
            data = path.read_bytes()
        except OSError:  # it was removed since the page was made
            return self._refuse(HTTPStatus.NOT_FOUND)
        mime, more = MEDIA_SUFFIXES[path.suffix.lower()], {"Accept-Ranges": "bytes"}
        part = byte_range(self.headers.get("Range", ""), len(data))
        if part is None:
            return self._answer(data, mime, HTTPStatus.OK, more)
        if part.start >= part.stop:
            return self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
        more["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{len(data)}"
        return self._answer(data[part.start : part.stop], mime, HTTPStatus.PARTIAL_CONTENT, more)

    def _refuse(self, status: HTTPStatus) -> None:
        self._answer(b"", "text/plain", status)

    def _answer(
        self, data: bytes, mime: str, status: HTTPStatus = HTTPStatus.OK, more: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": mime, **(more or {})}.items():
            self.send_header(name, value)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def byte_range(header: str, num_bytes: int) -> range | None:
    """The bytes that a `Range` header asks for; None when it asks for all, or in a way that may be ignored.

    As RFC 9110, section 14.1.2, has it, for one range.

    >>> byte_range("bytes=2-", 5), byte_range("bytes=-2", 5), byte_range("bytes=0-99", 5), byte_range("", 5)
    (range(2, 5), range(3, 5), range(0, 5), None)
    """
    match = _RANGE.fullmatch(header)
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        return range(max(0, num_bytes - int(match[2])), num_bytes)
    last = int(match[2]) if match[2] else num_bytes - 1
    return range(int(match[1]), min(last + 1, num_bytes))
