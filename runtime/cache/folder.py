"""A cache folder and its judge: which of its entries is the one that a recipe needs, and why not."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from wangen.runtime.cache.entries import CorruptEntryError, Entry
from wangen.runtime.cache.index import Found, look
from wangen.runtime.cache.packs import Packs, look_at_packs
from wangen.runtime.cache.recipes import ENTRY_NAME, Encoder, Kind, Recipe
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
    def _looked(self) -> tuple[Found, Packs]:
        """Its files and its packs.

        The packs are listed before and after the files: so what another process packs or unpacks meanwhile is found in
        one place at least.
        """
        packs = look_at_packs(self.path, deep=self.deep)
        found = look(self.path, deep=self.deep)
        return found, look_at_packs(self.path, deep=self.deep, before=packs)

    @property
    def packs(self) -> Packs:
        """Its packs.

        Raises:
            WangenError: the folder cannot be listed.
        """
        return self._looked[1]

    @property
    def files(self) -> list[Entry]:
        """The good entries that are files of their own, by their names; after a renamed item two may have one key.

        Raises:
            WangenError: the folder cannot be listed.
        """
        return self._looked[0].entries

    @property
    def all_entries(self) -> list[Entry]:
        """Every good entry: those of the packs first, then the files.

        Raises:
            WangenError: the folder cannot be listed.
        """
        return [*self.packs, *self.files]

    def find(self, key: str) -> Entry | None:
        """The good entry with this key; a file of its own counts before what a pack has."""
        return self._by_key.get(key) or self.packs.find(key)

    @cached_property
    def damaged(self) -> dict[str, CorruptEntryError]:
        """File name -> what is wrong with a file that looks like an entry; of packed entries the path in the folder.

        Raises:
            WangenError: the folder cannot be listed.
        """
        return self._looked[0].corrupt | self.packs.damaged

    def forget(self, names: Iterable[str]) -> None:
        """Look away from damaged files that were removed since the folder was looked at."""
        for name in names:
            del self.damaged[name]
        self.__dict__.pop("corrupt", None)

    @cached_property
    def corrupt(self) -> dict[str, CorruptEntryError]:
        """Key -> what is wrong with a file of that key."""
        matches = {ENTRY_NAME.fullmatch(name): error for name, error in self.damaged.items()}
        return {match["key"]: error for match, error in matches.items() if match}

    @cached_property
    def _by_key(self) -> dict[str, Entry]:
        return {entry.key: entry for entry in self.files}

    @cached_property
    def _by_content(self) -> dict[str, list[Entry]]:
        return _grouped((entry.content_key, entry) for entry in self.files)

    @cached_property
    def _by_item(self) -> dict[tuple[str, str], list[Entry]]:
        return _grouped(((entry.kind, entry.name), entry) for entry in self.files)

    def _with_content(self, content_key: str) -> list[Entry]:
        return [*self.packs.with_content(content_key), *self._by_content.get(content_key, ())]

    def _of_item(self, kind: Kind, name: str) -> list[Entry]:
        return [*self.packs.of_item(kind, name), *self._by_item.get((kind, name), ())]

    def judge(self, recipe: Recipe, encoder: Encoder | None) -> Verdict:
        """Whether the entry for this recipe is valid, stale, missing or corrupt.

        Args:
            recipe: what is needed.
            encoder: which encoder must have made it; None accepts any.

        Raises:
            WangenError: the folder cannot be listed.
        """
        if encoder is None:
            same = self._with_content(recipe.content_key)
            entry = same[-1] if same else None
        else:
            entry = self.find(recipe.key(encoder))
        if entry:
            return Verdict("valid", entry=entry)
        if encoder and (error := self.corrupt.get(recipe.key(encoder))):
            return Verdict("corrupt", error.found)
        return self._stale(recipe, encoder) or Verdict("missing", NOT_YET)

    def _stale(self, recipe: Recipe, encoder: Encoder | None) -> Verdict | None:
        """The verdict by the nearest older entry of the item: of the same encoder if possible, with fewest changes."""
        best: tuple[tuple[bool, int], Verdict] | None = None
        older = self._with_content(recipe.content_key) or self._of_item(recipe.kind, recipe.name)
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
