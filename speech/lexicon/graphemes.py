"""Letters as phones: for languages that are written as they are spoken, and where there is no lexicon."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Literal

from typing_extensions import override

from speech.lexicon.base import Built, Lexicon, LexiconConfig, LexiconSource, Pronunciation, covered


class GraphemesConfig(LexiconConfig):
    """A phone for each letter."""

    kind: Literal["graphemes"] = "graphemes"
    marks: bool = True
    """Whether a letter with its accents is a phone of its own; else accents are dropped."""


def letters(word: str, marks: bool = True) -> tuple[str, ...]:
    """Letters and digits of a word, each with the marks that follow it; punctuation is dropped.

    Args:
        word: In any normalization form.
        marks: Whether accents stay.
    """
    found: list[str] = []
    for character in unicodedata.normalize("NFD", word):
        category = unicodedata.category(character)[0]
        if category == "M":
            if marks and found:
                found[-1] += character
        elif category in "LN":
            found.append(character)
    return tuple(unicodedata.normalize("NFC", one) for one in found)


class Graphemes(LexiconSource):
    """Spells every word; those without letters are unknown."""

    config = GraphemesConfig
    cfg: GraphemesConfig

    @override
    def build(self, counts: Mapping[str, int]) -> Built:
        spelled = {word: letters(word, self.cfg.marks) for word in counts}
        found = {word: [Pronunciation(phones)] for word, phones in spelled.items() if phones}
        coverage, missing = covered(counts, found, "graphemes")
        for word in missing:
            coverage.add(word, counts[word], "unknown")
        return Built(Lexicon(found), coverage)
