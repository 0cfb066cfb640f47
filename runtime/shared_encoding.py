"""Encoding in memory by processes that train together: each encodes its share, and all get what all have made."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wangen.runtime.needs import Need
from wangen.runtime.shards import unit_of
from wangen.runtime.training.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

Place = tuple[Path, str]
"""The folder that an entry belongs to, and its content key."""

PIECE_BYTES = 1 << 28
"""So much goes from all processes together to each at a time: it is in memory twice meanwhile."""


@dataclass(frozen=True)
class Held:
    """An entry that is kept in memory."""

    key: str
    content_key: str
    path: Path
    tensors: "Mapping[str, torch.Tensor]"


def place_of(need: Need) -> Place:
    """Where an entry is looked for."""
    return need.folder.path, need.recipe.content_key


def share_of(needs: Sequence[Need], ranks: Ranks) -> list[Need]:
    """What this process encodes of what all see missing: as many media files, or texts, as each of the others."""
    own = set(ranks.own(list(dict.fromkeys(unit_of(need.recipe) for need in needs))))
    return [need for need in needs if unit_of(need.recipe) in own]


def exchange(held: dict[Place, Held], ranks: Ranks) -> None:
    """Add to what this process holds what the others do; all of them have to come here."""
    if ranks.count == 1:
        return
    pieces = _pieces(dict(held), PIECE_BYTES // ranks.count)
    while any(gathered := ranks.gathered(next(pieces, {}))):
        for number, piece in enumerate(gathered):
            held |= piece if number != ranks.number else {}


def _pieces(held: dict[Place, Held], limit_bytes: int) -> Iterator[dict[Place, Held]]:
    """Entries in groups of about so many bytes, and one at least."""
    piece: dict[Place, Held] = {}
    num_bytes = 0
    for place, entry in held.items():
        # A tensor that is a part of a batch would take the whole batch along.
        tensors = {name: tensor.clone() for name, tensor in entry.tensors.items()}
        piece[place] = replace(entry, tensors=tensors)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if num_bytes >= limit_bytes:
            yield piece
            piece, num_bytes = {}, 0
    yield piece
