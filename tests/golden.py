"""The published scripts and TOMLs of the example, as they stand in `examples/published/`.

After a change of the templates or of the table:

    python tests/golden.py
"""

import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from wangen import profiles
from wangen.generator.cli import main

HOME = Path(__file__).resolve().parent.parent / "examples" / "published"
SOURCE = HOME.parent / "dataset"
SUFFIXES = {".sh", ".sbatch", ".bat", ".ps1", ".toml"}


def make(folder: Path) -> dict[str, bytes]:
    """Publish the example for every platform in a workspace made in `folder`; returns the texts by relative name."""
    (folder / "wangen.toml").write_text("num_frames = 33\n", encoding="utf-8")
    platforms = [word for name in profiles.platform_names() for word in ("--platform", name)]
    with redirect_stdout(StringIO()):
        code = main(["publish", "example", "--workspace", str(folder), "--source", str(SOURCE), *platforms])
    if code:
        raise SystemExit(code)
    return texts(folder / "published")


def texts(folder: Path) -> dict[str, bytes]:
    """The scripts and TOMLs below a folder by relative name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in SUFFIXES
    }


def write() -> None:
    """Replace what stands in `examples/published/`."""
    shutil.rmtree(HOME, ignore_errors=True)
    with TemporaryDirectory() as folder:
        for name, data in make(Path(folder)).items():
            path = HOME / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755 if path.suffix in {".sh", ".sbatch"} else 0o644)


if __name__ == "__main__":
    sys.exit(write())
