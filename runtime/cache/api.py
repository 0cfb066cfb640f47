"""The cache for notebooks: `from wangen.runtime.cache import EmbeddingCache`."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from wangen import profiles
from wangen.generator.errors import UsageError, WangenError
from wangen.runtime.cache.entries import CorruptEntryError, Entry
from wangen.runtime.cache.folder import Folder
from wangen.runtime.cache.packs import FOLDER as PACKS
from wangen.runtime.cache.reading import load
from wangen.runtime.cache.recipes import EDIT_NAMES, KINDS, NO_ENCODER, TEXT_KINDS, Encoder, Kind, Recipe, prompt_digest
from wangen.runtime.cache.removal import remove_entries
from wangen.runtime.sources import YOUNG_NS, digest_file

if TYPE_CHECKING:
    import torch


class EmbeddingCache:
    """A cache folder by the digests of its sources: what the caching steps made, and what is saved here.

    Entries that `save_cache` makes are found here again. Training does not take them, because it does not know how
    they were made.
    """

    def __init__(self, folder: Path | str) -> None:
        """Nothing is read or made before it is needed.

        Args:
            folder: a cache folder; it may not exist yet.
        """
        self.folder = Path(folder)
        self._looked: tuple[int, dict[tuple[Kind, str], list[Entry]]] | None = None

    def save_cache(
        self,
        kind: str,
        digest: str,
        tensors: "Mapping[str, torch.Tensor]",
        *,
        encoder: Encoder = NO_ENCODER,
        name: str = "",
    ) -> Path:
        """Write an entry, whole or not at all; one of the same source and encoder is replaced. Returns its path.

        Args:
            kind: one of `KINDS` or `EDIT_NAMES`.
            digest: of the source, from `get_file_hash_for_image` or `get_file_hash_for_prompt`.
            tensors: `latent`, `clip`, or `embedding` with `mask`, as the caching steps name them, or any other.
            encoder: what made it, when several are to be told apart.
            name: begins the file's name.

        Raises:
            UsageError: these are no tensors.
            WangenError: a value is not finite, or all are zero; the disk is full or the folder cannot be written.
        """
        import torch

        from wangen.runtime.cache.writer import Writer

        if not isinstance(tensors, Mapping) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
            raise UsageError("save_cache takes names with tensors", cure='give a dictionary such as {"latent": tensor}')
        recipe = Recipe(known_kind(kind), {"source": digest}, name or digest[:12])
        with Writer(self.folder, again=True) as writer:
            writer.put(recipe, encoder, tensors)
        self._looked = None
        return self.folder / recipe.file_name(encoder)

    def load_cache(self, kind: str, digest: str) -> "dict[str, torch.Tensor] | None":
        """The tensors of the newest valid entry of a source; None when there is none. The payload is verified.

        Args:
            kind: one of `KINDS` or `EDIT_NAMES`.
            digest: of the source.
        """
        for entry in sorted(self._of(kind, digest), key=_time_ns, reverse=True):
            with suppress(CorruptEntryError):
                return load(entry)
        return None

    def cache_exists(self, kind: str, digest: str) -> bool:
        """Whether there is an entry of a source; headers are read, payloads are not."""
        return bool(self._of(kind, digest))

    def get_cache_stats(self) -> dict[str, int]:
        """How many entries there are of each kind, and by the six names of edit models; all are named."""
        counts = Counter(entry.kind for entries in self._entries().values() for entry in entries)
        by_name = {name: counts[kind] for name, kind in EDIT_NAMES.items()}
        return {kind: counts[kind] for kind in KINDS} | by_name

    def clear_cache(self, kind: str | None = None) -> int:
        """Remove all entries, or those of one kind; returns how many. Files that are no entries stay.

        Raises:
            WangenError: an entry cannot be removed.
        """
        wanted = known_kind(kind) if kind else None
        chosen = [entry for entries in self._entries().values() for entry in entries if wanted in (None, entry.kind)]
        self._looked = None
        remove_all(chosen)
        return len(chosen)

    def get_file_hash_for_image(self, path: Path | str) -> str:
        """The source digest of an image or clip: the SHA-256 of the file.

        Raises:
            WangenError: it cannot be read.
        """
        return digest_file(Path(path))

    def get_file_hash_for_prompt(
        self, path: Path | str | Sequence[Path | str] | None, prompt: str, *, task: str = ""
    ) -> str:
        """The source digest of a caption.

        Args:
            path: the control image of models that edit one, or all of them in their order; None for other models.
            prompt: the caption; it is cleaned as the text encoder gets it, which Qwen-Image's models get as it is.
            task: the model, for `qwen-image`, whose captions stand alone; empty means Wan without control images, and
                a model that edits with them.

        Raises:
            UsageError: there is no such task.
            WangenError: a control image cannot be read.
        """
        from wangen.runtime.prompts import text_of

        paths = [path] if isinstance(path, str | Path) else path or ()
        if task and task not in profiles.model_names():
            raise UsageError(f"there is no task {task!r}", cure=f"one of {', '.join(profiles.model_names())}")
        template = profiles.model(task).prompt is not None if task else path is not None
        return prompt_digest(text_of(prompt.strip(), template=template), [digest_file(Path(one)) for one in paths])

    def check_cache_exists(self, path: Path | str) -> tuple[Kind, ...]:
        """The kinds that there are of an image or clip and, when a .txt lies beside it, of its caption alone.

        Raises:
            WangenError: a file cannot be read.
        """
        from wangen.runtime.prompts import text_of

        digests: dict[Kind, tuple[str, ...]] = dict.fromkeys(KINDS, (self.get_file_hash_for_image(path),))
        caption = Path(path).with_suffix(".txt")
        if caption.is_file():
            text = caption.read_text(encoding="utf-8-sig")
            forms = tuple(prompt_digest(text_of(text.strip(), template=template)) for template in (False, True))
            digests |= dict.fromkeys(TEXT_KINDS, forms)
        return tuple(kind for kind, found in digests.items() if any(self.cache_exists(kind, one) for one in found))

    def _of(self, kind: str, digest: str) -> list[Entry]:
        """The entries of a source, without those of an earlier recipe version, which are stale whatever they hold."""
        return [entry for entry in self._entries().get((known_kind(kind), digest), []) if _is_current(entry)]

    def _entries(self) -> Mapping[tuple[Kind, str], list[Entry]]:
        """The entries by kind and source, looked at again when the folder changed."""
        changed_ns = _changed_ns(self.folder)
        if self._looked is None or self._looked[0] != changed_ns or time.time_ns() - changed_ns < YOUNG_NS:
            found: dict[tuple[Kind, str], list[Entry]] = {}
            for entry in Folder(self.folder).all_entries:
                found.setdefault((entry.kind, entry.source), []).append(entry)
            self._looked = changed_ns, found
        return self._looked[1]


EmbeddingCacheManager = EmbeddingCache


def remove_all(entries: Iterable[Entry]) -> None:
    """Remove entries that are there.

    Raises:
        WangenError: one cannot be removed; the others are gone.
    """
    for entry, error in remove_entries(entries).items():
        raise WangenError(
            f"cannot remove the cache entry: {error.strerror}",
            where=str(entry.path),
            cure="close the program that has it open, or fix the folder's rights",
        )


def known_kind(name: str) -> Kind:
    """The kind of that name, which may be one of the six of edit models.

    Raises:
        UsageError: there is none.
    """
    for kind in KINDS:
        if kind == EDIT_NAMES.get(name, name):
            return kind
    raise UsageError(f"there is no kind {name!r}", cure=f"one of {', '.join(dict.fromkeys((*KINDS, *EDIT_NAMES)))}")


def _is_current(entry: Entry) -> bool:
    with suppress(CorruptEntryError):
        return Recipe(entry.kind, entry.content, entry.name).content_key == entry.content_key
    return False


def _changed_ns(folder: Path) -> int:
    """When names in a cache folder, or among its packs, last changed."""
    times_ns = [0]
    for place in (folder, folder / PACKS):
        with suppress(OSError):
            times_ns.append(place.stat().st_mtime_ns)
    return max(times_ns)


def _time_ns(entry: Entry) -> int:
    try:
        return entry.held_by.stat().st_mtime_ns
    except OSError:
        return 0
