"""Files of the Hugging Face hub: what the hub says of one, and how its bytes come here, whole or not at all.

huggingface_hub finds a file, knows the endpoint (`HF_ENDPOINT`) and the token (`HF_TOKEN`), and streams. Its own
downloads begin anew every time since version 1.18 and never compare checksums; so the partial file is ours: it lies
beside the final name, is called after the checksum, and goes on where it ended, in this run or in the next.
"""

import errno
import glob
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from wangen.generator.errors import WangenError
from wangen.generator.files import nearest_existing, remove, replace, sync_folder
from wangen.generator.session import missing_library
from wangen.profiles import Download

AGAIN = "run the same line again"
GOES_ON = f"{AGAIN}: it goes on where it stopped"
MIRROR = f"{AGAIN}; if it repeats, look at HF_ENDPOINT and proxies: something changes files on their way"
CHUNK_BYTES = 2**22

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

Advance = Callable[[str, int], None]
"""Told what is being done with a file (`fetching`, `verifying`) and how many of its bytes are done."""


@dataclass(frozen=True)
class Remote:
    """A file as the hub describes it.

    Attributes:
        download: which it is.
        url: of its content, at the revision that was looked up.
        num_bytes: its size.
        checksum: sha256 (64 hex digits) of a large file, git's sha1 (40) of a small one; empty when the hub says none.
    """

    download: Download
    url: str
    num_bytes: int
    checksum: str

    @property
    def name(self) -> str:
        """The file's name without folders."""
        return self.download.path.rpartition("/")[2]

    def partial(self, place: Path) -> Path:
        """Where its bytes wait until `place` can be made of them."""
        return place.with_name(f".{place.name}.{self.checksum[:16] or self.num_bytes}.part")


def look_up(download: Download) -> Remote:
    """Ask the hub for the size and checksum of a file.

    Raises:
        WangenError: no connection, no such file, an account is needed, or this is no hub.
    """
    hub = _hub()
    with _in_words(download, AGAIN):
        url = hub.hf_hub_url(download.repo, download.path)
        found = hub.get_hf_file_metadata(url)
        if found.commit_hash:  # what is fetched is what was looked up, even if the repository changes meanwhile
            url = hub.hf_hub_url(download.repo, download.path, revision=found.commit_hash)
    if found.size is None or found.etag is None:
        raise WangenError(f"{hub.constants.ENDPOINT} does not answer as a hub: it tells no size or no checksum",
                          where=url, cure="look at HF_ENDPOINT")  # fmt: skip
    known = re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", found.etag)
    return Remote(download, url, found.size, found.etag if known else "")


def fetch(remote: Remote, place: Path, advance: Advance, say: Callable[[str], None]) -> None:
    """Fetch a file, go on with what an earlier run left of it, and put it in place once it is verified.

    Args:
        remote: the file.
        place: its final path; nothing is there before its bytes are the right ones.
        advance: told how far it is, counting what an earlier run left.
        say: told what is worth knowing in between.

    Raises:
        WangenError: the connection or the disk failed (what came stays for the next run), or the bytes are wrong.
    """
    part = remote.partial(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        resumed = part.is_file() and part.stat().st_size > 0
        _stream(remote, part, advance)
        found = _mismatch(part, remote, advance)
        if found and resumed:  # the earlier part may have been wrong
            say(f"{remote.name}: {found}; fetching all of it again")
            remove(part)
            _stream(remote, part, advance)
            found = _mismatch(part, remote, advance)
        if found:
            remove(part)
            raise WangenError(f"{remote.name} arrived wrong and is thrown away: {found}", where=remote.url, cure=MIRROR)
        for other in place.parent.glob(f".{glob.escape(place.name)}.*.part"):  # of an earlier version of the file
            if other != part:
                remove(other)
        with part.open("ab") as file:
            os.fsync(file.fileno())
        replace(part, place)
        sync_folder(place.parent)
    except OSError as error:
        raise _disk(error, place) from error


def differs(path: Path, remote: Remote, advance: Advance) -> str:
    """How a file on disk differs from the hub's, in words; empty when size and checksum are the same.

    Raises:
        WangenError: it cannot be read.
    """
    try:
        return _mismatch(path, remote, advance)
    except OSError as error:
        raise WangenError(f"cannot be read: {error.strerror}", where=str(path),
                          cure=f"mend its rights or the link, or move it away, then {AGAIN}") from error  # fmt: skip


def free_bytes(folder: Path) -> int:
    """Free space where a folder is, or will be made."""
    return shutil.disk_usage(nearest_existing(folder) or folder).free


class _Part(io.BufferedWriter):
    """A partial file, opened at its end, that tells how long it is."""

    def __init__(self, path: Path, advance: Advance) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._advance = advance

    def write(self, data: Any, /) -> int:
        """Write all of it."""
        written = super().write(data)
        self._advance("fetching", self.tell())
        return written


def _stream(remote: Remote, part: Path, advance: Advance) -> None:
    """Bring the partial file to its full length. As long as bytes arrive, a broken connection is made anew."""
    hub = _hub()
    from huggingface_hub.file_download import http_get

    while True:
        have = part.stat().st_size if part.exists() else 0
        advance("fetching", have)
        if have == remote.num_bytes and part.exists():
            return
        try:
            with _in_words(remote.download, GOES_ON), _Part(part, advance) as file:
                headers = hub.utils.build_hf_headers() | {"Accept-Encoding": "identity"}
                http_get(remote.url, file, resume_size=have, headers=headers, expected_size=remote.num_bytes)
        except _NetworkError:
            came = part.stat().st_size
            if came == have:
                raise
            if came > remote.num_bytes:
                if not have:
                    return  # the hub sends more than it announced: verification says so
                remove(part)  # a server that did not go on but began anew


def _mismatch(path: Path, remote: Remote, advance: Advance) -> str:
    size = path.stat().st_size
    if size != remote.num_bytes:
        return f"{size} bytes, the hub's has {remote.num_bytes}"
    if not remote.checksum:
        return ""
    digest = hashlib.sha256() if len(remote.checksum) == 64 else hashlib.sha1(b"blob %d\0" % size)
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
            advance("verifying", file.tell())
    found = digest.hexdigest()
    return "" if found == remote.checksum else f"its {digest.name} is {found}, the hub's {remote.checksum}"


class _NetworkError(WangenError):
    """The network failed, not the hub: trying again may help."""


def _hub() -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars, logging
    except ModuleNotFoundError as error:
        raise missing_library(error) from None
    disable_progress_bars()  # ours shows all files together
    logging.set_verbosity_error()  # its warnings of tries that fail are said by us when the last one did
    if not _is_address(huggingface_hub.constants.ENDPOINT):
        raise WangenError(f"HF_ENDPOINT is no address: {huggingface_hub.constants.ENDPOINT!r}",
                          cure="write it as https://host, or unset it")  # fmt: skip
    return huggingface_hub


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@contextmanager
def _in_words(download: Download, again: str) -> Iterator[None]:
    """Turn every way in which the network can fail into what the user can do, `again` being the end of it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    transport_error = HfHubHTTPError.__bases__[0]  # of the HTTP library, which changes with the version of the hub's
    where = f"{download.repo}/{download.path}"
    try:
        yield
    except OfflineModeIsEnabled:
        raise WangenError("HF_HUB_OFFLINE is set, so that nothing is fetched", where=where,
                          cure="unset it for this one line, or copy the file here by hand") from None  # fmt: skip
    except HfHubHTTPError as error:
        raise _refused(error, download, again) from error
    except (transport_error, OSError) as error:
        of_disk = isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError | TimeoutError)
        if of_disk and not isinstance(error, transport_error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _NetworkError(f"the connection to {constants.ENDPOINT} failed: {reason}", where=where,
                              cure=f"look at the network (and HF_ENDPOINT), then {again}") from error  # fmt: skip


def _refused(error: Any, download: Download, again: str) -> WangenError:
    """What an HTTP status means. The hub answers 401 for what does not exist, too, unless a token is sent."""
    status = error.response.status_code if error.response is not None else 0
    where = f"{download.repo}/{download.path}"
    if status in (401, 403):
        cure = f"accept its terms at {download.address}, then set HF_TOKEN to a token of that account"
        return WangenError(f"the hub does not give this file to everybody (answer {status})", where=where, cure=cure)
    if status == 404:
        return WangenError("the hub has no such file (answer 404)", where=where,
                           cure=f"look for it at {download.address}, or name another file to download")  # fmt: skip
    if status == 429:
        return WangenError("the hub has had too many requests from here (answer 429)", where=where,
                           cure=f"wait some minutes, then {again}")  # fmt: skip
    return WangenError(f"the hub fails with answer {status}", where=where, cure=f"wait, then {again}")


def _disk(error: OSError, place: Path) -> WangenError:
    if error.errno in _FULL:
        return WangenError(f"no space is left for {place.name}", where=str(place.parent),
                           cure=f"free space or give another --dir, then {GOES_ON}")  # fmt: skip
    return WangenError(f"cannot write: {error.strerror or error}", where=str(error.filename or place),
                       cure="fix the rights or give another --dir")  # fmt: skip
