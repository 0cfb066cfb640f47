"""What processes that train together write beside the terminal: a folder for each start, a file for each process."""

from contextlib import suppress
from pathlib import Path

from wangen.generator.files import remove_tree

KEPT_STARTS = 10
LAST_LINES = 20


def last_words(file: Path) -> str:
    """The last lines of a process's log, indented; empty where it has said nothing."""
    with suppress(OSError):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join(f"  | {line}" for line in lines)
    return ""


def remove_old(folder: Path) -> None:
    """Remove the logs of all but the last starts; what cannot be removed costs only its room."""
    starts = {path.parent for path in folder.glob("*_*/attempt_0")}
    for start in sorted(starts, key=_written)[:-KEPT_STARTS]:
        with suppress(OSError):
            remove_tree(start)


def _written(start: Path) -> float:
    """When a process of this start last wrote, in seconds since 1970."""
    with suppress(OSError):
        return max(path.stat().st_mtime for path in (start, *start.glob("attempt_*/*/*.log")))
    return 0.0
