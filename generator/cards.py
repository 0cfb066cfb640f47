"""What is known of graphics cards by their names: speed, memory, and the way between them and the host."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from wangen.generator.errors import UsageError
from wangen.generator.memory import GIB


@dataclass(frozen=True)
class CardKind:
    """A graphics card, or the half of one that PyTorch sees as a device.

    Attributes:
        tflops: dense bfloat16 with float32 sums, in TFLOP/s.
        sizes: memory in GiB; several where cards of one name are sold with more or less of it.
        pcie: generation of its PCIe link; 4 where it has another, faster one too.
        amd: AMD made it; else NVIDIA.
    """

    tflops: float
    sizes: tuple[int, ...]
    pcie: int = 4
    amd: bool = False


CARDS: Mapping[str, CardKind] = {
    "B200": CardKind(2250.0, (180,), 5),
    "GB200": CardKind(2500.0, (186,), 5),
    "GH200": CardKind(990.0, (96, 144), 5),
    "H200 NVL": CardKind(835.0, (141,), 5),
    "H200": CardKind(989.0, (141,), 5),
    "H100 NVL": CardKind(835.0, (94,), 5),
    "H100 PCIe": CardKind(756.0, (80,), 5),
    "H100": CardKind(989.0, (80,), 5),
    "H800": CardKind(989.0, (80,), 5),
    "H20": CardKind(148.0, (96,), 5),
    "A100": CardKind(312.0, (40, 80)),
    "A800": CardKind(312.0, (40, 80)),
    "A40": CardKind(149.7, (48,)),
    "A30": CardKind(165.0, (24,)),
    "A10": CardKind(125.0, (24,)),
    "L40S": CardKind(362.0, (48,)),
    "L40": CardKind(181.0, (48,)),
    "L4": CardKind(121.0, (24,)),
    "RTX 6000 Ada": CardKind(364.0, (48,)),
    "RTX A6000": CardKind(154.8, (48,)),
    "RTX 5090": CardKind(209.5, (32,), 5),
    "RTX 5080": CardKind(112.6, (16,), 5),
    "RTX 5070 Ti": CardKind(87.9, (16,), 5),
    "RTX 5070": CardKind(61.7, (12,), 5),
    "RTX 5060 Ti": CardKind(47.4, (8, 16), 5),
    "RTX 4090": CardKind(165.2, (24,)),
    "RTX 4080 SUPER": CardKind(104.4, (16,)),
    "RTX 4080": CardKind(97.5, (16,)),
    "RTX 4070 Ti SUPER": CardKind(88.2, (16,)),
    "RTX 4070 Ti": CardKind(80.2, (12,)),
    "RTX 4070 SUPER": CardKind(71.0, (12,)),
    "RTX 4070": CardKind(58.3, (12,)),
    "RTX 4060 Ti": CardKind(44.1, (8, 16)),
    "RTX 4060": CardKind(30.2, (8,)),
    "RTX 3090 Ti": CardKind(80.0, (24,)),
    "RTX 3090": CardKind(71.0, (24,)),
    "RTX 3080 Ti": CardKind(68.2, (12,)),
    "RTX 3080": CardKind(59.5, (10, 12)),
    "RTX 3070 Ti": CardKind(43.5, (8,)),
    "RTX 3070": CardKind(40.6, (8,)),
    "RTX 3060 Ti": CardKind(32.4, (8,)),
    "RTX 3060": CardKind(25.5, (12,)),
    "MI325X": CardKind(1307.4, (256,), 5, amd=True),
    "MI300X": CardKind(1307.4, (192,), 5, amd=True),
    "MI250X": CardKind(191.5, (64,), amd=True),
    "RX 7900 XTX": CardKind(122.8, (24,), amd=True),
    "RX 7900 XT": CardKind(103.0, (20,), amd=True),
}
"""By a part of the card's name: the makers' data sheets and architecture white papers (NVIDIA Blackwell, Hopper, Ada,
Ampere GA102 and GA100; AMD CDNA 2 and 3, RDNA 3), half of the sparse figure where only that is printed. GeForce cards
do 512 FLOP in a cycle of each SM, which gives those that the papers leave out from their SMs and boost clock. A card
never reaches it: an H100 that multiplies large matrices was measured at 790. PyTorch sees each half of an MI250X."""

VARIANTS = {"ti", "super", "d", "xt", "xtx"}
"""Words behind a card's name that make it another card."""

_SIZE = re.compile(r"\b(\d{1,4}) ?Gi?B?\b", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Gpu:
    """A card that a run is planned for.

    Attributes:
        name: as the driver or the user says it.
        memory: bytes.
        free: bytes that nothing uses now; those of the whole card where it was only named.
        card: what is known of it by its name, if anything.
    """

    name: str
    memory: int
    free: int
    card: CardKind | None

    @property
    def as_named(self) -> str:
        """How a user names it; of one that `card_named` gave, it understands this."""
        size = f"{self.memory / GIB:.0f}GB"
        return size if self.card is None else f"{self.name} {size}"

    def __str__(self) -> str:
        """Its name and memory."""
        return f"{self.name} ({self.memory / GIB:.0f} GiB)"


def find_card(name: str) -> tuple[str, CardKind] | None:
    """The known card whose name is in this one, and that name; None of one that is not known.

    Laptops' chips share names but not speeds, and a variant that is not listed is another card.

    >>> find_card("NVIDIA H100 80GB HBM3")[1].tflops, find_card("NVIDIA GeForce RTX 4090 Laptop GPU")
    (989.0, None)
    """
    words = " " + " ".join(name.replace("-", " ").lower().split()) + " "
    known = [card for card in CARDS if f" {card.lower()} " in words]
    if not known or "laptop" in words or "max q" in words:
        return None
    longest = max(known, key=len)
    following = words.partition(f" {longest.lower()} ")[2].partition(" ")[0]
    return None if following in VARIANTS else (longest, CARDS[longest])


def peak_of_card(name: str) -> float | None:
    """The bfloat16 peak of the card with this name in TFLOP/s; None of one that is not known.

    >>> peak_of_card("NVIDIA H100 PCIe"), peak_of_card("NVIDIA GeForce GTX 1080")
    (756.0, None)
    """
    found = find_card(name)
    return found[1].tflops if found else None


def card_named(text: str) -> Gpu:
    """The card that a user names: `RTX 4090`, `rtx4090`, `A100 80GB`, or only its memory, `24GB` or `24G`.

    Of a card that is sold with several sizes, and none is said, it is the smallest.

    Raises:
        UsageError: it is not known.

    >>> str(card_named("rtx4090")), str(card_named("a100 80gb")), str(card_named("12G"))
    ('RTX 4090 (24 GiB)', 'A100 (80 GiB)', 'a card (12 GiB)')
    """
    size = _SIZE.search(text)
    rest = _SIZE.sub("", text).strip()
    found = find_card(rest) or find_card(re.sub(r"(?<=[a-z])(?=\d)", " ", rest.lower()))
    if found is None and size and not rest and int(size[1]):
        return _gpu("a card", int(size[1]), None)
    if found is None:
        if re.fullmatch(r"\d{1,3}", text.strip()):  # near to a name by chance alone
            raise UsageError(f"--gpu {text} is a number alone", cure=f"of memory: --gpu {text.strip()}GB")
        near = get_close_matches(rest.upper(), CARDS, n=3, cutoff=0.5)
        raise UsageError(f"--gpu {text}: this card is not known",
                         cure=f"did you mean {' or '.join(near)}? Else give its memory alone, such as --gpu 24GB"
                         if near else "give its memory alone, such as --gpu 24GB")  # fmt: skip
    name, card = found
    gib = int(size[1]) if size else min(card.sizes)
    if gib not in card.sizes:
        sizes = " or ".join(f"{each}GB" for each in card.sizes)
        raise UsageError(f"--gpu {text}: a {name} has {sizes}", cure=f'give --gpu "{name}", or --gpu {gib}GB alone')
    return _gpu(name, gib, card)


def _gpu(name: str, gib: int, card: CardKind | None) -> Gpu:
    return Gpu(name, gib * GIB, gib * GIB, card)
