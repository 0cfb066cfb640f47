"""Videos of anybody's: what they say of themselves may be in any encoding."""

from pathlib import Path
from typing import Any

from wangen.generator.install import require_library


def open_video(path: Path) -> Any:
    """PyAV's container of a video to be read, to be closed by the caller; metadata that is not UTF-8 is replaced.

    Raises:
        WangenError: PyAV is not installed.
        av.FFmpegError, OSError: it cannot be read.
    """
    av = require_library("av")
    # From 19 on it has no such word, and takes whatever metadata holds.
    words = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    return av.open(str(path), **words)
