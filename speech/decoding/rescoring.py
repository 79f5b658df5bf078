"""Ranking the best hypotheses again with a second language model, such as one that is too large for the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from speech.decoding.hot_words import BiasedConfig
from speech.decoding.nbest import WordPath
from speech.lm.kenlm import FlashlightLm, KenlmModel, arpa_words, load_lm
from speech.lm.network import MODEL, read_network

SentenceScorer = Callable[[Sequence[Sequence[str]]], list[float]]


class RescoredConfig(BiasedConfig):
    """Base class of configurations of decoders whose hypotheses can be ranked again."""

    nbest: int = Field(default=1, ge=1)
    """Number of hypotheses that are given of each utterance."""
    rescore_lm: str = ""
    """Second language model of words, with which the best hypotheses are ranked again: an ARPA file (also .gz), a
    KenLM binary, or a network (`lm.safetensors`). Empty: none."""
    rescore_weight: float = Field(default=1.0, ge=0)
    """Share of the second language model's log probabilities; the first one has the rest: 0 leaves the ranks as they
    are, 1 replaces the first one."""
    rescore_nbest: int = Field(default=100, ge=1)
    """Number of hypotheses that are ranked again."""

    @property
    def ranks_again(self) -> bool:
        """Whether hypotheses are ranked by anything that the search does not know."""
        return bool(self.rescore_lm)

    @property
    def hypotheses(self) -> int:
        """Number of hypotheses that the search is asked for."""
        return max(self.nbest, self.rescore_nbest if self.ranks_again else 1)


class Rescorer:
    """Takes a first language model out of hypotheses' scores and puts a second one in.

    Args:
        first: The search's language model: an ARPA file or KenLM binary; empty if it used none.
        second: The other one; it may be a network, too.
        words: What can be recognized. Words that a model lacks have the probability of its `<unk>`.

    Raises:
        LmError: A file cannot be read.
        LmError: A network cannot be read.
    """

    def __init__(self, first: str, second: str, words: Sequence[str]) -> None:
        self._first, self._second = _scorer(first, words), _scorer(second, words)

    def __call__(self, paths: Sequence[WordPath], weight: float, factor: float) -> list[WordPath]:
        """Hypotheses with other scores, the best first.

        Args:
            paths: The hypotheses.
            weight: Share of the second language model, the first has the rest.
            factor: What the search multiplies log10 probabilities with.
        """
        if not weight:
            return list(paths)
        sentences = [path.words for path in paths]
        pairs = zip(self._second(sentences), self._first(sentences), strict=True)
        ranked = [
            replace(path, score=path.score + weight * factor * (second - first))
            for path, (second, first) in zip(paths, pairs, strict=True)
        ]
        return sorted(ranked, key=lambda path: -path.score)


def open_vocabulary_scorer(path: str) -> SentenceScorer:
    """What gives log10 of the probabilities of sentences of any words; unknown ones have that of its `<unk>`.

    Args:
        path: An ARPA file (also .gz), or a network.

    Raises:
        LmError: It cannot be read, or is a KenLM binary, whose words cannot be listed.
    """
    network = path.endswith(Path(MODEL).suffix)
    model = read_network(Path(path)) if network else KenlmModel(path, arpa_words(path, "give the ARPA file itself"))
    return lambda sentences: [float(log_probs.sum()) for log_probs in model.sentences(sentences)]


def _scorer(path: str, words: Sequence[str]) -> SentenceScorer:
    """What gives log10 of the probabilities of sentences, their ends included."""
    if path.endswith(Path(MODEL).suffix):
        network = read_network(Path(path))
        return lambda sentences: [float(log_probs.sum()) for log_probs in network.sentences(sentences)]
    model, labels = load_lm(path, words), {word: label for label, word in enumerate(words)}
    return lambda sentences: [_log10(model, [labels[word] for word in sentence]) for sentence in sentences]


def _log10(model: FlashlightLm, labels: Sequence[int]) -> float:
    """log10 of the probability of a sentence, its end included."""
    state, total = model.start(False), 0.0
    for label in labels:
        state, log_prob = model.score(state, label)
        total += log_prob
    return total + model.finish(state)[1]
