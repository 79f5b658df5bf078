"""The hidden Markov language model: words come from hidden classes, which follow each other as a Markov chain.

p(w1 … wn) is the sum over all sequences of classes z of p(z1) p(w1 | z1) p(z2 | z1) … p(wn | zn) p(end | zn). The
parameters are estimated by expectation maximization with the forward-backward algorithm (Rabiner 1989, "A tutorial on
hidden Markov models"), with pseudo-counts: of the unigram model for words, uniform ones for classes. An iteration takes
time in proportion to words x classes².
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from configurable.files import replace_file
from speech.files import DAMAGED, check_finite
from speech.lm.base import Estimator, LanguageModel, LmConfig, LmError, States
from speech.lm.encoding import encode_text, load_block
from speech.lm.ngram import LOWEST
from speech.lm.sources import Text
from speech.lm.vocabulary import END_ID, START_ID, UNKNOWN_ID, Vocabulary

if TYPE_CHECKING:
    from speech.lm.network import NetworkTrainer

MODEL = "hmm.safetensors"
_WORDS = "starling.words"
_BATCH = 1024
"""Sentences of similar length that the forward-backward algorithm works on at once."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class HiddenClassConfig(LmConfig):
    """Hidden classes of words that form a Markov chain."""

    kind: Literal["hmm"] = "hmm"
    classes: int = Field(default=20, ge=1)
    """Number of hidden classes."""
    iterations: int = Field(default=20, ge=1)
    """Iterations of expectation maximization."""
    pseudo_count: float = Field(default=1.0, gt=0)
    """Observations that are added for each class: of words by their frequency, and of all following classes alike."""

    @override
    def build(self, trainer: NetworkTrainer | None = None) -> Estimator:
        return HiddenClassEstimator(self, trainer)


@dataclass(frozen=True)
class HiddenClasses:
    """Parameters of a hidden Markov model of sentences; each row sums to one."""

    first: Floats
    """p(first class) `[classes + 1]`; the last one is the end of the sentence: no word at all."""
    following: Floats
    """p(next class | class) `[classes, classes + 1]`, the last column is the end of the sentence."""
    words: Floats
    """p(word | class) `[classes, words]`; 0 for `<s>` and `</s>`."""


@dataclass(frozen=True)
class _State:
    """A history; equal ones are equal states."""

    words: tuple[int, ...]
    coming: Floats = field(compare=False, repr=False)
    """p(next class or end | history) `[classes + 1]`."""


class HiddenClassModel(LanguageModel):
    """A hidden Markov model of sentences; a state knows the probabilities of the next class.

    Args:
        words: The words.
        parameters: The model's parameters.
    """

    start: _State

    def __init__(self, words: Vocabulary, parameters: HiddenClasses) -> None:
        self.words, self.parameters = words, parameters
        self.start = _State((), parameters.first)

    @override
    def score(self, state: _State, word: int) -> tuple[_State, float]:
        states, log_probs = self.score_batch([state], np.array([word]))
        return states[0], float(log_probs[0])

    @override
    def score_batch(self, states: States, words: NDArray[np.int64]) -> tuple[list[_State], Floats]:
        if not len(words):
            return [], np.zeros(0)
        coming = np.stack([state.coming for state in states])
        joint = coming[:, :-1] * self.parameters.words[:, words].T
        ended = words == END_ID
        probs = np.where(ended, coming[:, -1], joint.sum(axis=1))
        with np.errstate(divide="ignore", invalid="ignore"):
            after = (joint / joint.sum(axis=1, keepdims=True)) @ self.parameters.following
            log_probs = np.maximum(np.log10(probs), LOWEST)
        # behind an end, and behind what cannot be, a sentence starts
        after = np.where(np.isfinite(after), after, self.parameters.first)
        next_states = [
            _State((*state.words, int(word)), row) for state, word, row in zip(states, words, after, strict=True)
        ]
        return next_states, log_probs


class HiddenClassEstimator(Estimator):
    """Estimates a hidden Markov model, and writes `hmm.safetensors`."""

    cfg: HiddenClassConfig

    @override
    def estimate(self, text: Text, folder: Path, workers: int = 1) -> tuple[HiddenClassModel, dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix=".lm-", dir=folder) as scratch:
            encoded = encode_text(text, Path(scratch))
            sentences = [sentence for path in encoded.blocks for sentence in _sentences(load_block(path))]
        parameters, likelihoods = estimated(sentences, len(encoded.words), self.cfg)
        from safetensors.numpy import save

        names = {_WORDS: json.dumps(list(encoded.words), ensure_ascii=False)}
        replace_file(
            folder / MODEL, save({name: np.ascontiguousarray(table) for name, table in vars(parameters).items()}, names)
        )
        facts = {
            "text": dict(encoded.counts),
            "classes": self.cfg.classes,
            "parameters": sum(table.size for table in vars(parameters).values()),
            "log_likelihoods": likelihoods,
        }
        return HiddenClassModel(encoded.words, parameters), facts

    @override
    def load(self, folder: Path) -> HiddenClassModel:
        from safetensors import safe_open

        path = folder / MODEL
        try:
            with safe_open(str(path), "np") as file:
                words = json.loads(file.metadata()[_WORDS])
                tensors = {name: file.get_tensor(name) for name in ("first", "following", "words")}
            check_finite(tensors)
            parts, vocabulary = HiddenClasses(**tensors), Vocabulary(words)
            _check(parts, len(vocabulary))
        except DAMAGED as error:
            raise LmError(f"{path}: the classes cannot be read: {error}; estimate the model again") from error
        return HiddenClassModel(vocabulary, parts)


def _check(model: HiddenClasses, num_words: int) -> None:
    classes = len(model.words)
    shapes = [table.shape for table in vars(model).values()]
    if shapes != [(classes + 1,), (classes, classes + 1), (classes, num_words)]:
        raise ValueError(f"{num_words} words do not fit parameters of the shapes {shapes}")
    if not all(((table >= 0) & (table <= 1.001)).all() for table in vars(model).values()):  # nor is NaN
        raise ValueError("a parameter is no probability")


def estimated(
    sentences: Sequence[Ints], num_words: int, cfg: HiddenClassConfig, seed: int = 1
) -> tuple[HiddenClasses, list[float]]:
    """Estimates the parameters by expectation maximization.

    Args:
        sentences: Numbers of the words of each sentence, without special words.
        num_words: Size of the vocabulary with the special words.
        cfg: Classes, iterations and pseudo-counts.
        seed: Seed of the parameters to begin with.

    Returns:
        The parameters, and before each iteration the natural log probability of the text and of the parameters under
        the pseudo-counts' prior (up to a constant), which no iteration lowers.
    """
    unigrams = _unigrams(sentences, num_words)
    drawn = np.random.default_rng(seed)
    size = cfg.classes
    # small differences between the classes are enough: the iterations drive them apart
    words = unigrams * drawn.uniform(0.5, 1.5, (size, num_words))
    rows = drawn.uniform(0.5, 1.5, (size + 1, size + 1))
    prior = HiddenClasses(np.full(size + 1, 1 / (size + 1)), np.full((size, size + 1), 1 / (size + 1)), unigrams)
    model = HiddenClasses(*(table / table.sum(axis=-1, keepdims=True) for table in (rows[0], rows[1:], words)))
    batches = list(_batches(sentences))
    likelihoods = []
    for _ in range(cfg.iterations):
        counts, likelihood = _expected(model, batches)
        likelihoods.append(likelihood + cfg.pseudo_count * _log_prior(model, prior))
        parts = zip(vars(counts).values(), vars(prior).values(), strict=True)
        totals = [count + cfg.pseudo_count * share for count, share in parts]
        model = HiddenClasses(*(table / table.sum(axis=-1, keepdims=True) for table in totals))
    return model, likelihoods


def _sentences(block: NDArray[np.int32]) -> Iterator[Ints]:
    """The words of each sentence of a block."""
    starts, ends = np.flatnonzero(block == START_ID), np.flatnonzero(block == END_ID)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield block[start + 1 : end].astype(np.int64)


def _unigrams(sentences: Sequence[Ints], num_words: int) -> Floats:
    """Frequencies of words with Witten-Bell's share for the unknown word; 0 for the other special ones."""
    counts = np.bincount(np.concatenate(sentences), minlength=num_words).astype(np.float64)
    counts[UNKNOWN_ID] = max(1.0, float(np.count_nonzero(counts)))
    counts[[START_ID, END_ID]] = 0.0
    shares: Floats = counts / counts.sum()
    return shares


def _batches(sentences: Sequence[Ints]) -> Iterator[tuple[Ints, Ints]]:
    """Sentences of similar length `[batch, most words]`, and their lengths."""
    order = sorted(range(len(sentences)), key=lambda at: len(sentences[at]))
    for start in range(0, len(order), _BATCH):
        some = [sentences[at] for at in order[start : start + _BATCH]]
        lengths = np.array([len(sentence) for sentence in some])
        padded = np.full((len(some), int(lengths.max())), UNKNOWN_ID)
        for row, sentence in enumerate(some):
            padded[row, : len(sentence)] = sentence
        yield padded, lengths


def _expected(model: HiddenClasses, batches: Sequence[tuple[Ints, Ints]]) -> tuple[HiddenClasses, float]:
    """Expected counts of all events, and the natural log likelihood of the text, by the forward-backward algorithm."""
    counts = HiddenClasses(*(np.zeros_like(table) for table in vars(model).values()))
    likelihood = 0.0
    for words, lengths in batches:
        likelihood += _add_expected(model, words, lengths, counts)
    return counts, likelihood


def _add_expected(model: HiddenClasses, words: Ints, lengths: Ints, counts: HiddenClasses) -> float:
    """Adds a batch's expected counts, and returns its log likelihood."""
    empty = lengths == 0
    counts.first[-1] += np.count_nonzero(empty)
    likelihood = float(np.count_nonzero(empty) * np.log(model.first[-1]))
    words, lengths = words[~empty], lengths[~empty]
    forward: list[Floats] = []  # p(class, word | words before), each row divided by its sum
    scales: list[Floats] = []
    coming = np.broadcast_to(model.first, (len(words), len(model.first)))
    for step in range(words.shape[1]):
        joint = coming[:, :-1] * model.words[:, words[:, step]].T
        scales.append(joint.sum(axis=1))
        forward.append(joint / scales[-1][:, None])
        coming = forward[-1] @ model.following
    backward = np.zeros((len(words), model.words.shape[0]))
    end = model.following[:, -1]
    for step in reversed(range(words.shape[1])):
        inside, last = lengths > step, lengths == step + 1
        backward[last] = end
        posterior = forward[step] * backward
        # of a path: p(rest of the sentence) differs between rows by a factor only
        total = posterior.sum(axis=1, keepdims=True, where=inside[:, None], initial=0.0)
        posterior = np.divide(posterior, total, out=np.zeros_like(posterior), where=inside[:, None])
        np.add.at(counts.words.T, words[inside, step], posterior[inside])
        counts.following[:, -1] += posterior[last].sum(axis=0)
        likelihood += float(np.log(scales[step][inside]).sum() + np.log(forward[step][last] @ end).sum())
        if not step:
            counts.first[:-1] += posterior.sum(axis=0)
            break
        seen = model.words[:, words[:, step]].T * backward
        pairs = np.where(
            inside, 1 / np.where(inside, (forward[step - 1] @ model.following[:, :-1] * seen).sum(axis=1), 1), 0
        )
        counts.following[:, :-1] += model.following[:, :-1] * (forward[step - 1].T @ (seen * pairs[:, None]))
        backward = np.where(inside[:, None], seen @ model.following[:, :-1].T, backward)
        # any factor will do: it keeps long sentences from underflowing
        backward /= np.maximum(backward.max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return likelihood


def _log_prior(model: HiddenClasses, prior: HiddenClasses) -> float:
    """Sum of the prior's shares times the parameters' natural logarithms."""
    pairs = zip(vars(model).values(), vars(prior).values(), strict=True)
    return float(
        sum(
            (np.broadcast_to(share, table.shape) * np.log(np.where(table > 0, table, 1))).sum()
            for table, share in pairs
        )
    )
