"""Package indexes on this machine, filled with tiny wheels, for tests that install for real."""

import http.server
import re
import threading
import zipfile
from collections.abc import Mapping
from functools import partial
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

_TORCH = """\
from os import environ
from torch.version import __version__, cuda as _cuda
class cuda:
    is_available = staticmethod(lambda: bool(_cuda and environ.get("FAKE_CARD")))
    get_device_name = staticmethod(lambda index: environ["FAKE_CARD"])
class zeros:
    def __init__(self, *shape, device): pass
    def add_(self, value): return self
    def item(self): return 1.0
"""


def write_package(index: Path, name: str, version: str, files: Mapping[str, str] | None = None) -> None:
    """Put a wheel of a package into an index."""
    stem = f"{name.replace('-', '_')}-{version}"
    content = {
        f"{name.replace('-', '_')}/__init__.py": "",
        **(files or {}),
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content[f"{stem}.dist-info/RECORD"] = "".join(f"{path},,\n" for path in content)
    folder = index / canonicalize_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in content.items():
            wheel.writestr(path, text)


def write_torch(index: Path, version: str, *, cuda: str | None = None, build: str = "") -> None:
    """Put a stand-in for PyTorch into an index; it works on the card that FAKE_CARD names, when it is built for one.

    `build` is what it calls itself behind its version, as `+cu128` where pip knows nothing of it.
    """
    versions = f"__version__ = {version + build!r}\ncuda: str | None = {cuda!r}\nhip: str | None = None\n"
    write_package(index, "torch", version, {"torch/__init__.py": _TORCH, "torch/version.py": versions})


def write_requirements(index: Path) -> None:
    """Put a stand-in for everything that wangen and its runtime need, but PyTorch, into an index."""
    for line in requires("wangen") or []:
        found = re.match(r"[A-Za-z0-9_.-]+", line)
        if found and found[0] != "torch" and (";" not in line or 'extra == "runtime"' in line):
            write_package(index, found[0].lower(), "99.0")


class Server:
    """Serves a folder of indexes; `asked` are the paths that were asked for."""

    def __init__(self, folder: Path):
        self.asked: list[str] = []
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self.asked, str(folder)))
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def url(self, index: str) -> str:
        """Address of one of the indexes."""
        return f"http://127.0.0.1:{self._http.server_port}/{index}"

    def close(self) -> None:
        """End it."""
        self._http.shutdown()
        self._http.server_close()


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, asked: list[str], folder: str, *rest: Any):
        self.asked = asked
        super().__init__(*rest, directory=folder)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
