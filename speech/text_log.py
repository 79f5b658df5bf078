"""The changes that normalization made to a transcript: an exact, reversible list of replacements with their kinds.

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
        start: Position of `became` in the normalized text, in characters.
        was: The original text.
        became: The normalized text.
    """

    start: int
    was: str
    became: str

    @property
    def kind(self) -> str:
        """Kind of change: the first that fits of `space`, `case`, `punctuation`, `number`, `encoding`, `spelling`."""
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
    """The replacements that turn a transcript into its normalized form, in order.

    Changes are word by word, but consecutive words that differ only in case form one change.
    """
    if raw == normalized:
        return []
    before, after = _PIECES.findall(raw), _PIECES.findall(normalized)
    # match words from both ends while they are alike; only the middle needs a search
    head = _count_alike(before, after)
    tail = _count_alike(before[head:][::-1], after[head:][::-1])
    stop, end = len(before) - tail, len(after) - tail
    blocks = [(i, i + 1, i, i + 1) for i in range(head)]
    blocks += _blocks(before[head:stop], after[head:end], head)
    blocks += [(stop + i, stop + i + 1, end + i, end + i + 1) for i in range(tail)]
    changes: list[TextChange] = []
    position = 0
    for i, j, k, m in blocks:
        was, became = "".join(before[i:j]), "".join(after[k:m])
        if was != became:
            changes.append(TextChange(position, was, became))
        position += len(became)
    return _join_cases(changes, normalized)


def _join_cases(changes: list[TextChange], normalized: str) -> list[TextChange]:
    """Merge changes of case that only white space separates: a corpus in capitals would have one for each word."""
    joined: list[TextChange] = []
    for change in changes:
        last = joined[-1] if joined else TextChange(0, "", "")
        gap = normalized[last.start + len(last.became) : change.start]
        if last.was and gap.isspace() and _only_case(last) and _only_case(change):
            joined[-1] = TextChange(last.start, last.was + gap + change.was, last.became + gap + change.became)
        else:
            joined.append(change)
    return joined


def _only_case(change: TextChange) -> bool:
    return change.was.casefold() == change.became.casefold()


def _count_alike(before: list[str], after: list[str]) -> int:
    """Number of leading pieces that differ only in case and punctuation."""
    count = 0
    for was, became in zip(before, after, strict=False):
        if was != became and (was.isspace() or became.isspace() or _letters(was) != _letters(became)):
            break
        count += 1
    return count


def _blocks(before: list[str], after: list[str], offset: int) -> list[tuple[int, int, int, int]]:
    """Matching ranges of the two lists of pieces, in order, shifted by an offset."""
    if not before and not after:
        return []
    codes = SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes()
    return [(i + offset, j + offset, k + offset, m + offset) for _, i, j, k, m in codes]


def undo_changes(normalized: str, changes: Sequence[TextChange]) -> str:
    """The transcript before normalization.

    Raises:
        ValueError: The changes belong to another text.
    """
    parts: list[str] = []
    position = 0
    for change in changes:
        end = change.start + len(change.became)
        if change.start < position or normalized[change.start : end] != change.became:
            raise ValueError(
                f"the text has no {change.became!r} at character {change.start}: these are the changes of another text"
            )
        parts += [normalized[position : change.start], change.was]
        position = end
    return "".join([*parts, normalized[position:]])


def count_kinds(changes: Iterable[TextChange]) -> Counter[str]:
    """Count the changes of each kind."""
    return Counter(change.kind for change in changes)
