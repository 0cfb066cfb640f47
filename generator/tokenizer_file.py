"""Where a text encoder's tokenizer is: given, near its weights, or inside them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from wangen import profiles
from wangen.generator.companions import sort_out
from wangen.generator.errors import WangenError, unreadable
from wangen.generator.formats.raw import read_raw
from wangen.generator.headers import PIPELINE, read_header

FOLDER = "google/umt5-xxl"
"""What Wan's repositories call the tokenizer's folder."""

NUM_PARENTS = 2
"""How many folders above that of the T5 weights are searched for `google/umt5-xxl`."""


def home_of(model: profiles.Model) -> str:
    """What the tokenizer's folder is called in the repository that has it."""
    return str(PurePosixPath(model.tokenizer[0].path).parent)


def tokenizer_of(t5: Path, tokenizer: Path | None, model: profiles.Model | None = None) -> Path:
    """The tokenizer file: what `--tokenizer` names, else what lies near or inside the text encoder's weights.

    Args:
        t5: the weights.
        tokenizer: what `--tokenizer` names.
        model: whose text encoder it is; None means umT5.

    Raises:
        WangenError: there is none, or `--tokenizer` names something else.
    """
    home = home_of(model) if model else FOLDER
    if tokenizer is None:
        return find_tokenizer(t5, model)
    if _is_tokenizer(tokenizer):
        return tokenizer
    for place in _names(home):
        if (tokenizer / place).is_file():
            return tokenizer / place
    found = "this is no tokenizer" if tokenizer.exists() else "no such file or folder"
    raise WangenError(f"--tokenizer: {found}", where=str(tokenizer),
                      cure=f"name the {home} folder or its {' or its '.join(_files(home))}")  # fmt: skip


def find_tokenizer(path: Path, model: profiles.Model | None = None) -> Path:
    """The tokenizer file for T5 weights (a file or a folder), for a tokenizer's folder, or a tokenizer file itself.

    Beside the weights and in their folder's `google/umt5-xxl`, then in that of the two folders above: where models
    are sorted into `text_encoders/`, `vae/` and so on, one tokenizer serves all. A diffusers pipeline has it in
    `tokenizer/`. Last, inside the weights: then the weights themselves are the answer.

    Args:
        path: where to look.
        model: whose text encoder it is; None means umT5.

    Raises:
        WangenError: there is none, with the places looked at.
    """
    if _is_tokenizer(path):
        return path
    home, task = (home_of(model), f" --task {model.name}") if model else (FOLDER, "")
    folder = path if path.is_dir() else path.parent
    for place in _places(folder, home):
        if place.is_file():
            return place
    if path.exists() and carried_tokenizer(path) is not None:
        return path
    above = f", and in {home} of the {NUM_PARENTS} folders above"
    raise WangenError(
        f"no {'umT5 ' if home == FOLDER else ''}tokenizer here; looked for {', '.join(_names(home))}{above}",
        where=str(folder),
        cure=f"fetch it once with: wangen models download tokenizer{task}; or name a {home} folder with --tokenizer",
    )


def carried_tokenizer(path: Path) -> bytes | None:
    """The SentencePiece model that ComfyUI stores inside a text encoder's checkpoint, None where there is none.

    Raises:
        WangenError: this is no weight file, or it cannot be read.
    """
    info = sort_out(read_header(path, "--t5")).tokenizer
    return None if info is None else read_raw(info)


def tokenizer_digest(path: Path) -> str:
    """The SHA-256 of a tokenizer that `tokenizer_of` found; the same for one carried inside the weights.

    Raises:
        WangenError: it cannot be read.
    """
    try:
        data = path.read_bytes() if _is_tokenizer(path) else carried_tokenizer(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return hashlib.sha256(data or b"").hexdigest()


def _is_tokenizer(path: Path) -> bool:
    """Whether a file is called as tokenizers are; the index of a sharded text encoder is none."""
    return path.is_file() and path.suffix in (".json", ".model") and ".safetensors.index." not in path.name


def _files(home: str) -> tuple[str, ...]:
    """What the tokenizer's file is called: only umT5's is a SentencePiece model too."""
    return ("tokenizer.json", "spiece.model") if home == FOLDER else ("tokenizer.json",)


def _names(home: str) -> tuple[str, ...]:
    """Looked at in this order, relative to the folder of the weights."""
    return tuple(place for name in _files(home) for place in (f"{home}/{name}", name))


def _places(folder: Path, home: str) -> Iterator[Path]:
    for place in _names(home):
        yield folder / place
    folder = folder.absolute()
    for pipeline in (folder, folder.parent):
        if (pipeline / PIPELINE).is_file():
            yield from (pipeline / "tokenizer" / name for name in _files(home))
    for parent in folder.parents[:NUM_PARENTS]:
        yield from (parent / home / name for name in _files(home))
