"""What publishing wrote into a media folder: a manifest beside the media, by which it is known again.

Only files that the manifest names are ever replaced or removed, and only while they are what it says: a file that
somebody changed in the bundle stays. Where the time is another one, as after a copy of the bundle, the content decides.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from wangen.generator.dataset import CAPTION, IMAGE_SUFFIXES, VIDEO_SUFFIXES
from wangen.generator.errors import unreadable
from wangen.generator.files import same_bytes, spread

NAME = ".wangen-published.json"
FORMAT = 3

_MEDIA = IMAGE_SUFFIXES | VIDEO_SUFFIXES

UNKNOWN = -1
"""The size of a smaller copy that is not made yet."""
COARSE_NS = 2_000_000_000
"""Time stamps of FAT and of network drives are this coarse."""

_TEXT = "text "
_NUM_PLACES, _PLACE_BYTES = 16, 1 << 20


class FileState(NamedTuple):
    """What shows that a media file is another one or changed.

    Attributes:
        num_bytes: its size.
        mtime_ns: modification time, which programs can set.
        node: (device, inode), the same for every hard link.
        changed_ns: on POSIX when the file, its rights or the number of its links changed last; else 0.
        num_links: how many names it has.
    """

    num_bytes: int
    mtime_ns: int
    node: tuple[int, int]
    changed_ns: int
    num_links: int

    @classmethod
    def of(cls, stat: os.stat_result) -> "FileState":
        """The state that `os.stat` tells."""
        changed_ns = stat.st_ctime_ns if os.name == "posix" else 0
        return cls(stat.st_size, stat.st_mtime_ns, (stat.st_dev, stat.st_ino), changed_ns, stat.st_nlink)

    @property
    def file(self) -> str:
        """What no program can set back."""
        return f"{self.node[1]} {self.changed_ns}"


class Record(NamedTuple):
    """One published file.

    Attributes:
        made_of: what it was made from: size and time of the source and the recipe, or the digest of a caption;
            empty when nobody knows: such a record fits no file.
        size: of the published file in bytes.
        mtime_ns: modification time of published media, which is that of the source; captions have a digest.
        origin: the source's absolute path on the host that published it.
        digest: `media_digest` of published media.
        source_digest: the same of the source.
        source_file: `FileState.file` of the source, of published media that are no link to it.
    """

    made_of: str = ""
    size: int = UNKNOWN
    mtime_ns: int = UNKNOWN
    origin: str = ""
    digest: str = ""
    source_digest: str = ""
    source_file: str = ""

    @property
    def is_caption(self) -> bool:
        """Whether the file is a caption, known by its content."""
        return self.made_of.startswith(_TEXT)


@dataclass(frozen=True)
class Manifest:
    """The files of a media folder.

    Attributes:
        files: file name -> what it is, or will be as soon as a publish that is under way ends.
        before: file name -> what it was before that publish; empty when none is under way.
        written_ns: when the manifest was written, by its file system.
    """

    files: Mapping[str, Record] = field(default_factory=dict)
    before: Mapping[str, Record] = field(default_factory=dict)
    written_ns: int = UNKNOWN

    def names(self) -> set[str]:
        """Every file that may be ours."""
        return {*self.files, *self.before}

    def match(self, path: Path) -> Record | None:
        """The record of a file that is what was published; None when it is another's or somebody changed it."""
        records = [names[path.name] for names in (self.files, self.before) if path.name in names]
        return next((record for record in records if _is(path, record)), None)

    def text(self) -> str:
        """What stands in the file."""
        content: dict[str, Any] = {"format": FORMAT, "files": self.files}
        return json.dumps(content | ({"before": self.before} if self.before else {}), indent=0, sort_keys=True)


def caption_record(text: bytes) -> str:
    """The `made_of` of a caption."""
    return _TEXT + digest_of(text)


def digest_of(content: bytes) -> str:
    """By what a content is known again."""
    return hashlib.sha256(content).hexdigest()[:20]


def media_digest(path: Path) -> str:
    """By what a media file is known again: its size, and its bytes, above 16 MiB those at 16 places.

    Of what is compressed, as large files are, any change moves all that follows.

    Raises:
        OSError: it cannot be read.
    """
    found = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        for piece in spread(file, _NUM_PLACES, _PLACE_BYTES):
            found.update(piece)
    return found.hexdigest()[:20]


def read(folder: Path) -> Manifest:
    """What earlier publishes wrote; entries that they cannot have written are not believed.

    Raises:
        WangenError: the file cannot be read.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        written_ns = path.stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return Manifest()
    except OSError as error:
        raise unreadable(path, error) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return Manifest()
    return Manifest(_records(content.get("files")), _records(content.get("before")), written_ns)


def _records(content: Any) -> dict[str, Record]:
    if not isinstance(content, dict):
        return {}
    return {name: _record(raw) for name, raw in content.items() if is_published_name(name) and isinstance(raw, list)}


def is_published_name(name: str) -> bool:
    """Whether publishing writes files of such a name into a media folder: media and captions, no folders."""
    # Tens of thousands of names are judged here; making a path of each would take a third of a publish.
    stem, _, ending = name.rpartition(".")
    media = stem and f".{ending.lower()}" in _MEDIA
    return not ("/" in name or "\\" in name) and bool(media or name.endswith(CAPTION))


def _record(raw: list[Any]) -> Record:
    """A record, or one that knows nothing when it is malformed."""
    kinds = (str, int, int, str, str, str, str)
    fits = len(raw) in (4, 5, 7) and all(type(value) is kind for value, kind in zip(raw, kinds, strict=False))
    return Record(*raw) if fits else Record()


def _is(path: Path, record: Record) -> bool:
    """Whether a file is what was written, or is now what its source is.

    Raises:
        WangenError: it cannot be read, so that nobody knows.
    """
    try:
        if record.is_caption:
            return caption_record(path.read_bytes()) == record.made_of
        stat = path.stat()
        in_time = abs(record.mtime_ns - stat.st_mtime_ns) <= COARSE_NS and record.size in (UNKNOWN, stat.st_size)
        if in_time and not record.digest:  # a publish that was interrupted knows no more
            return True
        return _same_content(path, record, stat.st_size)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(Path(error.filename or path), error) from None


def _same_content(path: Path, record: Record, num_bytes: int) -> bool:
    """Whether a media file of `num_bytes` holds what it held, or what its source holds: no edit is lost with either."""
    origin = Path(record.origin)
    is_own = not record.origin or os.path.realpath(origin) == os.path.realpath(path)
    with suppress(OSError):  # the origin may be gone
        if not is_own and path.samefile(origin):
            return True
    if record.digest and num_bytes == record.size and media_digest(path) == record.digest:
        return True
    if is_own:
        return False
    return same_bytes(path, origin)
