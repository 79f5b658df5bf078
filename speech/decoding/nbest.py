"""Posteriors over the hypotheses that a search ended with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from speech.decoding.word_search import WordPath


def posteriors(scores: Sequence[float]) -> list[float]:
    """Probabilities of hypotheses, given that one of them is right (Wessel et al. 2001).

    Args:
        scores: Their natural log probabilities.
    """
    values = np.asarray(scores, dtype=np.float64)
    shares = np.exp(values - values.max())
    found: list[float] = (shares / shares.sum()).tolist()
    return found


def word_confidences(found: Sequence[WordPath], shares: Sequence[float]) -> list[float]:
    """For each word of the first hypothesis, the posteriors of those that have it at overlapping times, added up.

    Args:
        found: Hypotheses, the best first.
        shares: Their posteriors.
    """
    best = found[0]
    totals = np.zeros(len(best.words))
    for other, share in zip(found, shares, strict=True):
        places: dict[str, list[tuple[int, int]]] = {}
        for word, span in zip(other.words, other.spans, strict=True):
            places.setdefault(word, []).append(span)
        for number, (word, (begin, end)) in enumerate(zip(best.words, best.spans, strict=True)):
            totals[number] += share * any(first < end and begin < last for first, last in places.get(word, ()))
    return [min(1.0, float(total)) for total in totals]
