"""What a training says of its data to those that go on from it, in its states and in its LoRAs' headers; without torch.

It has parts: each time that it went on with other data, or began from a LoRA, another one begins. Of each is told what
decides which files were trained on (`DATA`), and which were held out (`HELD_OUT`, made by `training.held_out.as_told`).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from wangen.generator import header_keys

DATA = ("dataset", "validation_items", "seed", "caption_dropout")
"""What of a fingerprint says which files were trained on."""

HELD_OUT = "held_out"
"""In a part, if it is told there: `draws`, a number for each item that is held out, by the seed and its content, and
`lowest`, whether all files whose numbers are below the last one are among them."""

Part = Mapping[str, Any]


def fingerprints(metadata: Mapping[str, str]) -> list[dict[str, Any]]:
    """What a LoRA's header says of its training, part by part, the last one's last; nothing of what is no such text."""
    found = _mappings(metadata.get(header_keys.TRAINED_BEFORE, "[]"))
    last = _mappings(f"[{metadata.get(header_keys.FINGERPRINT, '')}]")
    held_out = _mappings(f"[{metadata.get(header_keys.HELD_OUT, '')}]")
    return [*found, *(told | {HELD_OUT: held_out[0]} if held_out else told for told in last)]


def _mappings(text: str) -> list[dict[str, Any]]:
    with suppress(ValueError, TypeError, RecursionError):
        return [told for told in json.loads(text) if isinstance(told, dict)]
    return []


def may_have_seen(now: Part, before: Iterable[Part]) -> bool:
    """Whether earlier parts of a training may have been trained on what is held out now, as far as they tell.

    Files are held out in the order of numbers that the seed and their content give. What an earlier part held out as
    well was not trained on there. Nor was a file whose number is below the last one that was held out there: it would
    have been held out, so it was added later.
    """
    return not all(_unseen(now, part) for part in before)


def _unseen(now: Part, part: Part) -> bool:
    with suppress(KeyError, TypeError, ValueError):  # an older version's, or somebody else's
        own = now[HELD_OUT]
        return now["seed"] == part["seed"] and all(map(untrained(part, lowest=own["lowest"]), own["draws"]))
    return False


def untrained(part: Part, *, lowest: bool) -> Callable[[int], bool]:
    """Which numbers, drawn by the part's seed, are those of files that were surely not trained on there.

    Args:
        part: with `HELD_OUT`.
        lowest: whether all files that are asked about can be compared so: each is one of its own.

    Raises:
        KeyError, TypeError, ValueError: it is no such part.
    """
    told = part[HELD_OUT]
    known = set(told["draws"])
    last = max(known) if lowest and told["lowest"] else 0
    return lambda draw: draw in known or draw < last
