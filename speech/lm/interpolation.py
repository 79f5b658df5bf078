"""Linear interpolation of language models, with weights tuned on held-out text.

weights = tuned_weights(models, held_out)
mixture = Mixture(models, weights)            # any models, side by side
merged = merged_ngrams(ngram_models, weights)  # n-gram models, as one that an ARPA file can hold
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speech.lm.base import LanguageModel, LmError, States
from speech.lm.ngram import LOWEST, NgramModel, NgramTables, longest_suffixes, states_of
from speech.lm.vocabulary import START_ID, UNKNOWN_ID, Vocabulary

_TINY = 1e-12  # probability left for unseen words, at least: rounding may leave none, or less


class Mixture(LanguageModel):
    """p(w | h) = sum of weight × p(w | h) of several models.

    Its vocabulary holds all their words. A word that one model lacks has no probability there, so that the sum over all
    words stays one; the probability of <unk> is the mixture of theirs. A state is the tuple of the models' states.

    Raises:
        LmError: The weights are not one for each model, or do not sum to one.
    """

    def __init__(self, models: Sequence[LanguageModel], weights: Sequence[float]) -> None:
        if len(models) != len(weights) or min(weights) < 0 or abs(sum(weights) - 1) > 1e-6:
            raise LmError(f"{len(models)} models need as many weights, not negative, with a sum of 1: {list(weights)}")
        self.models, self.weights = list(models), np.asarray(weights, dtype=np.float64)
        self.words = Vocabulary(word for model in models for word in model.words)
        self.start = tuple(model.start for model in models)
        self._numbers = [model.words.indices(list(self.words)) for model in models]

    def score(self, state: tuple[Any, ...], word: int) -> tuple[tuple[Any, ...], float]:
        """Returns the state after a word, and log10 of the word's probability."""
        states, log_probs = self.score_batch([state], np.array([word]))
        return states[0], float(log_probs[0])

    def score_batch(
        self, states: States, words: NDArray[np.int64]
    ) -> tuple[list[tuple[Any, ...]], NDArray[np.float64]]:
        """Scores one word after each of several states: states and log10 p, both `[batch]`."""
        after, probs = self.component_probs(states, words)
        with np.errstate(divide="ignore"):
            return after, np.maximum(np.log10(self.weights @ probs), LOWEST)

    def component_probs(
        self, states: States, words: NDArray[np.int64]
    ) -> tuple[list[tuple[Any, ...]], NDArray[np.float64]]:
        """States after the words, and each model's probabilities, `[models, batch]`."""
        after, probs = [], np.zeros((len(self.models), len(words)))
        for row, (model, numbers) in enumerate(zip(self.models, self._numbers, strict=True)):
            own = numbers[words]
            own_states, log_probs = model.score_batch([state[row] for state in states], own)
            after.append(own_states)
            probs[row] = np.where((own == UNKNOWN_ID) & (words != UNKNOWN_ID), 0.0, 10.0**log_probs)
        # Numbers of numpy are no good keys of a dictionary across batches: plain ones are.
        columns = [own_states.tolist() if isinstance(own_states, np.ndarray) else own_states for own_states in after]
        return list(zip(*columns, strict=True)), probs


def tuned_weights(
    models: Sequence[LanguageModel], held_out: Sequence[Sequence[str]], iterations: int = 50, tolerance: float = 1e-6
) -> list[float]:
    """Weights with which the models' mixture has the lowest perplexity on held-out text, by expectation maximization.

    Words that no model knows are left out.

    Raises:
        LmError: There is no held-out text.
    """
    mixture = Mixture(models, [1 / len(models)] * len(models))
    columns = [_component_probs(mixture, words) for words in held_out]
    if not columns:
        raise LmError("weights of language models need held-out text")
    probs = np.concatenate(columns, axis=1)
    probs = probs[:, probs.sum(axis=0) > 0]
    weights = mixture.weights
    for _ in range(iterations):
        posteriors = weights[:, None] * probs
        posteriors /= posteriors.sum(axis=0)
        before, weights = weights, posteriors.mean(axis=1)
        if np.abs(weights - before).max() < tolerance:
            break
    return [float(weight) for weight in weights / weights.sum()]


def _component_probs(mixture: Mixture, words: Sequence[str]) -> NDArray[np.float64]:
    """Each model's probability of each known word of a sentence and of its end, `[models, words]`."""
    state, columns = mixture.start, []
    numbers = [*mixture.words.indices(words).tolist(), mixture.words.index("</s>")]
    for number in numbers:
        (state,), probs = mixture.component_probs([state], np.array([number]))
        if number != UNKNOWN_ID:
            columns.append(probs)
    return np.concatenate(columns, axis=1)


def merged_ngrams(models: Sequence[NgramModel], weights: Sequence[float]) -> NgramModel:
    """One back-off model with the n-grams of all, each with the mixture's probability; back-off weights are recomputed.

    What follows an unseen n-gram is approximated: the merged model backs off once, the mixture in each model by itself.
    """
    mixture = Mixture(models, weights)
    words, width, order = mixture.words, len(mixture.words), max(model.order for model in models)
    keys, links = [np.arange(width, dtype=np.int64)], [np.zeros(width, dtype=np.int32)]
    grams = np.arange(width, dtype=np.int64)[:, None]
    log_probs = [_mixed(mixture, grams)]
    log_probs[0][START_ID] = 0
    backoffs: list[NDArray[np.float32]] = []
    for n in range(2, order + 1):
        grams = np.unique(np.concatenate([_translated(model, n, words) for model in models]), axis=0)
        states = states_of(keys, grams[:, :-1], width)
        # models may lack suffixes of their n-grams, as pruned ones do: the shorter model backs off, too
        shorter = NgramModel(words, _tables(keys, log_probs, backoffs, links))
        _, lower = shorter.score_batch(shorter.tables.links[states - 1].astype(np.int64), grams[:, -1])
        log_probs.append(_mixed(mixture, grams))
        links.append(longest_suffixes(keys, grams, width).astype(np.int32))
        first = sum(len(of_order) for of_order in keys[:-1]) + 1
        probs = 10.0 ** log_probs[-1].astype(np.float64)
        backoffs.append(_renormalized(probs, 10.0**lower, states - first, len(keys[-1])))
        keys.append(states * width + grams[:, -1])
    return NgramModel(words, _tables(keys, log_probs, backoffs, links))


def _tables(
    keys: Sequence[NDArray[np.int64]],
    log_probs: Sequence[NDArray[np.float32]],
    backoffs: Sequence[NDArray[np.float32]],
    links: Sequence[NDArray[np.int32]],
) -> NgramTables:
    """The arrays of a model, from those of each order."""
    counts = tuple(len(of_order) for of_order in keys)
    empty = np.zeros(0, dtype=np.float32)
    return NgramTables(
        counts,
        np.concatenate(keys),
        np.concatenate(log_probs),
        np.concatenate([empty, *backoffs]),
        np.concatenate(links),
    )


def _translated(model: NgramModel, order: int, words: Vocabulary) -> NDArray[np.int64]:
    """A model's n-grams of an order as numbers of another vocabulary, `[n-grams, order]`."""
    if order > model.order:
        return np.zeros((0, order), dtype=np.int64)
    return words.indices(list(model.words))[model.ngrams(order)]


def _mixed(mixture: Mixture, grams: NDArray[np.int64]) -> NDArray[np.float32]:
    """log10 of the mixture's probability of the last words of n-grams after the others."""
    total = np.zeros(len(grams))
    for model, weight, numbers in zip(mixture.models, mixture.weights, mixture._numbers, strict=True):
        assert isinstance(model, NgramModel)
        states = np.zeros(len(grams), dtype=np.int64)
        for place in range(grams.shape[1] - 1):
            states = _followed(model, states, numbers[grams[:, place]])
        own = numbers[grams[:, -1]]
        _, log_probs = model.score_batch(states, own)
        total += weight * np.where((own == UNKNOWN_ID) & (grams[:, -1] != UNKNOWN_ID), 0.0, 10.0**log_probs)
    with np.errstate(divide="ignore"):
        return np.clip(np.log10(total), LOWEST, 0).astype(np.float32)


def _followed(model: NgramModel, states: NDArray[np.int64], words: NDArray[np.int64]) -> NDArray[np.int64]:
    after, _ = model.score_batch(states, words)
    return np.asarray(after)


def _renormalized(
    probs: NDArray[np.float64], lower: NDArray[np.float64], contexts: NDArray[np.int64], count: int
) -> NDArray[np.float32]:
    """log10 of the weights with which each context's words sum to one."""
    unseen = np.maximum(1 - np.bincount(contexts, probs, count), _TINY)
    unseen_lower = np.maximum(1 - np.bincount(contexts, lower, count), _TINY)
    seen = np.bincount(contexts, minlength=count) > 0
    return np.where(seen, np.log10(unseen) - np.log10(unseen_lower), 0.0).astype(np.float32)
