"""The embedding cache: one safetensors file per entry, identified by a key over everything that changes its bytes.

The name of an entry is `<stem>-<key>.<kind>.safetensors`; the key alone identifies, the stem is for people. The header
holds the recipe in words, the encoder, and a digest of the payload, so that an entry can be judged by itself. Many
entries may lie in `cache.packs`, and are found and read like files of their own. Torch is imported only where tensors
are read: judging works without it. `cache.writer` writes what is read here, `cache.claims` keeps two processes from
encoding the same thing, and `EmbeddingCache` is for notebooks.
"""

from wangen.runtime.cache.api import EmbeddingCache, EmbeddingCacheManager
from wangen.runtime.cache.entries import CorruptEntryError, Entry, payload_digest, read_entry
from wangen.runtime.cache.folder import Folder, State, Verdict
from wangen.runtime.cache.reading import load
from wangen.runtime.cache.recipes import (
    EDIT_NAMES,
    FORMAT,
    KINDS,
    NO_ENCODER,
    RECIPE_VERSIONS,
    TEXT_KINDS,
    Encoder,
    Kind,
    Recipe,
    decoded_by,
    digest,
    in_tiles,
    prompt_digest,
)

__all__ = [
    "EDIT_NAMES",
    "FORMAT",
    "KINDS",
    "NO_ENCODER",
    "RECIPE_VERSIONS",
    "TEXT_KINDS",
    "CorruptEntryError",
    "EmbeddingCache",
    "EmbeddingCacheManager",
    "Encoder",
    "Entry",
    "Folder",
    "Kind",
    "Recipe",
    "State",
    "Verdict",
    "decoded_by",
    "digest",
    "in_tiles",
    "load",
    "payload_digest",
    "prompt_digest",
    "read_entry",
]
