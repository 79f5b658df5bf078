"""Entropy pruning (Stolcke 1998, "Entropy-based pruning of backoff language models").

An n-gram is removed when the model's perplexity on its own distribution hardly rises without it. The divergence between
the models with and without one n-gram (h, w), its context's back-off weight adapted, is

    D = -p(h) [ p(w|h) (log p(w|h') + log a'(h) - log p(w|h)) + (log a'(h) - log a(h)) (1 - sum of seen p(.|h)) ]

and the n-gram goes where exp(D) - 1 is below the threshold. N-grams that a longer one needs, as its context or as its
suffix, stay, and p(h) of a context at the beginning of a sentence uses the probability of </s> for <s>, as in SRILM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speech.lm.ngram import NgramModel, NgramTables
from speech.lm.vocabulary import END_ID, START_ID

_TINY = 1e-12  # probability left for unseen words, at least: rounding may leave none, or less
Floats = NDArray[np.float64]


def entropy_pruned(model: NgramModel, threshold: float) -> NgramModel:
    """A smaller model.

    Args:
        model: Any back-off model whose contexts and suffixes are n-grams, too, as those of lmplz and ours.
        threshold: Greatest relative rise of the perplexity for one n-gram, 1e-9 to 1e-6 for instance.
    """
    tables = model.tables
    kept = np.ones(len(tables.keys), dtype=np.bool_)
    needed = np.zeros(len(tables.keys), dtype=np.bool_)
    backoffs = tables.backoffs.astype(np.float64)
    history = history_log_probs(model)
    for order in range(model.order, 1, -1):
        first, last = tables.bounds(order)
        level = _level(model, order, history)
        own = needed[first:last] | (relative_rises(level) >= threshold)
        kept[first:last] = own
        states = level.states[own]
        needed[states - 1] = True
        needed[tables.links[first:last][own] - 1] = True
        low, high = tables.bounds(order - 1)
        backoffs[low:high] = _backoffs(level, own, high - low, low + 1)
    return NgramModel(model.words, _compact(model, kept, backoffs))


@dataclass(frozen=True)
class OrderProbabilities:
    """The n-grams of one order; probabilities are natural, not logarithms; all `[n-grams]`."""

    states: NDArray[np.int64]
    """State of the context."""
    probs: Floats
    lower: Floats
    """p(w | shorter context)."""
    history: Floats
    """p(h)."""
    log_backoffs: Floats
    """Natural log of the context's back-off weight."""


def history_log_probs(model: NgramModel) -> Floats:
    """log10 of the joint probability of the words of each state, `[states]`."""
    log_probs = np.zeros(model.num_states)
    tables, width = model.tables, len(model.words)
    for order in range(1, model.order):
        first, last = tables.bounds(order)
        own = tables.log_probs[first:last].astype(np.float64)
        if order == 1:
            own[START_ID] = own[END_ID]
        log_probs[first + 1 : last + 1] = own + log_probs[tables.keys[first:last] // width]
    return log_probs


def _level(model: NgramModel, order: int, history: Floats) -> OrderProbabilities:
    tables = model.tables
    first, last = tables.bounds(order)
    states, words = np.divmod(tables.keys[first:last], len(model.words))
    shorter = tables.links[states - 1].astype(np.int64)
    _, lower = model.score_batch(shorter, words)
    return OrderProbabilities(
        states,
        10.0 ** tables.log_probs[first:last].astype(np.float64),
        10.0**lower,
        10.0 ** history[states],
        np.log(10) * tables.backoffs[states - 1].astype(np.float64),
    )


def relative_rises(level: OrderProbabilities) -> Floats:
    """How much the perplexity rises, relatively, without each n-gram, `[n-grams]`."""
    _, groups = np.unique(level.states, return_inverse=True)
    unseen = np.maximum(1 - np.bincount(groups, level.probs), _TINY)[groups]
    unseen_lower = np.maximum(1 - np.bincount(groups, level.lower), _TINY)[groups]
    new_backoffs = np.log(unseen + level.probs) - np.log(unseen_lower + level.lower)
    change = level.probs * (np.log(level.lower) + new_backoffs - np.log(level.probs))
    change += (new_backoffs - level.log_backoffs) * unseen
    return np.expm1(-level.history * change)  # type: ignore[no-any-return]


def _backoffs(level: OrderProbabilities, kept: NDArray[np.bool_], count: int, first_state: int) -> Floats:
    """log10 of the back-off weights of all contexts of an order; 0 for those without any n-gram left."""
    places = level.states[kept] - first_state
    unseen = np.maximum(1 - np.bincount(places, level.probs[kept], count), _TINY)
    unseen_lower = np.maximum(1 - np.bincount(places, level.lower[kept], count), _TINY)
    backoffs = np.log10(unseen) - np.log10(unseen_lower)
    return np.where(np.bincount(places, minlength=count) > 0, backoffs, 0.0)


def _compact(model: NgramModel, kept: NDArray[np.bool_], backoffs: Floats) -> NgramTables:
    """The arrays without the removed n-grams; states are renumbered."""
    tables, width = model.tables, len(model.words)
    new_states = np.concatenate([[0], np.cumsum(kept)])
    states, words = np.divmod(tables.keys[kept], width)
    counts = [int(np.count_nonzero(kept[slice(*tables.bounds(n))])) for n in range(1, model.order + 1)]
    while len(counts) > 1 and counts[-1] == 0:
        counts.pop()
    lower = sum(counts[:-1])
    return NgramTables(
        tuple(counts),
        new_states[states] * width + words,
        tables.log_probs[kept],
        backoffs[kept[: len(backoffs)]].astype(np.float32)[:lower],
        new_states[tables.links[kept]].astype(np.int32),
    )
