"""A cache folder and its judge: which of its entries is the one that a recipe needs, and why not."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from wangen.runtime.cache.entries import CorruptEntryError, Entry
from wangen.runtime.cache.index import Found, look
from wangen.runtime.cache.recipes import ENTRY_NAME, Encoder, Recipe
from wangen.runtime.cache.words import differences

State = Literal["valid", "stale", "missing", "corrupt"]

Key = TypeVar("Key")

NOT_YET = "not encoded yet"


@dataclass(frozen=True)
class Verdict:
    """The judge's word on what a recipe needs: a state, why, and the entry when there is one."""

    state: State
    reason: str = ""
    entry: Entry | None = None


@dataclass
class Folder:
    """A cache folder: its entries, looked at once.

    Attributes:
        path: the folder; it may not exist yet.
        deep: judge payloads too.
    """

    path: Path
    deep: bool = False

    @cached_property
    def _found(self) -> Found:
        return look(self.path, deep=self.deep)

    @property
    def all_entries(self) -> list[Entry]:
        """Every good entry, in the order of the file names; after a renamed item two may have one key.

        Raises:
            WangenError: the folder cannot be listed.
        """
        return self._found.entries

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The good entries by key."""
        return {entry.key: entry for entry in self.all_entries}

    @property
    def damaged(self) -> dict[str, CorruptEntryError]:
        """File name -> what is wrong with a file that looks like an entry.

        Raises:
            WangenError: the folder cannot be listed.
        """
        return self._found.corrupt

    def forget_removed(self) -> None:
        """Look away from damaged files that were removed since the folder was looked at."""
        for name in [name for name in self.damaged if not (self.path / name).exists()]:
            del self.damaged[name]
        self.__dict__.pop("corrupt", None)

    @cached_property
    def corrupt(self) -> dict[str, CorruptEntryError]:
        """Key -> what is wrong with a file of that key."""
        matches = {ENTRY_NAME.fullmatch(name): error for name, error in self.damaged.items()}
        return {match["key"]: error for match, error in matches.items() if match}

    @cached_property
    def _by_content(self) -> dict[str, list[Entry]]:
        return _grouped((entry.content_key, entry) for entry in self.all_entries)

    @cached_property
    def _by_item(self) -> dict[tuple[str, str], list[Entry]]:
        return _grouped(((entry.kind, entry.name), entry) for entry in self.all_entries)

    def judge(self, recipe: Recipe, encoder: Encoder | None) -> Verdict:
        """Whether the entry for this recipe is valid, stale, missing or corrupt.

        Args:
            recipe: what is needed.
            encoder: which encoder must have made it; None accepts any.

        Raises:
            WangenError: the folder cannot be listed.
        """
        if encoder is None:
            same = self._by_content.get(recipe.content_key)
            entry = same[-1] if same else None
        else:
            entry = self.entries.get(recipe.key(encoder))
        if entry:
            return Verdict("valid", entry=entry)
        if encoder and (error := self.corrupt.get(recipe.key(encoder))):
            return Verdict("corrupt", error.found)
        return self._stale(recipe, encoder) or Verdict("missing", NOT_YET)

    def _stale(self, recipe: Recipe, encoder: Encoder | None) -> Verdict | None:
        """The verdict by the nearest older entry of the item: of the same encoder if possible, with fewest changes."""
        best: tuple[tuple[bool, int], Verdict] | None = None
        older = self._by_content.get(recipe.content_key) or self._by_item.get((recipe.kind, recipe.name), [])
        for entry in older:
            try:
                phrases = differences(entry, recipe, encoder)
            except CorruptEntryError:  # gone or damaged since the folder was looked at
                continue
            rank = (encoder is not None and entry.encoder.identity != encoder.identity, len(phrases))
            if best is None or rank < best[0]:
                best = rank, Verdict("stale", "; ".join(phrases), entry)
        return best[1] if best else None


def _grouped(pairs: Iterable[tuple[Key, Entry]]) -> dict[Key, list[Entry]]:
    groups: defaultdict[Key, list[Entry]] = defaultdict(list)
    for key, entry in pairs:
        groups[key].append(entry)
    return dict(groups)
