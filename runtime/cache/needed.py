"""Which dataset needs which entries of a cache folder, and the removal of those that none needs any more."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from wangen.generator.errors import WangenError
from wangen.generator.files import write_text
from wangen.runtime.cache.claims import alone
from wangen.runtime.cache.entries import CorruptEntryError, Entry, read_entry
from wangen.runtime.cache.folder import Folder
from wangen.runtime.cache.packs import look_at_packs
from wangen.runtime.cache.recipes import ENTRY_NAME, Encoder, Kind
from wangen.runtime.cache.removal import remove_entries
from wangen.runtime.sources import relative_name


class DatasetNeeds:
    """Which entries of a folder one dataset needs, and which encoder its last caching run used, kept beside them.

    An entry is removed only when the dataset that asks needed it before, needs it no longer, and no other dataset that
    uses the folder needs it. What nobody needs by name is never removed; a lost file of needs costs disk space, not
    entries. With --keep_cache the keys of several runs stay: the encoder tells which of them are the last run's.
    """

    def __init__(self, folder: Folder, dataset_config: Path, kind: Kind) -> None:
        self._dataset = relative_name(dataset_config, folder.path)
        dataset = hashlib.sha256(self._dataset.encode()).hexdigest()[:20]
        self.folder = folder
        self.kind = kind
        self.path = folder.path / f".wangen-needs-{dataset}.{kind}.json"
        self._before: _Needed | None = None

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of the last run, whether or not it came to its end; None when there is no file."""
        return _read_needs(self.path).encoder

    @property
    def encoder_before(self) -> Encoder | None:
        """The encoder that was on record when `extend` was called; None when there was none."""
        return self._before.encoder if self._before else None

    def extend(self, keys: set[str], encoder: Encoder) -> None:
        """Need these keys too: before anything is encoded, so that a killed run's entries are not forgotten.

        What is found in the folder after this, and is among the keys, no other dataset's run will remove.

        Raises:
            WangenError: the folder cannot be written.
        """
        recorded = _read_needs(self.path)
        self._before = recorded
        if recorded != _Needed(recorded.keys | keys, encoder):
            with self._alone():
                self._write(_read_needs(self.path).keys | keys, encoder)

    def take_back(self) -> None:
        """Have the encoder on record that was there before `extend`, if one was: the other has made nothing.

        Raises:
            WangenError: the folder cannot be written.
        """
        if self._before and self._before.encoder not in (None, self.encoder):
            with self._alone():
                self._write(_read_needs(self.path).keys, self._before.encoder)

    def reduce(self, keys: set[str], encoder: Encoder) -> int:
        """Need these keys alone and remove what nobody needs any more; returns how many entries were removed.

        What another run of the same dataset has come to need since `extend` stays.

        Raises:
            WangenError: the folder cannot be written.
        """
        twins = self._twins(keys)
        if not twins and _read_needs(self.path) == _Needed(keys, encoder):
            return 0
        with self._alone():
            recorded = _read_needs(self.path).keys
            dropped = (recorded if self._before is None else self._before.keys) - keys
            unneeded = self._entries(dropped - needed_keys(self.folder.path, self.kind, but=[self.path]))
            stuck = remove_entries([*unneeded, *twins])
            # Only now: a run that is killed on the way must not forget what was still to be removed.
            self._write(recorded - dropped | {entry.key for entry in stuck} | keys, encoder)
        return len(unneeded) + len(twins) - len(stuck)

    def _entries(self, keys: set[str]) -> list[Entry]:
        """The good entries of these keys that are there now, whoever made them."""
        if not keys:
            return []
        found: list[Entry] = []
        for path in sorted(self.folder.path.iterdir()):
            match = ENTRY_NAME.fullmatch(path.name)
            if match and match["kind"] == self.kind and match["key"] in keys:
                with suppress(CorruptEntryError):
                    entry = read_entry(path)
                    found += [entry] if entry else []
        return found + [entry for entry in look_at_packs(self.folder.path) if entry.key in keys]

    def _twins(self, keys: set[str]) -> list[Entry]:
        """Second files of one key, left when a renamed item was encoded again."""
        by_key = {entry.key: entry for entry in self.folder.files}
        return [entry for entry in self.folder.files if entry.key in keys and by_key[entry.key] is not entry]

    def _write(self, keys: set[str], encoder: Encoder) -> None:
        if _read_needs(self.path) != _Needed(keys, encoder):
            values = {"dataset": self._dataset, "encoder": asdict(encoder), "keys": sorted(keys)}
            write_text(self.path, json.dumps(values))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            with alone(self.folder.path):
                yield
        except OSError as error:
            raise WangenError(
                f"cannot write: {error.strerror}", where=str(self.folder.path), cure="free space or fix the rights"
            ) from None


@dataclass(frozen=True)
class _Needed:
    """What a file of needs holds."""

    keys: set[str] = field(default_factory=set)
    encoder: Encoder | None = None


def _read_needs(path: Path) -> _Needed:
    """What is needed; nothing when the file is missing or broken, for its keys only ever allow removing."""
    with suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
        values = json.loads(path.read_text(encoding="utf-8"))
        encoder = Encoder(str(values["encoder"]["identity"]), str(values["encoder"]["dtype"]))
        return _Needed({str(key) for key in values["keys"]}, encoder)
    return _Needed()


def orphans(folder: Path) -> dict[Path, str]:
    """Needs file -> the TOML that made it, as seen from the folder, of datasets whose TOML is not there any more."""
    found: dict[Path, str] = {}
    for path in sorted(folder.glob(".wangen-needs-*.json")):
        with suppress(OSError, ValueError, RecursionError, TypeError, KeyError):  # an older version's has no name
            dataset = str(json.loads(path.read_text(encoding="utf-8"))["dataset"])
            if not (folder / dataset).exists():
                found[path] = dataset
    return found


def needed_keys(folder: Path, kind: Kind, *, but: Iterable[Path]) -> set[str]:
    """The keys of one kind that datasets need in a cache folder.

    Args:
        folder: the cache folder.
        kind: which kind of entry.
        but: files of needs that do not count.
    """
    left_out = set(but)
    paths = (path for path in folder.glob(f".wangen-needs-*.{kind}.json") if path not in left_out)
    return set().union(*(_read_needs(path).keys for path in paths))
