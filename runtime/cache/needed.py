"""Which dataset needs which entries of a cache folder, and the removal of those that none needs any more."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from wangen.generator.errors import WangenError, read_cure, unreadable
from wangen.generator.files import write_text
from wangen.runtime.cache.claims import alone
from wangen.runtime.cache.entries import CorruptEntryError, Entry, read_entry
from wangen.runtime.cache.folder import Folder
from wangen.runtime.cache.packs import look_at_packs
from wangen.runtime.cache.recipes import ENTRY_NAME, Encoder, Kind
from wangen.runtime.cache.removal import remove_entries
from wangen.runtime.sources import relative_name


class NeedsError(WangenError):
    """A file of needs that cannot be read, so that it is open what its dataset needs."""


class BrokenNeedsError(NeedsError):
    """A file of needs that is damaged: what it held is lost."""


class DatasetNeeds:
    """Which entries of a folder one dataset needs, and which encoder its last caching run used, kept beside them.

    An entry is removed only when the dataset that asks needed it before, needs it no longer, and no other dataset that
    uses the folder needs it. What nobody needs by name is never removed, nor anything while another dataset's file of
    needs cannot be read; the dataset's own is written anew where it is damaged. With --keep_cache the keys of several
    runs stay: the encoder tells which of them are the last run's.
    """

    def __init__(self, folder: Folder, dataset_config: Path, kind: Kind, vae: str = "") -> None:
        self._dataset = relative_name(dataset_config, folder.path)
        dataset = hashlib.sha256(self._dataset.encode()).hexdigest()[:20]
        self.folder = folder
        self.kind = kind
        self.path = folder.path / f".wangen-needs-{dataset}.{kind}.json"
        self._vae = vae
        self._before: _Needed | None = None

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of the last run, whether or not it came to its end; None when there is no file that says it.

        Raises:
            NeedsError: the file cannot be read.
        """
        return self._recorded().encoder

    @property
    def encoder_before(self) -> Encoder | None:
        """The encoder that was on record when `extend` was called; None when there was none."""
        return self._before.encoder if self._before else None

    @property
    def vae(self) -> str:
        """Whose VAE the last run was with, of two that entries cannot be told by; empty where it did not say.

        Raises:
            NeedsError: the file cannot be read.
        """
        return self._recorded().vae

    def extend(self, keys: set[str], encoder: Encoder) -> None:
        """Need these keys too: before anything is encoded, so that a killed run's entries are not forgotten.

        What is found in the folder after this, and is among the keys, no other dataset's run will remove.

        Raises:
            WangenError: the folder cannot be written, or what is needed so far not be read.
        """
        recorded = self._recorded()
        self._before = recorded
        if recorded != self._needed(recorded, recorded.keys | keys, encoder):
            with self._alone():
                recorded = self._recorded()
                self._write(recorded, self._needed(recorded, recorded.keys | keys, encoder))

    def take_back(self) -> None:
        """Have the encoder on record that was there before `extend`, if one was: the other has made nothing.

        Raises:
            WangenError: the folder cannot be written, or what is needed so far not be read.
        """
        if self._before and self._before.encoder not in (None, self.encoder):
            with self._alone():
                recorded = self._recorded()
                self._write(recorded, replace(self._before, keys=recorded.keys))

    def reduce(self, keys: set[str], encoder: Encoder) -> int:
        """Need these keys alone and remove what nobody needs any more; returns how many entries were removed.

        What another run of the same dataset has come to need since `extend` stays.

        Raises:
            NeedsError: it is open what a dataset needs, and nothing was removed.
            WangenError: the folder cannot be written.
        """
        twins = self._twins(keys)
        recorded = self._recorded()
        if not twins and recorded == self._needed(recorded, keys, encoder):
            return 0
        with self._alone():
            recorded = self._recorded()
            dropped = (recorded.keys if self._before is None else self._before.keys) - keys
            others = needed_keys(self.folder.path, self.kind, but=[self.path]) if dropped else set()
            unneeded = self._entries(dropped - others)
            stuck = remove_entries([*unneeded, *twins])
            # Only now: a run that is killed on the way must not forget what was still to be removed.
            left = recorded.keys - dropped | {entry.key for entry in stuck} | keys
            self._write(recorded, self._needed(recorded, left, encoder))
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

    def _recorded(self) -> "_Needed":
        """What the dataset needs so far; nothing where that is lost.

        Raises:
            NeedsError: it cannot be read now, and must not be written over.
        """
        try:
            return _read_needs(self.path)
        except BrokenNeedsError:
            return _Needed()

    def _needed(self, recorded: "_Needed", keys: set[str], encoder: Encoder) -> "_Needed":
        """These keys of this encoder; whose VAE that is stays on record where this run does not say it."""
        return _Needed(keys, encoder, self._vae or (recorded.vae if recorded.encoder == encoder else ""))

    def _write(self, recorded: "_Needed", needed: "_Needed") -> None:
        if needed.encoder and recorded != needed:
            values = {"dataset": self._dataset, "encoder": asdict(needed.encoder), "keys": sorted(needed.keys)}
            write_text(self.path, json.dumps(values | ({"vae": needed.vae} if needed.vae else {})))

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
    vae: str = ""


def _read_needs(path: Path) -> _Needed:
    """What is needed; nothing where there is no file.

    Raises:
        NeedsError: it cannot be read.
        BrokenNeedsError: it is damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        encoder = Encoder(str(values["encoder"]["identity"]), str(values["encoder"]["dtype"]))
        return _Needed({str(key) for key in values["keys"]}, encoder, str(values.get("vae", "")))
    except FileNotFoundError:
        return _Needed()
    except OSError as error:
        found = f"what a dataset needs {unreadable(path, error).found}"
        raise NeedsError(found, where=str(path), cure=read_cure(error)) from None
    except (ValueError, RecursionError, TypeError, KeyError):
        raise BrokenNeedsError(
            "the file that says what a dataset needs of this cache folder is damaged",
            where=str(path),
            cure="run the caching step of that dataset again, which writes it anew; if the dataset is gone, remove it",
        ) from None


def _files_of_needs(folder: Path, ending: str) -> list[Path]:
    """The files of needs in a cache folder whose names end like this.

    Raises:
        WangenError: the folder cannot be listed.
    """
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise WangenError(
            f"cannot list the cache folder: {error.strerror}", where=str(folder), cure=read_cure(error)
        ) from None
    return [path for path in paths if path.name.startswith(".wangen-needs-") and path.name.endswith(ending)]


def orphans(folder: Path) -> dict[Path, str]:
    """Needs file -> the TOML that made it, as seen from the folder, of datasets whose TOML is not there any more.

    Raises:
        WangenError: the folder cannot be listed.
    """
    found: dict[Path, str] = {}
    for path in _files_of_needs(folder, ".json"):
        with suppress(OSError, ValueError, RecursionError, TypeError, KeyError):  # an older version's has no name
            dataset = str(json.loads(path.read_text(encoding="utf-8"))["dataset"])
            try:
                (folder / dataset).stat()  # exists() takes any error for an absence
            except (FileNotFoundError, NotADirectoryError):
                found[path] = dataset
    return found


def needed_keys(folder: Path, kind: Kind, *, but: Iterable[Path]) -> set[str]:
    """The keys of one kind that datasets need in a cache folder.

    Args:
        folder: the cache folder.
        kind: which kind of entry.
        but: files of needs that do not count.

    Raises:
        NeedsError: it is open what a dataset needs.
        WangenError: the folder cannot be listed.
    """
    left_out = set(but)
    paths = (path for path in _files_of_needs(folder, f".{kind}.json") if path not in left_out)
    return set().union(*(_read_needs(path).keys for path in paths))
