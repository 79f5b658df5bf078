"""Lists of the best hypotheses: posteriors, confidences of words, joining the lists of a recording's pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speech.decoding.base import Alternative


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
    found: list[float] = (shares / shares.sum()).tolist()
    return found


def word_confidences(found: Sequence[WordPath], shares: Sequence[float], which: int = 0) -> list[float]:
    """For each word of a hypothesis, the posteriors of those that have it at overlapping times, added up.

    Args:
        found: Hypotheses, the best first.
        shares: Their posteriors.
        which: Number of the hypothesis.
    """
    chosen = found[which]
    totals = np.zeros(len(chosen.words))
    for other, share in zip(found, shares, strict=True):
        places: dict[str, list[tuple[int, int]]] = {}
        for word, span in zip(other.words, other.spans, strict=True):
            places.setdefault(word, []).append(span)
        for number, (word, (begin, end)) in enumerate(zip(chosen.words, chosen.spans, strict=True)):
            totals[number] += share * any(first < end and begin < last for first, last in places.get(word, ()))
    return [min(1.0, float(total)) for total in totals]


def silence_posterior(found: Sequence[WordPath], shares: Sequence[float]) -> float:
    """The posterior of hypotheses without words."""
    return min(1.0, sum(share for one, share in zip(found, shares, strict=True) if not one.words))


def alternatives(found: Sequence[WordPath], shares: Sequence[float], count: int) -> list[Alternative]:
    """The best hypotheses, as a decoder gives them; none unless more than one is asked for.

    Args:
        found: Hypotheses, the best first.
        shares: Their posteriors.
        count: How many are asked for.
    """
    if count < 2:
        return []
    return [
        Alternative(" ".join(one.words), one.score, share, list(one.spans), word_confidences(found, shares, number))
        for number, (one, share) in enumerate(zip(found[:count], shares, strict=False))
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
