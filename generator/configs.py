"""The configurations that ship with wangen: `--config_file NAME` takes one by its name."""

from pathlib import Path

from wangen import profiles
from wangen.generator.errors import UsageError


def find_config(given: Path) -> Path:
    """The TOML file that a `--config_file` means: the file of that name, with or without `.toml`, else the shipped one.

    Only a bare name, without folder and ending, is that of a shipped one.

    Raises:
        UsageError: it is a bare name, and neither a file nor a shipped configuration has it.
    """
    for path in (given, Path(f"{given}.toml")):
        if path.is_file():
            return path
    if given.name != str(given) or given.suffix:
        return given
    shipped = profiles.config_files()
    if given.name not in shipped:
        raise UsageError(f"--config_file {given.name}: there is no such file, and none of that name ships with wangen",
                         cure=f"give a path, or one of {', '.join(shipped)}")  # fmt: skip
    return shipped[given.name]
