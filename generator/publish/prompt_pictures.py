"""The pictures that sample prompts name, first frames and pictures to edit: they are published beside the prompts.

What was published of them stands in comments of the published prompts. By these, of all prompts in the folder, a later
publish knows whether a picture there may be replaced, and `wangen clean` whether it may go.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from wangen.generator.files import is_file
from wangen.generator.paths import is_absolute_anywhere
from wangen.generator.prompt_files import entries

PROMPT_ENDINGS = (".txt", ".toml")
"""Prompt files that can carry a comment."""

_NOTE = re.compile(r"^# picture ([0-9a-f]{20}) ([^\t\n]+)\t([^\n]+)$", re.MULTILINE)


class Note(NamedTuple):
    """What is remembered of a published picture.

    Attributes:
        digest: `manifest.digest_of` its content.
        origin: the file that it was made from.
    """

    digest: str
    origin: str


def prompts_in(folder: Path) -> list[Path]:
    """The prompt files of a folder, and new ones beside edited ones."""
    return sorted(path for path in folder.glob("*") if path.name.removesuffix(".new").endswith(PROMPT_ENDINGS))


def named_pictures(prompts: Path) -> list[str]:
    """The pictures with relative paths that a prompt file names, as they are written, each once.

    Raises:
        UsageError: the file cannot be read, or an option in it is unknown.
    """
    found: dict[str, None] = {}
    for _, values in entries(prompts, "sample_prompts"):
        controls = values.get("control_image_path", ())
        given = [values.get("image_path"), *(controls if isinstance(controls, list | tuple) else [controls])]
        found |= {path: None for path in given if isinstance(path, str) and not is_absolute_anywhere(path)}
    return list(found)


def origins(prompts: Path, workspace: Path) -> dict[str, Path]:
    """Those of them that are there, beside the prompts or in the workspace, and where.

    None that leads out of it, holds nothing, or has the name of a prompt file.
    """
    found = {}
    for name in named_pictures(prompts):
        places = (folder / name for folder in (prompts.parent, workspace))
        origin = next((place for place in places if is_file(place) and place.stat().st_size), None)
        if origin and name.isprintable() and ".." not in Path(name).parts and not name.endswith(PROMPT_ENDINGS):
            found[name] = origin
    return found


def written(notes: Mapping[str, Note]) -> str:
    r"""Lines for the leading comment of published prompts.

    >>> lines = written({"a/first.png": Note("0" * 20, "/home/me/a/first.png")})
    >>> lines
    '# picture 00000000000000000000 a/first.png\t/home/me/a/first.png\n'
    >>> list(read(lines.encode()))
    [('a/first.png', Note(digest='00000000000000000000', origin='/home/me/a/first.png'))]
    """
    return "".join(f"# picture {note.digest} {name}\t{note.origin}\n" for name, note in sorted(notes.items()))


def read(prompts: bytes) -> Iterator[tuple[str, Note]]:
    """The pictures' names and notes in published prompts; a name may come again."""
    text = prompts.decode("utf-8", "replace").replace("\r\n", "\n")
    for digest, name, origin in _NOTE.findall(text):
        if ".." not in Path(name).parts and not is_absolute_anywhere(name):
            yield name, Note(digest, origin)
