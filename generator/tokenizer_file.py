"""Where the umT5 tokenizer is: given, or beside the text encoder's weights."""

from pathlib import Path

from wangen.generator.errors import WangenError

PLACES = ("google/umt5-xxl/tokenizer.json", "tokenizer.json", "google/umt5-xxl/spiece.model", "spiece.model")
"""Looked at in this order, relative to the folder of the T5 weights."""


def tokenizer_of(t5: Path, tokenizer: Path | None) -> Path:
    """The tokenizer file: what `--tokenizer` names, else what lies beside the T5 weights.

    Raises:
        WangenError: there is none, or `--tokenizer` names something else.
    """
    if tokenizer is None:
        return find_tokenizer(t5)
    if tokenizer.is_dir() or (tokenizer.is_file() and tokenizer.suffix in (".json", ".model")):
        return find_tokenizer(tokenizer)
    found = "this is no tokenizer" if tokenizer.exists() else "no such file or folder"
    raise WangenError(f"--tokenizer: {found}", where=str(tokenizer),
                      cure="name the google/umt5-xxl folder, its tokenizer.json or its spiece.model")  # fmt: skip


def find_tokenizer(path: Path) -> Path:
    """The tokenizer file for a T5 weight file, a folder, or a tokenizer file itself.

    Raises:
        WangenError: there is none, with the places looked at.
    """
    if path.is_file() and path.suffix in (".json", ".model"):
        return path
    folder = path if path.is_dir() else path.parent
    for place in PLACES:
        if (folder / place).is_file():
            return folder / place
    raise WangenError(
        f"no umT5 tokenizer here; looked for {', '.join(PLACES)}",
        where=str(folder),
        cure="copy the google/umt5-xxl folder beside the T5 file, or name it with --tokenizer",
    )
