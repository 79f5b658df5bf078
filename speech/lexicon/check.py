"""Finds suspicious lexicon entries. Each may be correct: the list is meant for review."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from speech.lexicon.base import Built, Lexicon
from speech.lexicon.graphemes import letters

_RARE = 3
"""A phone with fewer occurrences than this is suspicious."""
_LARGE = 1000
"""Rare phones are only reported in lexicons with more words than this."""
_SCATTER = 4.0
"""A pronunciation is suspicious if its length differs from the expected one by this many standard deviations."""
_DIFFERENCE = 3
"""Smaller differences in length, in phones, are never suspicious."""


@dataclass(frozen=True)
class Suspicion:
    """An entry that may be wrong."""

    kind: str
    """`duplicate`, `short`, `long`, `no letters`, `rare phone` or `quarantined`."""
    word: str
    """The word, or the phone."""
    detail: str
    """Why it is suspicious."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON value."""
        return asdict(self)


def suspicions(built: Built) -> list[Suspicion]:
    """Returns all suspicious entries of a lexicon, grouped by kind."""
    lexicon = built.lexicon
    quarantined = (Suspicion("quarantined", line.text, _place(line.number) + line.reason) for line in built.bad_lines)
    duplicates = (Suspicion("duplicate", word, "the same pronunciation twice") for word in built.duplicates)
    return [*quarantined, *duplicates, *_without_letters(lexicon), *_lengths(lexicon), *_rare_phones(lexicon)]


def _place(number: int) -> str:
    return f"line {number}: " if number else ""


def _spoken(lexicon: Lexicon) -> Iterable[str]:
    return (word for word in lexicon if word != lexicon.unknown and not word.startswith(("<", "!", "#")))


def _without_letters(lexicon: Lexicon) -> Iterator[Suspicion]:
    for word in _spoken(lexicon):
        if not letters(word):
            yield Suspicion("no letters", word, "nothing in it can be pronounced")


def _lengths(lexicon: Lexicon) -> Iterator[Suspicion]:
    """Yields pronunciations that are much shorter or longer than those of other words with as many letters."""
    pairs = [
        (word, pronunciation.phones, len(spelling))
        for word in _spoken(lexicon)
        if (spelling := letters(word))
        for pronunciation in lexicon[word]
    ]
    if not pairs:
        return
    ratios = np.log([len(phones) / count for _, phones, count in pairs])
    middle = float(np.median(ratios))
    # median absolute deviation, scaled to the standard deviation of a normal distribution; the lower bound keeps a
    # single phone in a long word from being reported
    # 1.4826 median absolute deviations are a normal distribution's standard deviation (Hampel 1974)
    scatter = max(1.4826 * float(np.median(np.abs(ratios - middle))), 0.1)
    for (word, phones, count), ratio in zip(pairs, ratios, strict=True):
        expected = count * math.exp(middle)
        if abs(ratio - middle) > _SCATTER * scatter and abs(len(phones) - expected) >= _DIFFERENCE:
            kind = "short" if ratio < middle else "long"
            yield Suspicion(kind, word, f"{' '.join(phones)} ({len(phones)} phones, some {expected:.0f} are usual)")


def _rare_phones(lexicon: Lexicon) -> Iterator[Suspicion]:
    if len(lexicon) <= _LARGE:
        return
    rare = {phone: count for phone, count in lexicon.phones().items() if count < _RARE}
    users: dict[str, list[str]] = {phone: [] for phone in rare}
    for word in _spoken(lexicon):
        for phone in {phone for pronunciation in lexicon[word] for phone in pronunciation.phones} & rare.keys():
            users[phone].append(word)
    for phone, words in users.items():
        if words:
            yield Suspicion("rare phone", phone, f"only in {', '.join(words)}")
