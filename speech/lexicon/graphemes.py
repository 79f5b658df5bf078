"""Graphemes as phones: for languages with a phonemic spelling, and where no lexicon exists."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Literal

from typing_extensions import override

from speech.lexicon.base import Built, Lexicon, LexiconConfig, LexiconSource, Pronunciation, covered


class GraphemesConfig(LexiconConfig):
    """One phone per letter."""

    kind: Literal["graphemes"] = "graphemes"
    marks: bool = True
    """Whether letters with accents are phones of their own; otherwise accents are dropped."""

    @override
    def build(self) -> LexiconSource:
        return Graphemes(self)


def letters(word: str, marks: bool = True) -> tuple[str, ...]:
    """Returns the letters and digits of a word, each with its combining marks; punctuation is dropped.

    Args:
        word: The word, in any Unicode normalization form.
        marks: Whether to keep accents.
    """
    units: list[str] = []
    for character in unicodedata.normalize("NFD", word):
        category = unicodedata.category(character)[0]
        if category == "M":
            if marks and units:
                units[-1] += character
        elif category in "LN":
            units.append(character)
    return tuple(unicodedata.normalize("NFC", unit) for unit in units)


class Graphemes(LexiconSource):
    """Spells every word; words without letters are unknown."""

    cfg: GraphemesConfig

    @override
    def build(self, counts: Mapping[str, int]) -> Built:
        spelled = {word: letters(word, self.cfg.marks) for word in counts}
        entries = {word: [Pronunciation(phones)] for word, phones in spelled.items() if phones}
        coverage, missing = covered(counts, entries, "graphemes")
        for word in missing:
            coverage.add(word, counts[word], "unknown")
        return Built(Lexicon(entries), coverage)
