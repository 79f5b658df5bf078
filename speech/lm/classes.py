"""The class language model: p(w | h) = p(w | class of w) p(class of w | classes of h).

Classes are found by the exchange algorithm (Kneser and Ney 1993; Martin, Liermann and Ney 1998, "Algorithms for bigram
and trigram word clustering"): each word in turn moves to the class in which the likelihood of the text under a class
bigram model is highest, until none moves. To begin with, the most frequent words have a class each, all others share
the last one. The classes of a history are predicted by an n-gram model with Witten-Bell smoothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
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
from speech.lm.exchange import exchanged
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
    numbers = ngrams.words.indices([str(one) for one in classes.tolist()])
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
        labels = [str(one) for one in classes[ids].tolist()]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield " ".join(labels[start + 1 : end])
