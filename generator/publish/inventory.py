"""What wangen wrote for a dataset on a target, by the part that it is removed with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from wangen.generator.errors import WangenError, read_cure
from wangen.generator.target import Target

Part = Literal["bundle", "caches", "checkpoints", "outputs"]
PARTS: dict[Part, str] = {
    "bundle": "scripts, TOML files, sample prompts, published media and captions",
    "caches": "encoded latents and texts, clips cut from footage",
    "checkpoints": "training states and LoRAs saved on the way",
    "outputs": "finished LoRAs, samples, videos, reports, experiment logs and the log file",
}


@dataclass
class Inventory:
    """What wangen wrote for one dataset on one target.

    Attributes:
        target: where.
        slug: the dataset.
        files: part -> the files that may be removed with it.
        kept: part -> files that stay when it is removed, and why.
        folders: part -> folders of ours that are removed when they are empty, the inner ones first.
        own: the folders that hold nothing but this dataset.
    """

    target: Target
    slug: str
    files: dict[Part, list[Path]] = field(default_factory=lambda: {part: [] for part in PARTS})
    kept: dict[Part, list[tuple[Path, str]]] = field(default_factory=lambda: {part: [] for part in PARTS})
    folders: dict[Part, list[Path]] = field(default_factory=lambda: {part: [] for part in PARTS})
    own: tuple[Path, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing of the dataset."""
        ours = any(self.files.values()) or any(self.kept.values())
        return not (ours or any(folder.is_dir() for folder in self.own))


def entries_of(folder: Path) -> list[Path]:
    """What a folder holds, in the order of names; nothing where there is none.

    Raises:
        WangenError: it cannot be listed.
    """
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise WangenError(
            f"cannot list the folder: {error.strerror}", where=str(folder), cure=read_cure(error)
        ) from None
