"""Which cards this machine has and what of them is free, as the drivers' own tools say it: without torch."""

import json

from wangen.generator.cards import Gpu, find_card
from wangen.generator.setup import hardware


def seen() -> list[Gpu]:
    """The cards of this machine, in the drivers' order; none where no driver answers."""
    found = [_gpu(card.name, card.total, card.total - (card.used or 0)) for card in hardware.cards() if card.total]
    return found or amd(hardware.ask("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json")[1])


def amd(text: str) -> list[Gpu]:
    """From the JSON of `rocm-smi`, in bytes.

    >>> amd('{"card0": {"VRAM Total Memory (B)": "25753026560", "VRAM Total Used Memory (B)": "25753026", '
    ...     '"Card Series": "Radeon RX 7900 XTX"}}')[0].card.tflops
    122.8
    """
    start = text.find("{")
    try:
        cards = json.loads(text[start:]) if start >= 0 else {}
    except ValueError:
        return []
    found = []
    for _, facts in sorted(cards.items()) if isinstance(cards, dict) else ():
        total = _number(facts, "VRAM Total Memory (B)")
        if total:
            name = next(
                (facts[key] for key in ("Card Series", "Card series", "Card Model") if key in facts), "AMD card"
            )
            found.append(_gpu(str(name), total, total - _number(facts, "VRAM Total Used Memory (B)")))
    return found


def _number(facts: object, key: str) -> int:
    """A number of bytes that stands there as text; 0 where it does not."""
    value = str(facts.get(key, "")) if isinstance(facts, dict) else ""
    return int(value) if value.isdecimal() else 0


def _gpu(name: str, total: int, free: int) -> Gpu:
    found = find_card(name)
    return Gpu(name, total, free, found[1] if found else None)
