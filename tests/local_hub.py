"""A Hugging Face hub on this machine: what huggingface_hub asks of the real one to fetch a file, and its bad days.

Large files are answered as the hub answers for its LFS and Xet files: a redirect to another host (`localhost` beside
`127.0.0.1`), with the size and sha256 in the headers of the redirect. Small ones come directly, with git's sha1.
"""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

COMMIT = "c0ffee" + "0" * 34
LFS_BYTES = 100_000
"""Files from this size on are large ones."""


class Asked(NamedTuple):
    """One request."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Hub:
    """The hub's files and faults; tests change them while it runs.

    Attributes:
        files: `owner/name/path` -> content.
        asked: every request, in order.
        status: path -> the answer instead of the file.
        sent: path -> what is sent instead of the content that size and checksum are of.
        cut_at: path -> the connection is cut after so many bytes of the file, as often as the list has numbers.
        stall_at: path -> nothing more comes after so many bytes of the file.
        stalled: set when a stall begins.
        ignores_ranges: every answer begins at the first byte.
    """

    files: dict[str, bytes]
    asked: list[Asked] = field(default_factory=list)
    status: dict[str, int] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)
    cut_at: dict[str, list[int]] = field(default_factory=dict)
    stall_at: dict[str, int] = field(default_factory=dict)
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    ignores_ranges: bool = False
    endpoint: str = ""

    def bodies(self) -> list[Asked]:
        """The requests for the bytes of a file, not for what is known of it, and not those that were redirected."""
        return [asked for asked in self.asked if asked.method == "GET" and self._is_body(asked.path)]

    def _is_body(self, path: str) -> bool:
        small = "/resolve/" in path and len(self.files.get(_name(path), b"")) < LFS_BYTES
        return small or path.startswith("/cdn/")


def _name(path: str) -> str:
    repo, _, rest = unquote(path).strip("/").partition("/resolve/")
    return f"{repo}/{rest.partition('/')[2]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_words: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.hub
        hub.asked.append(Asked(self.command, self.path, self.headers["Range"], self.headers["Authorization"]))
        if self.path.startswith("/cdn/"):
            self._bytes(unquote(self.path).removeprefix("/cdn/"), {})
            return
        name = _name(self.path)
        if name in hub.status:
            self._head(hub.status[name], {"Content-Length": "0"})
        elif name not in hub.files:
            self._head(404, {"X-Error-Code": "EntryNotFound", "Content-Length": "0"})
        elif len(hub.files[name]) >= LFS_BYTES:
            port = self.server.server_address[1]
            sha256 = hashlib.sha256(hub.files[name]).hexdigest()
            linked = {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(hub.files[name]))}
            place = {"Location": f"http://localhost:{port}/cdn/{name}", "X-Repo-Commit": COMMIT, "Content-Length": "0"}
            self._head(302, {**linked, **place})
        else:
            content = hub.files[name]
            sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            self._bytes(name, {"ETag": f'"{sha1}"', "X-Repo-Commit": COMMIT})

    def _bytes(self, name: str, headers: Mapping[str, str]) -> None:
        content = self.hub.sent.get(name, self.hub.files[name])
        wanted = self.headers["Range"]
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted and not self.hub.ignores_ranges else 0
        ranged = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        self._head(206 if start else 200, {**headers, **ranged, "Content-Length": str(len(content) - start)})
        if self.command == "HEAD":
            return
        cuts = self.hub.cut_at.get(name, [])
        end = cuts.pop(0) if cuts else self.hub.stall_at.get(name, len(content))
        try:
            self.wfile.write(content[start:end])
            self.wfile.flush()
        except OSError:  # the client was killed
            end = 0
        if end < len(content):
            self.close_connection = True
            if name in self.hub.stall_at:
                self.hub.stalled.set()
                self.hub.released.wait(60)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()


@contextmanager
def running(files: Mapping[str, bytes]) -> Iterator[Hub]:
    """A hub with these files, `owner/name/path` -> content."""
    hub = Hub(dict(files))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    server.handle_error = lambda *_request: None  # type: ignore[method-assign]  # a client that was killed
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def environment(endpoint: str, home: Path) -> dict[str, str]:
    """The environment of a process that knows this hub only."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    kept = {key: value for key, value in kept.items() if "proxy" not in key.lower()}
    return kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "*"}


def start(endpoint: str, cwd: Path, *words: str, more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `wangen models download WORDS` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "wangen.runtime", "models", "download", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment(endpoint, cwd / "hf-home") | dict(more or {}),
    )


def download(
    endpoint: str, cwd: Path, *words: str, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `wangen models download WORDS` to its end."""
    process = start(endpoint, cwd, *words, more=more)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
