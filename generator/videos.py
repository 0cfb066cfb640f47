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
    return require_library("av").open(str(path), metadata_errors="replace")
