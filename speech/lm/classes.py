"""The class language model: p(w | h) = p(w | class of w) p(class of w | classes of h).

Classes are found by the exchange algorithm (Kneser and Ney 1993; Martin, Liermann and Ney 1998, "Algorithms for bigram
and trigram word clustering"): each word in turn moves to the class in which the likelihood of the text under a class
bigram model is highest, until none moves. To begin with, the most frequent words have a class each, all others share
the last one. The classes of a history are predicted by an n-gram model with Witten-Bell smoothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from speech.lm.arpa import read_arpa, write_arpa
from speech.lm.base import Estimator, LanguageModel, LmConfig, LmError, States
from speech.lm.counting import NgramCounts, count_ngrams
from speech.lm.encoding import EncodedText, encode_lines, encode_text
from speech.lm.estimation import smoothed
from speech.lm.ngram import LOWEST, NgramModel
from speech.lm.sources import Text
from speech.lm.vocabulary import END_ID, SPECIAL, START_ID, UNKNOWN_ID, Vocabulary

if TYPE_CHECKING:
    from speech.lm.network import NetworkTrainer


class ClassConfig(LmConfig):
    """Word classes found by the exchange algorithm, and n-grams of classes."""

    kind: Literal["class"] = "class"
    order: int = Field(default=3, ge=1, le=12)
    """Number of classes of the longest n-grams."""
    classes: int = Field(default=100, ge=1)
    """Number of classes."""
    iterations: int = Field(default=10, ge=0)
    """How often every word may move, at most."""

    @override
    def build(self, trainer: NetworkTrainer | None = None) -> Estimator:
        return ClassEstimator(self, trainer)


class ClassModel(LanguageModel):
    """Words by their classes; a state is that of the model of the classes.

    Args:
        words: The words.
        classes: For each word the number of its class in `ngrams.words`, `[words]`; special words are their own.
        log_probs: log10 p of each word in its class, `[words]`.
        ngrams: The model of the classes.
    """

    def __init__(
        self, words: Vocabulary, classes: NDArray[np.int64], log_probs: NDArray[np.float64], ngrams: NgramModel
    ) -> None:
        self.words, self.classes, self.log_probs, self.ngrams = words, classes, log_probs, ngrams
        self.start = ngrams.start

    @override
    def score(self, state: int, word: int) -> tuple[int, float]:
        after, log_prob = self.ngrams.score(state, int(self.classes[word]))
        return after, log_prob + float(self.log_probs[word])

    @override
    def score_batch(self, states: States, words: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        after, log_probs = self.ngrams.score_batch(states, self.classes[words])
        return after, log_probs + self.log_probs[words]

    @override
    def starts(self, count: int) -> NDArray[np.int64]:
        return self.ngrams.starts(count)


class ClassEstimator(Estimator):
    """Clusters words, and writes `classes.arpa` and `classes.tsv` (word, class, log10 p of the word in its class)."""

    cfg: ClassConfig

    @override
    def estimate(self, text: Text, folder: Path, workers: int = 1) -> tuple[ClassModel, dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix=".lm-", dir=folder) as scratch:
            encoded = encode_text(text, Path(scratch))
            unigrams, bigrams = count_ngrams(encoded, 2, Path(scratch), workers)
            classes, likelihoods = exchanged(unigrams, bigrams, self.cfg.classes, self.cfg.iterations)
            model = _model(encoded, unigrams, classes, self.cfg.order, Path(scratch) / "classes", workers)
        write_arpa(model.ngrams, folder / "classes.arpa")
        rows = (
            f"{word}\t{model.ngrams.words[int(model.classes[at])]}\t{float(model.log_probs[at])!r}\n"
            for at, word in enumerate(model.words)
        )
        (folder / "classes.tsv").write_text("".join(rows), encoding="utf-8")
        facts = {
            "text": dict(encoded.counts),
            "classes": len(model.ngrams.words) - len(SPECIAL),
            "ngrams": list(model.ngrams.tables.counts),
            "log_likelihoods": likelihoods,
        }
        return model, facts

    @override
    def load(self, folder: Path) -> ClassModel:
        ngrams = read_arpa(folder / "classes.arpa")
        path = folder / "classes.tsv"
        try:
            rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
            words, names, log_probs = zip(*rows, strict=True)
            values = np.array(log_probs, dtype=np.float64)
        except (OSError, ValueError) as error:
            raise LmError(f"{path}: the classes cannot be read: {error}; estimate the model again") from error
        return ClassModel(Vocabulary(words), ngrams.words.indices(names), values, ngrams)


def _model(
    text: EncodedText, unigrams: NgramCounts, classes: NDArray[np.int64], order: int, scratch: Path, workers: int
) -> ClassModel:
    scratch.mkdir()
    encoded = encode_lines(_class_lines(text, classes), scratch)
    ngrams, _ = smoothed(encoded.words, count_ngrams(encoded, order, scratch, workers), "witten-bell", scratch)
    numbers = ngrams.words.indices([str(label) for label in classes.tolist()])
    numbers[: len(SPECIAL)] = UNKNOWN_ID, START_ID, END_ID
    counts = unigrams.counts.astype(np.float64)
    totals = np.bincount(numbers, counts, len(ngrams.words))
    with np.errstate(divide="ignore", invalid="ignore"):
        log_probs = np.maximum(np.log10(counts / totals[numbers]), LOWEST)
    log_probs[: len(SPECIAL)] = 0.0
    return ClassModel(text.words, numbers, log_probs, ngrams)


def _class_lines(text: EncodedText, classes: NDArray[np.int64]) -> Iterator[str]:
    """The text with classes in place of words."""
    for ids in text.sentences():
        starts, ends = np.flatnonzero(ids == START_ID), np.flatnonzero(ids == END_ID)
        labels = [str(label) for label in classes[ids].tolist()]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield " ".join(labels[start + 1 : end])


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
