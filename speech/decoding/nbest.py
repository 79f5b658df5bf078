"""Lists of the best hypotheses: posteriors, confidences of words, joining the lists of a recording's pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speech.hypotheses import Alternative


@dataclass(frozen=True)
class WordPath:
    """A word sequence with its best alignment."""

    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    """For each word the first output frame, and the one after its last."""
    path: NDArray[np.integer[Any]]
    """Token or tied state of each frame."""
    score: float
    """Natural log probability, with what the language model and word scores add."""


def posteriors(scores: Sequence[float]) -> list[float]:
    """Probabilities of hypotheses, given that one of them is right (Wessel et al. 2001).

    Args:
        scores: Their natural log probabilities.
    """
    values = np.asarray(scores, dtype=np.float64)
    shares = np.exp(values - values.max())
    normalized: list[float] = (shares / shares.sum()).tolist()
    return normalized


class _WordPosteriors:
    """Posteriors of words at their times, over the hypotheses of an utterance.

    Hypotheses share most words and times, so a word at a time is computed once.

    Args:
        paths: Hypotheses.
        shares: Their posteriors.
    """

    def __init__(self, paths: Sequence[WordPath], shares: Sequence[float]) -> None:
        self._shares = np.asarray(shares, dtype=np.float64)
        places: dict[str, list[tuple[int, int, int]]] = {}
        for number, path in enumerate(paths):
            for word, (begin, end) in zip(path.words, path.spans, strict=True):
                places.setdefault(word, []).append((begin, end, number))
        self._places = {word: np.array(spans).T for word, spans in places.items()}
        self._known: dict[tuple[str, tuple[int, int]], float] = {}

    def __call__(self, path: WordPath) -> list[float]:
        """For each word of a hypothesis, the posteriors of those that have it at overlapping times, added up."""
        return [self._posterior(word, span) for word, span in zip(path.words, path.spans, strict=True)]

    def _posterior(self, word: str, span: tuple[int, int]) -> float:
        if (word, span) not in self._known:
            begins, ends, numbers = self._places[word]
            having = np.unique(numbers[(begins < span[1]) & (span[0] < ends)])
            self._known[word, span] = min(1.0, float(self._shares[having].sum()))
        return self._known[word, span]


def word_confidences(paths: Sequence[WordPath], shares: Sequence[float]) -> list[float]:
    """For each word of the first hypothesis, the posteriors of those that have it at overlapping times, added up.

    Args:
        paths: Hypotheses, the best first.
        shares: Their posteriors.
    """
    return _WordPosteriors(paths, shares)(paths[0])


def silence_posterior(paths: Sequence[WordPath], shares: Sequence[float]) -> float:
    """The posterior of hypotheses without words."""
    return min(1.0, sum(share for path, share in zip(paths, shares, strict=True) if not path.words))


def alternatives(paths: Sequence[WordPath], shares: Sequence[float], count: int) -> list[Alternative]:
    """The best hypotheses, as a decoder gives them; none unless more than one is asked for.

    Args:
        paths: Hypotheses, the best first.
        shares: Their posteriors.
        count: How many are asked for.
    """
    if count < 2:
        return []
    confidences = _WordPosteriors(paths, shares)
    return [
        Alternative(" ".join(path.words), path.score, share, list(path.spans), confidences(path))
        for path, share in zip(paths[:count], shares, strict=False)
    ]


def merged_texts(texts: Sequence[str], scores: Sequence[float], count: int) -> list[Alternative]:
    """The best texts of hypotheses that are token sequences, of which several may have one text.

    A text has the score of its best token sequence, and the posteriors of all, added up.

    Args:
        texts: The hypotheses, the best first.
        scores: Their natural log probabilities.
        count: How many are asked for; none are given unless more than one is.
    """
    if count < 2:
        return []
    totals: dict[str, float] = {}
    best: dict[str, float] = {}
    for text, score, share in zip(texts, scores, posteriors(scores), strict=True):
        totals[text] = totals.get(text, 0.0) + share
        best.setdefault(text, score)
    return [Alternative(text, score, min(1.0, totals[text])) for text, score in list(best.items())[:count]]
