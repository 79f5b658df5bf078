"""Transcripts in the written form that a model uses: capitals, punctuation and digits come back.

Corpora of read speech have transcripts in one case without punctuation, and a model that was trained on texts of the
web writes neither so. Training on such transcripts makes it unlearn how words are written. What the model itself writes
has the form, and the transcript has the words: each word that the model has recognized stays as it has written it, and
the others are the transcript's.

    restored("it was mister thirty", "It was Mr. 30.", normalizer)   # "It was mister 30."
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from speech.scoring.align import Step, align
from speech.text import TextNormalizer

_TAIL = re.compile(r"[^\w\s]+$")
"""Punctuation at the end of a word."""
_ENDS = (".", "!", "?", "…", "。", "！", "？", "؟", "।")
"""What ends a sentence, perhaps before a closing quotation mark."""
_CLOSING = "\"'”’»)]"
_ABBREVIATIONS = frozenset({"mr.", "mrs.", "ms.", "dr.", "st.", "jr.", "sr.", "mt.", "prof.", "capt.", "col.", "gen."})
"""Titles, whose full stop belongs to them and ends no sentence."""


def restored(text: str, written: str, normalizer: TextNormalizer, language: str = "", most_errors: float = 0.5) -> str:
    """A transcript in the form in which a model has written what it has recognized.

    Args:
        text: The transcript, normalized.
        written: What the model has written.
        normalizer: What has normalized the transcript.
        language: A BCP 47 tag, for the normalizer.
        most_errors: Word error rate above which what the model has written says nothing about the transcript: it has
            heard something else, or repeats itself.

    Returns:
        A text whose normalized form is the transcript; the transcript itself where the form cannot be had.
    """
    words = text.split()
    chunks = [_Chunk(chunk, normalizer.normalize(chunk, language).split()) for chunk in written.split()]
    steps = align(words, [word for chunk in chunks for word in chunk.words])
    errors = sum(operation != "cor" for operation, _, _ in steps)
    parts = _merged(steps, chunks) if errors <= most_errors * len(words) else words
    form = _as_sentence(parts, ends=parts is words)
    return form if normalizer.normalize(form, language) == text else text


class _Chunk:
    """What is written between two spaces.

    Attributes:
        written: As the model writes it.
        words: The normalized words that it stands for: several for a number, none for a dash.
    """

    def __init__(self, written: str, words: Sequence[str]) -> None:
        self.written, self.words = written, list(words)

    @property
    def tail(self) -> str:
        """Punctuation at its end."""
        match = None if self.written.lower() in _ABBREVIATIONS else _TAIL.search(self.written)
        return match[0] if match else ""

    @property
    def ends(self) -> bool:
        """Whether a sentence ends with it."""
        return self.tail.rstrip(_CLOSING).endswith(_ENDS)


def _merged(steps: Sequence[Step], chunks: Sequence[_Chunk]) -> list[str]:
    """The words of a transcript, those of chunks that are right as they are written.

    A chunk is right if all its words are, with no other one between them. What is written for a wrong one gives its
    place in the sentence and the punctuation behind it.
    """
    parts: list[str] = []
    place = 0
    begins = True  # whether a sentence begins here
    for chunk in chunks:
        if not chunk.words:
            continue
        own: list[Step] = []
        while sum(step[2] is not None for step in own) < len(chunk.words):
            own.append(steps[place])
            place += 1
        while own and own[0][0] == "del":  # missed before this chunk
            parts.append(_capital(str(own.pop(0)[1]), begins))
            begins = False
        if all(operation == "cor" for operation, _, _ in own):
            parts.append(chunk.written)
        elif words := [ref for _, ref, _ in own if ref is not None]:
            parts += [_capital(words[0], begins), *words[1:]]
            parts[-1] += chunk.tail
        begins = chunk.ends
    return [*parts, *(str(ref) for _, ref, _ in steps[place:] if ref is not None)]


def _capital(word: str, begins: bool) -> str:
    """A word with a capital, if a sentence begins with it."""
    return word[:1].upper() + word[1:] if begins else word


def _as_sentence(parts: Sequence[str], ends: bool) -> str:
    """Words with a capital at the beginning, and with a full stop behind them if that must be added."""
    return _capital(" ".join(parts), True) + ("." if ends else "")
