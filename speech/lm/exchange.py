"""The exchange algorithm: classes of words that make a class bigram model most likely."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speech.lm.counting import NgramCounts
from speech.lm.vocabulary import SPECIAL

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Neighbours:
    """What stands beside each word, and how often: word w's are `[bounds[w]:bounds[w + 1]]`."""

    bounds: Ints
    words: Ints
    counts: Ints

    def of(self, word: int, classes: Ints, count: int) -> Ints:
        """How often each class stands beside a word, `[classes]`."""
        part = slice(int(self.bounds[word]), int(self.bounds[word + 1]))
        return np.bincount(classes[self.words[part]], self.counts[part], count).astype(np.int64)


def neighbours(bigrams: NgramCounts, width: int) -> tuple[Neighbours, Neighbours]:
    """The words before and after each word."""
    first, second = np.divmod(bigrams.keys, width)
    edges = np.arange(width + 1)
    order = np.argsort(second, kind="stable")
    before = Neighbours(second[order].searchsorted(edges), first[order], bigrams.counts[order])
    return before, Neighbours(first.searchsorted(edges), second, np.asarray(bigrams.counts))


def exchanged(
    unigrams: NgramCounts, bigrams: NgramCounts, num_classes: int, iterations: int
) -> tuple[Ints, list[float]]:
    """Finds classes.

    Args:
        unigrams: Counts of words.
        bigrams: Counts of pairs of words.
        num_classes: Number of classes besides those of the special words, which stay alone.
        iterations: How often every word may move, at most.

    Returns:
        The class of each word, `[words]`, and the log likelihood (natural) of the text before the first iteration and
        after each.
    """
    width = len(unigrams.keys)
    by_count = len(SPECIAL) + np.argsort(-unigrams.counts[len(SPECIAL) :], kind="stable")
    total = len(SPECIAL) + min(num_classes, len(by_count))
    classes = np.full(width, total - 1)
    classes[: len(SPECIAL)] = np.arange(len(SPECIAL))
    classes[by_count[: total - len(SPECIAL)]] = np.arange(len(SPECIAL), total)
    clustering = Clustering(unigrams, bigrams, classes, total)
    likelihoods = [clustering.log_likelihood()]
    for _ in range(iterations):
        moved = sum(clustering.improve(int(word)) for word in by_count)
        likelihoods.append(clustering.log_likelihood())
        if not moved:
            break
    return clustering.classes, likelihoods


class Clustering:
    """Classes of words, and the counts of pairs of classes that go with them."""

    def __init__(self, unigrams: NgramCounts, bigrams: NgramCounts, classes: Ints, num_classes: int) -> None:
        self.classes, self.num_classes = classes.copy(), num_classes
        width = len(classes)
        first, second = np.divmod(bigrams.keys, width)
        self.firsts = np.bincount(first, bigrams.counts, width).astype(np.int64)
        self.seconds = np.bincount(second, bigrams.counts, width).astype(np.int64)
        self.before, self.after = neighbours(bigrams, width)
        pairs = np.bincount(classes[first] * num_classes + classes[second], bigrams.counts, num_classes**2)
        self.pairs = pairs.astype(np.int64).reshape(num_classes, num_classes)
        self.same = np.zeros(width, dtype=np.int64)  # how often a word follows itself
        self.same[first[first == second]] = bigrams.counts[first == second]

    def log_likelihood(self) -> float:
        """Natural log likelihood of the text under the class bigram model with relative frequencies."""
        rows, columns = self.pairs.sum(axis=1), self.pairs.sum(axis=0)
        words = _xlogx(self.seconds).sum()  # p(w | class) = count of w / count of the class
        return float(_xlogx(self.pairs).sum() - _xlogx(rows).sum() - _xlogx(columns).sum() + words)

    def improve(self, word: int) -> bool:
        """Moves a word to its best class; says whether it moved."""
        home = int(self.classes[word])
        before = self.before.of(word, self.classes, self.num_classes)
        after = self.after.of(word, self.classes, self.num_classes)
        same = int(self.same[word])
        before[home] -= same  # pairs of the word with itself move as a whole
        after[home] -= same
        self._shift(word, home, before, after, -1)
        gains = self._gains(word, before, after)
        best = len(SPECIAL) + int(np.argmax(gains[len(SPECIAL) :]))
        if gains[best] <= gains[home] + 1e-9 * (1 + abs(gains[home])):
            best = home
        self._shift(word, best, before, after, 1)
        self.classes[word] = best
        return best != home

    def _shift(self, word: int, at: int, before: Ints, after: Ints, sign: int) -> None:
        self.pairs[:, at] += sign * before
        self.pairs[at, :] += sign * after
        self.pairs[at, at] += sign * self.same[word]

    def _gains(self, word: int, before: Ints, after: Ints) -> Floats:
        """What the log likelihood gains when a word that is in no class joins each class, `[classes]`."""
        pairs = self.pairs
        left, right = np.flatnonzero(before), np.flatnonzero(after)
        gains = (_xlogx(pairs[left] + before[left, None]) - _xlogx(pairs[left])).sum(axis=0)
        gains += (_xlogx(pairs[:, right] + after[right]) - _xlogx(pairs[:, right])).sum(axis=1)
        own = np.diag(pairs)
        # The pair of a class with itself grows by both sides at once.
        gains += _xlogx(own + before + after + self.same[word]) + _xlogx(own)
        gains -= _xlogx(own + before) + _xlogx(own + after)
        # Totals of the classes without the word; its pairs with others are not in `pairs` now, but are in any class.
        rows, columns = pairs.sum(axis=1) + before, pairs.sum(axis=0) + after
        gains -= _xlogx(rows + self.firsts[word]) - _xlogx(rows)
        gains -= _xlogx(columns + self.seconds[word]) - _xlogx(columns)
        return gains  # type: ignore[no-any-return]


def _xlogx(values: Ints) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values > 0, values * np.log(np.maximum(values, 1)), 0.0)
