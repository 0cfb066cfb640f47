"""Whether what a caching step is about to write fits on the disk: said before an encoder is loaded, not hours later.

Needs no torch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from wangen.generator.cache_sizes import CLIP_NUMBERS, latent_bytes, mask_bytes, text_bytes, width_of
from wangen.generator.errors import WangenError, bytes_text, many
from wangen.generator.files import full_disks
from wangen.profiles import Model
from wangen.runtime.cache import TEXT_KINDS, Encoder, Kind
from wangen.runtime.needs import Need

ASKED_FROM_BYTES = 64 * 2**20
"""Less is encoded so soon that a disk is found full as quickly by writing; what was encoded stays."""


def require_room(needs: Iterable[Need], encoders: Mapping[Kind, Encoder], model: Model) -> None:
    """Refuse a disk that cannot hold the entries that are not there yet.

    Args:
        needs: what will be encoded; an entry that is valid is replaced, and takes no further room.
        encoders: of every kind among them.
        model: that the cache is for.

    Raises:
        WangenError: the need and what is free.
    """
    added = [need for need in needs if need.verdict.state != "valid"]
    in_folder: Counter[Path] = Counter()
    for need in added:
        in_folder[need.folder.path] += _num_bytes(need, encoders[need.recipe.kind], model)
    for folder, num_bytes, free in full_disks(in_folder):
        if num_bytes >= ASKED_FROM_BYTES:
            raise WangenError(
                f"{many(len(added), 'entry', 'entries')} need about {bytes_text(num_bytes)}, "
                f"{bytes_text(free)} are free",
                where=str(folder),
                cure="free space, or give the dataset a cache_directory on another disk",
            )


def _num_bytes(need: Need, encoder: Encoder, model: Model) -> int:
    """About what an entry holds."""
    content, kind = need.recipe.content, need.recipe.kind
    if kind in TEXT_KINDS:
        return text_bytes(model, str(content["caption"]), encoder.dtype, len(content.get("controls", ())))
    if kind == "clip":
        return CLIP_NUMBERS * width_of(encoder.dtype)
    size, num_frames = (content["width"], content["height"]), content["frames"]
    if kind == "mask":
        return mask_bytes(model, size, num_frames)
    return latent_bytes(model, size, num_frames, encoder.dtype)
