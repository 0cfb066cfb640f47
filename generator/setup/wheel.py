"""A wheel of the wangen that runs here, so that a bundle carries what its environment needs.

wangen is on no index. The wheel is made from the installed packages alone, which works for a plain and for an editable
installation, needs no build tool, and gives the same bytes again as long as nothing in wangen changes.
"""

import base64
import hashlib
import io
import re
import stat
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from wangen.generator.errors import WangenError
from wangen.generator.files import write_whole

PACKAGES = ("examples", "generator", "profiles", "runtime", "templates")
_METADATA = ("METADATA", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
_REQUIRED = ("METADATA", "entry_points.txt")
# What no bundle needs: scripts to be read, and the weights of the demo.
_UNSHIPPED = {("examples", "published"), ("examples", "tiny-wan")}
# The earliest moment that a zip file can hold.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_wheel(folder: Path) -> Path:
    """Write `wangen-<version>-py3-none-any.whl` into a folder, unless the very same file is there; returns its path.

    Raises:
        WangenError: this wangen is not installed as a package with metadata.
        OSError: the folder cannot be written; an older wheel is untouched.
    """
    path = folder / wheel_name(_installed().version)
    data = wheel_bytes()
    if not path.is_file() or path.read_bytes() != data:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, [data])
    return path


def wheel_name(version: str) -> str:
    """The file name of the wheel of a version.

    >>> wheel_name("0.1.0")
    'wangen-0.1.0-py3-none-any.whl'
    """
    return f"{_stem(version)}-py3-none-any.whl"


def wheel_bytes() -> bytes:
    """The bytes of the wheel.

    Raises:
        WangenError: this wangen is not installed as a package with metadata.
    """
    found = _installed()
    info = f"{_stem(found.version)}.dist-info"
    tag = f"Wheel-Version: 1.0\nGenerator: wangen {found.version}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    metadata = {name: text.encode() for name in _METADATA if (text := found.read_text(name))}
    content = dict(_package_files()) | {f"{info}/{name}": data for name, data in metadata.items()}
    content[f"{info}/WHEEL"] = tag.encode()
    lines = [f"{name},{_digest(data)},{len(data)}\n" for name, data in sorted(content.items())]
    content[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        # The setup scripts import wangen from the wheel before it is installed. Up to Python 3.12 a package without
        # `__init__.py` is found in a zip file only when its folder is an entry.
        archive.writestr(_entry("wangen/", stat.S_IFDIR | 0o755), b"")
        for name, data in sorted(content.items(), key=lambda item: (item[0].startswith(info), item[0])):
            archive.writestr(_entry(name, stat.S_IFREG | 0o644), data)
    return stream.getvalue()


def _stem(version: str) -> str:
    return f"wangen-{re.sub('[^A-Za-z0-9.+!]+', '_', version)}"


def _installed() -> Distribution:
    # In a clone the folder `wangen.egg-info` of a build comes first, without what only an installation has.
    for found in distributions(name="wangen"):
        if all(found.read_text(name) for name in _REQUIRED):
            return found
    raise WangenError(
        "this wangen is not installed as a package, so that no wheel can be made of it",
        where=str(Path(__file__).parent),
        cure="install it with pip, in the folder of its clone: python -m pip install .",
    )


def _package_files() -> Iterator[tuple[str, bytes]]:
    """Every file of the packages: its name in the wheel and its bytes."""
    for package in PACKAGES:
        # The runtime is found, not imported.
        spec = find_spec(f"wangen.{package}")
        if spec is None or not spec.submodule_search_locations:
            raise WangenError(f"this wangen lacks its part {package}", cure="install it again with pip")
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in root.rglob("*"):
            parts = path.relative_to(root).parts
            unshipped = (package, parts[0]) in _UNSHIPPED or any(p == "__pycache__" or p.startswith(".") for p in parts)
            if path.is_file() and not unshipped:
                yield "/".join(("wangen", package, *parts)), path.read_bytes()


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    # Stored, not compressed: compressors differ from machine to machine, and most of it are pictures.
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.create_system = 3
    entry.external_attr = mode << 16
    return entry
