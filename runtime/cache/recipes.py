"""What a cache entry is made of, and the key that follows from it."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from wangen.runtime.decoders.pyav import PYAV

Kind = Literal[
    "latent",
    "control_latent",
    "image_latent",
    "clip",
    "mask",
    "text_encoder_output",
    "empty_text_encoder_output",
]
"""Latents of the item, of its control media and of its first frame as a condition, each (C, F, h, w); CLIP's view of
the first frame, (257, 1280); the mask, (1, F, h, w); embeddings of its caption and of the empty prompt, (L, dim)."""

KINDS: tuple[Kind, ...] = get_args(Kind)
TEXT_KINDS: tuple[Kind, ...] = ("text_encoder_output", "empty_text_encoder_output")

EDIT_NAMES: Mapping[str, Kind] = {
    "pixel_latent": "latent",
    "control_latent": "control_latent",
    "prompt_embed": "text_encoder_output",
    "prompt_embeds_mask": "text_encoder_output",
    "empty_prompt_embed": "empty_text_encoder_output",
    "empty_prompt_embeds_mask": "empty_text_encoder_output",
}
"""What other tools for edit models call the six tensors of an item -> the kind of the entry that holds it here: an
embedding and its mask are two tensors of one entry."""

RECIPE_VERSIONS: Mapping[Kind, int] = dict.fromkeys(KINDS, 1)
"""Raised when the code that makes a kind's bytes changes them; a golden test guards it."""

FORMAT = "wangen-cache-1"
SUFFIX = ".safetensors"
ENTRY_NAME = re.compile(rf"(?P<stem>.*)-(?P<key>[0-9a-f]{{20}})\.(?P<kind>{'|'.join(KINDS)})\.safetensors", re.DOTALL)
"""The name of every entry; a file of this name is one only if its header says so too."""

_to_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def digest(value: object) -> str:
    """20 hex digits over a JSON value, whatever the order of its keys.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(_to_json(value).encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Encoder:
    """Which weights, in which precision, made an entry.

    Attributes:
        identity: digest of the weight file (and of the tokenizer), from `headers.identity`; of tiles and decoder too,
            where they are not the usual ones.
        dtype: precision it ran in: `float32`, `bfloat16`, `float16`.
    """

    identity: str
    dtype: str


def decoded_by(identity: str, decoder: str) -> str:
    """The identity of an encoder whose clips this decoder decodes.

    On a GPU colours are converted to RGB by other arithmetic than PyAV's, so decoders count. PyAV leaves the identity
    as it is, and with it the entries that were made before there was a choice.
    """
    return identity if decoder == PYAV.name else digest([identity, f"decoded by {decoder}"])


def in_tiles(identity: str, tile: int) -> str:
    """The identity of a VAE that works in squares of so many pixels a side; 0 for none, which leaves it as it is."""
    return digest([identity, f"tiles of {tile}"]) if tile else identity


NO_ENCODER = Encoder("none", "float32")
"""Of what is computed without weights, such as masks."""


@dataclass(frozen=True)
class Recipe:
    """What an entry is made of.

    Attributes:
        kind: which kind of entry.
        content: everything but the encoder that decides the bytes.
        name: the item in words; it is shown and begins the file name, but does not count.
    """

    kind: Kind
    content: Mapping[str, Any]
    name: str

    @cached_property
    def content_key(self) -> str:
        """Digest of the kind, its version and the content, without the encoder."""
        return digest([self.kind, RECIPE_VERSIONS[self.kind], self.content])

    @property
    def source(self) -> str:
        """Digest of what is encoded, as `source_of` says."""
        return source_of(self.content)

    def key(self, encoder: Encoder) -> str:
        """The key of the entry that this encoder makes."""
        return key_of(self.content_key, encoder)

    def file_name(self, encoder: Encoder) -> str:
        """The entry's file name."""
        return file_name_of(self.kind, self.name, self.key(encoder))


def file_name_of(kind: Kind, name: str, key: str) -> str:
    """The file name of an entry; captions are shared between items, so their entries begin with `text`."""
    return f"{'text' if kind in TEXT_KINDS else _ascii(name)}-{key}.{kind}{SUFFIX}"


def item_digest(kind: Kind, name: str) -> str:
    """What an item's entries of one kind have in common, whatever its content was, in 20 hex digits."""
    return digest([kind, name])


def key_of(content_key: str, encoder: Encoder) -> str:
    """The key of an entry: digest of what is encoded and of the encoder."""
    return digest([content_key, encoder.identity, encoder.dtype])


def source_of(content: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of what an entry encodes: its media file, or its caption with its control images.

    >>> source_of({"source": "ab", "width": 64}), source_of({"caption": "a cat"})[:8]
    ('ab', '51e46741')
    """
    if "source" in content:
        return str(content["source"])
    return prompt_digest(str(content.get("caption", "")), content.get("controls", ()))


def prompt_digest(caption: str, controls: Sequence[str] = ()) -> str:
    """SHA-256, in hex, of a caption as it goes into the text encoder, and of the digests of its control images."""
    return hashlib.sha256("\n".join([caption, *controls]).encode()).hexdigest()


def _ascii(name: str) -> str:
    """At most 40 characters that every file system holds.

    >>> _ascii("Älter Hund:0+17.mp4")
    '_lter_Hund_0_17_mp4'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name, flags=re.ASCII)[:40]
