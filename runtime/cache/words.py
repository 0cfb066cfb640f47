"""Why an entry is not what is needed, in words."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from wangen.generator.sampling_refusals import TILES_PX
from wangen.runtime.cache.entries import Entry
from wangen.runtime.cache.recipes import TEXT_KINDS, Encoder, Kind, Recipe, decoded_by, in_tiles
from wangen.runtime.decoders.choice import DECODERS

_FIXED = {
    "source": "the file's content changed",
    "caption": "the caption changed",
    "controls": "the control image changed",
    "prompt": "the text encoder's template changed",
    "control": "the control image changed",
    "mask": "the mask changed",
    "resize": "the resizing recipe changed",
    "aspect": "the shape of the video's pixels, which are made square, changed",
    "colours": "whether the picture's colour profile is followed changed",
    "mirrored": "whether the video is mirrored as it says changed",
    "condition": "the way the condition is made changed",
}
_NAMED = {
    "start": "the clip's first frame changed from {old} to {new}",
    "first_frame": "the clip's first frame in its video changed from {old} to {new}",
    "frame_step": "the step from frame to frame in the video changed from {old} to {new}",
    "frames": "the number of frames changed from {old} to {new}",
    "fps": "the model's frame rate changed from {old} to {new} fps",
    "pace": "the rate at which the video's frames are taken changed from {old} to {new}",
    "stride_frames": "the VAE's frames per latent frame changed from {old} to {new}",
    "stride_px": "the VAE's pixels per latent cell changed from {old} to {new}",
    "source_fps": "source_fps changed from {old} to {new}",
    "background": "the background behind transparent pixels changed from {old} to {new}",
}
_UNSET = {"source_fps": "the file's own", "pace": "the model's", "background": "white"}


def differences(entry: Entry, recipe: Recipe, encoder: Encoder | None) -> tuple[str, ...]:
    """What differs between an entry and what is needed, one phrase for each thing.

    Args:
        entry: what is there; its header is read for what it is made of.
        recipe: what is needed.
        encoder: which must have made it; None accepts any.

    Raises:
        CorruptEntryError: the entry changed since it was judged.
    """
    old, new, made_by = entry.content, recipe.content, entry.encoder
    phrases = []
    if (old.get("width"), old.get("height")) != (new.get("width"), new.get("height")):
        phrases.append(f"the size changed from {_size(old)} to {_size(new)}")
    for name in dict.fromkeys([*new, *old]):
        if name not in ("width", "height") and old.get(name) != new.get(name):
            words = _FIXED.get(name) or _NAMED.get(name, f"{name} changed from {{old}} to {{new}}")
            phrases.append(words.format(old=_value(name, old), new=_value(name, new)))
    if encoder and made_by.identity != encoder.identity:
        phrases.append(_other_encoder(made_by.identity, encoder.identity, entry.kind))
    elif encoder and made_by.dtype != encoder.dtype:
        phrases.append(f"encoded in {made_by.dtype}, wanted in {encoder.dtype}")
    return tuple(phrases) or ("made by an older version of the encoding code",)


@cache  # of thousands of entries that are stale most have the same two
def _other_encoder(made_by: str, wanted: str, kind: Kind) -> str:
    """What differs between two identities: the decoder or the tiles, where one has the usual ones, or what encodes."""
    for decoder in DECODERS[1:]:
        if made_by == decoded_by(wanted, decoder):
            return f"decoded by {decoder}, wanted by {DECODERS[0]}"
        if wanted == decoded_by(made_by, decoder):
            return f"decoded by {DECODERS[0]}, wanted by {decoder}"
    for tile in TILES_PX if kind not in TEXT_KINDS else ():
        if made_by == in_tiles(wanted, tile):
            return f"encoded with another VAE tile (--vae_tile {tile}, wanted without)"
        if wanted == in_tiles(made_by, tile):
            return f"encoded with another VAE tile (none, wanted --vae_tile {tile})"
    return f"encoded with another {encoder_words(kind)}"


def encoder_words(kind: Kind) -> str:
    """What encodes a kind.

    >>> encoder_words("latent"), encoder_words("text_encoder_output")
    ('VAE', 'text encoder or tokenizer')
    """
    return "CLIP" if kind == "clip" else "text encoder or tokenizer" if kind in TEXT_KINDS else "VAE"


def _size(content: Mapping[str, Any]) -> str:
    return f"{content.get('width', '?')}x{content.get('height', '?')}"


def _value(name: str, content: Mapping[str, Any]) -> str:
    value = content.get(name)
    return _UNSET.get(name, "unset") if value is None else str(value)
