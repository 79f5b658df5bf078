"""What normalization did to a transcript: an exact, reversible list of replacements, and what kind each was.

changes = text_changes("It's 5 o'clock!", "it's five o'clock")
undo_changes("it's five o'clock", changes)   # "It's 5 o'clock!"
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

_PIECES = re.compile(r"\s+|\S+")


@dataclass(frozen=True)
class TextChange:
    """One replacement.

    Attributes:
        start: Where `became` stands in the normalized text, in characters.
        was: What stood there before.
        became: What stands there now.
    """

    start: int
    was: str
    became: str

    @property
    def kind(self) -> str:
        """What was changed: `space`, `case`, `punctuation`, `number`, `encoding` or `spelling`, the first that fits."""
        was, became = (" ".join(text.split()) for text in (self.was, self.became))
        if was == became:
            return "space"
        if was.casefold() == became.casefold():
            return "case"
        if _letters(was) == _letters(became):
            return "punctuation"
        if any(character.isdigit() for character in was):
            return "number"
        if _letters(unicodedata.normalize("NFKC", was)) == _letters(unicodedata.normalize("NFKC", became)):
            return "encoding"
        return "spelling"

    def to_list(self) -> list[int | str]:
        """As JSON: [start, was, became]."""
        return [self.start, self.was, self.became]


def _letters(text: str) -> str:
    """A text without its punctuation, spaces and case."""
    return "".join(c for c in text.casefold() if unicodedata.category(c)[0] in "LNM")


def text_changes(raw: str, normalized: str) -> list[TextChange]:
    """The replacements that turn a transcript into its normalized form, word by word, in order."""
    if raw == normalized:
        return []
    before, after = _PIECES.findall(raw), _PIECES.findall(normalized)
    changes: list[TextChange] = []
    position = 0
    for operation, i, j, k, m in SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes():
        became = "".join(after[k:m])
        if operation != "equal":
            changes.append(TextChange(position, "".join(before[i:j]), became))
        position += len(became)
    return changes


def undo_changes(normalized: str, changes: Sequence[TextChange]) -> str:
    """The transcript before normalization.

    Raises:
        ValueError: The changes are not those of this text.
    """
    parts: list[str] = []
    position = 0
    for change in changes:
        end = change.start + len(change.became)
        if change.start < position or normalized[change.start : end] != change.became:
            raise ValueError(
                f"the text has no {change.became!r} at character {change.start}: these are another's changes"
            )
        parts += [normalized[position : change.start], change.was]
        position = end
    return "".join([*parts, normalized[position:]])


def count_kinds(changes: Iterable[TextChange]) -> Counter[str]:
    """How many changes there are of each kind."""
    return Counter(change.kind for change in changes)
