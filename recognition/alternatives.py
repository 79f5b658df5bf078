"""The best hypotheses of a recording, from those of the pieces that it was cut into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from speech.decoding import Hypothesis
from speech.hypotheses import Word
from speech.words import FrameTimes, placed_words


@dataclass(frozen=True)
class TimedAlternative:
    """One of the best hypotheses of a recording."""

    text: str
    """Its words."""
    score: float
    """What the search gave it; of several pieces, the sum."""
    posterior: float
    """Its probability, given that one of the hypotheses is right; of several pieces, the product."""
    words: tuple[Word, ...] = ()
    """The words with their times, from searches of words."""


NOTHING = TimedAlternative("", 0.0, 1.0)
"""The only hypothesis of a piece without any."""


def timed_alternatives(hypothesis: Hypothesis, times: FrameTimes | None) -> list[TimedAlternative]:
    """The best hypotheses of a piece; itself if there are no others.

    Args:
        hypothesis: What the decoder found.
        times: Of the frames; None if the search does not know when the words are.
    """
    if not hypothesis.nbest:
        return [TimedAlternative(hypothesis.text, hypothesis.score, 1.0)]
    return [
        TimedAlternative(
            alternative.text,
            alternative.score,
            alternative.posterior,
            tuple(placed_words(alternative.text, alternative.word_frames, alternative.word_confidences, times))
            if times
            else (),
        )
        for alternative in hypothesis.nbest
    ]


def joined_confidence(hypotheses: Sequence[Hypothesis]) -> float:
    """The mean confidence of the tokens of consecutive pieces' hypotheses; 0 without any.

    Args:
        hypotheses: Of each piece; a search of states has words instead of tokens.
    """
    sizes = [len(hypothesis.tokens) or len(hypothesis.text.split()) for hypothesis in hypotheses]
    total = sum(hypothesis.confidence * size for hypothesis, size in zip(hypotheses, sizes, strict=True))
    return total / sum(sizes) if any(sizes) else 0.0


def joined_language(hypotheses: Sequence[Hypothesis]) -> str:
    """The language of most of the consecutive pieces; empty if it was not looked for."""
    known = Counter(hypothesis.language for hypothesis in hypotheses if hypothesis.language)
    return max(known, key=known.__getitem__, default="")


@dataclass(frozen=True)
class _Chain:
    """A hypothesis of each piece so far.

    Chains share their beginnings, and texts are compared by fingerprints: with whole texts, time and memory would grow
    with the square of a recording's length.
    """

    before: _Chain | None
    last: TimedAlternative
    score: float
    posterior: float
    fingerprint: int
    """Of the words; the same for the same words, however they are divided among the pieces."""

    def joined(self) -> TimedAlternative:
        """The hypothesis of the recording."""
        parts: list[TimedAlternative] = []
        here: _Chain | None = self
        while here is not None:
            parts.append(here.last)
            here = here.before
        parts.reverse()
        text = " ".join(part.text for part in parts if part.text)
        return TimedAlternative(text, self.score, self.posterior, tuple(word for part in parts for word in part.words))


_PRIME = (1 << 127) - 1
"""So large that different texts have the same fingerprint (Karp and Rabin 1987) never in practice."""
_BASE = 0x9E3779B97F4A7C15F39CC0605CEDC835


def _fingerprint(text: str) -> tuple[int, int]:
    """A text's fingerprint, and the factor of what comes before it."""
    words = text.split()
    fingerprint = 0
    for word in words:
        fingerprint = (fingerprint * _BASE + hash(word)) % _PRIME
    return fingerprint, pow(_BASE, len(words), _PRIME)


def joined_alternatives(pieces: Iterable[Sequence[TimedAlternative]], count: int) -> list[TimedAlternative]:
    """The best hypotheses of a recording: the best combinations of its pieces' hypotheses, the best first.

    Args:
        pieces: The hypotheses of each piece, the best first.
        count: How many are asked for.
    """
    best = [_Chain(None, NOTHING, NOTHING.score, NOTHING.posterior, 0)]
    for options in pieces:
        marks = [_fingerprint(option.text) for option in options]
        pairs = [
            (first.score + second.score, (first.fingerprint * factor + own) % _PRIME, first, second)
            for first in best
            for second, (own, factor) in zip(options, marks, strict=True)
        ]
        pairs.sort(key=lambda pair: -pair[0])
        totals: dict[int, float] = {}
        chosen: dict[int, tuple[float, _Chain, TimedAlternative]] = {}
        for score, mark, first, second in pairs:
            totals[mark] = totals.get(mark, 0.0) + first.posterior * second.posterior
            chosen.setdefault(mark, (score, first, second))
        best = [
            _Chain(first, second, score, totals[mark], mark)
            for mark, (score, first, second) in islice(chosen.items(), count)
        ]
    return [option.joined() for option in best]
