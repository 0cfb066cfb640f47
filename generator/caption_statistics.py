"""What many captions have in common: lengths, phrases that a large part of them shares, captions that are equal."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

SHARE, LEAST_CAPTIONS = 0.3, 3
"""A phrase is told of when so large a part of the captions has it, and at least so many."""
SHORTEST, LONGEST = 3, 8
"""Of a phrase, in words."""
_ALIKE = 0.8
"""A phrase within a longer one is told of too when the longer one is rarer than this."""
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")

Phrase = tuple[str, ...]


@dataclass(frozen=True)
class Statistics:
    """What some captions have in common.

    Attributes:
        number: of captions.
        shortest: words of the shortest; 0 of no captions, as the next two.
        median: words of the one in the middle.
        longest: words of the longest.
        phrases: phrase -> how many captions have it, the most frequent first.
        equal: the names of captions that say the same, a group each.
    """

    number: int
    shortest: int
    median: float
    longest: int
    phrases: Mapping[str, int]
    equal: Sequence[Sequence[str]]


def statistics_of(captions: Mapping[str, str], trigger: str = "") -> Statistics:
    """The statistics of captions by name; the trigger word in front, which all of them have, is no phrase.

    >>> found = statistics_of({"a": "A red cat sits.", "b": "a red cat sleeps", "c": "a red cat", "d": "a red cat"})
    >>> dict(found.phrases), found.equal, found.median
    ({'a red cat': 4}, [['c', 'd']], 3.5)
    """
    texts = {name: tuple(_WORD.findall(text.removeprefix(trigger).lower())) for name, text in captions.items()}
    lengths = [len(words) for words in texts.values()] or [0]
    groups: dict[Phrase, list[str]] = {}
    for name, words in texts.items():
        groups.setdefault(words, []).append(name)
    return Statistics(
        number=len(texts),
        shortest=min(lengths),
        median=median(lengths),
        longest=max(lengths),
        phrases={" ".join(phrase): count for phrase, count in _shared(texts.values()).items()},
        equal=[names for names in groups.values() if len(names) > 1],
    )


def _shared(texts: Iterable[Phrase]) -> dict[Phrase, int]:
    """The longest phrases that many texts share, with how many do."""
    texts = list(texts)
    least = max(LEAST_CAPTIONS, SHARE * len(texts))
    found: dict[Phrase, int] = {}
    known: dict[Phrase, int] = {}
    for length in range(SHORTEST, LONGEST + 1):
        counts = Counter(phrase for words in texts for phrase in {
            words[start : start + length] for start in range(len(words) - length + 1)
            if length == SHORTEST
            # What is frequent consists of what is frequent: the others need not be counted.
            or (words[start : start + length - 1] in known and words[start + 1 : start + length] in known)
        })  # fmt: skip
        known = {phrase: count for phrase, count in counts.items() if count >= least}
        for phrase, count in known.items():
            for part in (phrase[:-1], phrase[1:]):
                if found.get(part, 0) * _ALIKE <= count:
                    found.pop(part, None)
        found |= known
    return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))
