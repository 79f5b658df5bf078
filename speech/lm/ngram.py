"""The back-off n-gram model: all n-grams of all orders in one sorted array.

An n-gram with index i is also the context, or *state*, i + 1 of longer ones; state 0 is the empty context. Its key is
`state of its prefix × number of words + last word`. Shorter n-grams come before longer ones, and those of one order are
sorted by their keys, so the keys of all orders together ascend, and one binary search finds the next word after any
context. `links` lead from an n-gram to the state of its longest proper suffix, where the search goes on with the
back-off weight when a word was not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speech.lm.base import LanguageModel, States
from speech.lm.vocabulary import START_ID, Vocabulary

LOWEST = -99.0
"""log10 p that an ARPA file gives to what has no probability (<s>), and that stands for a probability of 0."""


@dataclass(frozen=True)
class NgramTables:
    """The arrays of a back-off model."""

    counts: tuple[int, ...]
    """Number of n-grams of each order."""
    keys: NDArray[np.int64]
    """`[n-grams]`, ascending: state of the prefix × number of words + last word."""
    log_probs: NDArray[np.float32]
    """`[n-grams]`, log10 p."""
    backoffs: NDArray[np.float32]
    """`[n-grams below the highest order]`, log10 of the back-off weight."""
    links: NDArray[np.int32]
    """`[n-grams]`, state of the longest proper suffix that is in the model."""

    def bounds(self, order: int) -> tuple[int, int]:
        """First index of the n-grams of an order, and the index after the last."""
        return sum(self.counts[: order - 1]), sum(self.counts[:order])


def states_of(keys: Sequence[NDArray[np.int64]], ngrams: NDArray[np.integer], width: int) -> NDArray[np.int64]:
    """The states that some words lead to, `[n-grams]`; -1 where there is none.

    Args:
        keys: Those of each order, at least of as many as the n-grams have words.
        ngrams: Numbers of words, `[n-grams, order]`.
        width: Number of words.
    """
    states = np.zeros(len(ngrams), dtype=np.int64)
    base = 0
    for place, own in zip(range(ngrams.shape[1]), keys, strict=False):
        if len(own) == 0:
            return np.full(len(ngrams), -1)
        wanted = states * width + ngrams[:, place]
        at = np.minimum(own.searchsorted(wanted), len(own) - 1)
        states = np.where((states >= 0) & (own[at] == wanted), base + at + 1, -1)
        base += len(own)
    return states


def longest_suffixes(keys: Sequence[NDArray[np.int64]], ngrams: NDArray[np.integer], width: int) -> NDArray[np.int64]:
    """The states of the longest proper suffixes of n-grams that are there, `[n-grams]`; arguments as of `states_of`."""
    links = np.zeros(len(ngrams), dtype=np.int64)
    order = ngrams.shape[1]
    for length in range(1, order):  # the longest one that is there stays
        shorter = states_of(keys, ngrams[:, order - length :], width)
        links = np.where(shorter > 0, shorter, links)
    return links


class NgramModel(LanguageModel):
    """A back-off n-gram model; a state is a number (see the module)."""

    start: int

    def __init__(self, words: Vocabulary, tables: NgramTables) -> None:
        assert tables.counts[0] == len(words), "every word has a unigram"
        self.words = words
        self.tables = tables
        self.order = len(tables.counts)
        self.num_states = sum(tables.counts[:-1]) + 1
        self._width = len(words)
        self._backoffs = np.concatenate([np.zeros(1, np.float32), tables.backoffs])
        self._links = np.concatenate([np.zeros(1, np.int32), tables.links[: self.num_states - 1]])
        self.start = START_ID + 1 if self.order > 1 else 0

    def score(self, state: int, word: int) -> tuple[int, float]:
        """Returns the state after a word, and log10 of the word's probability."""
        keys, backed_off = self.tables.keys, 0.0
        while True:
            key = state * self._width + word
            place = int(keys.searchsorted(key)) if state else word
            if place < len(keys) and keys[place] == key:
                return self._after(place), backed_off + float(self.tables.log_probs[place])
            backed_off += float(self._backoffs[state])
            state = int(self._links[state])

    def score_batch(self, states: States, words: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Scores one word after each of several states: states and log10 p, both `[batch]`."""
        current = np.array(states, dtype=np.int64)
        ngrams = np.empty(len(current), dtype=np.int64)
        log_probs = np.zeros(len(current))
        open_ = np.arange(len(current))
        while len(open_):
            places, hit = self.find(current[open_], words[open_])
            done = open_[hit]
            ngrams[done] = places[hit]
            log_probs[done] += self.tables.log_probs[places[hit]]
            open_ = open_[~hit]
            log_probs[open_] += self._backoffs[current[open_]]
            current[open_] = self._links[current[open_]]
        if self.order == 1:
            return np.zeros_like(ngrams), log_probs
        return np.where(ngrams < self.num_states - 1, ngrams + 1, self.tables.links[ngrams]), log_probs

    def starts(self, count: int) -> NDArray[np.int64]:
        """As many states at the beginning of a sentence as one asks for."""
        return np.full(count, self.start, dtype=np.int64)

    def find(self, states: NDArray[np.int64], words: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Indices of the n-grams that consist of a state and a word, and whether there is one, both `[batch]`."""
        keys = states.astype(np.int64) * self._width + words
        places = np.minimum(self.tables.keys.searchsorted(keys), len(self.tables.keys) - 1)
        return places, self.tables.keys[places] == keys

    def context(self, words: Sequence[int]) -> int:
        """State after some words anywhere in a sentence: that of their longest known suffix."""
        state = 0
        for word in words:
            state, _ = self.score(state, word)
        return state

    def ngrams(self, order: int) -> NDArray[np.int32]:
        """The n-grams of an order as numbers of words, `[n-grams, order]`."""
        first, last = self.tables.bounds(order)
        columns = []
        at = np.arange(first, last)
        for _ in range(order):
            key = self.tables.keys[at]
            columns.append((key % self._width).astype(np.int32))
            at = key // self._width - 1
        return np.stack(columns[::-1], axis=1)

    def backoff(self, state: int) -> float:
        """log10 of the back-off weight of a state."""
        return float(self._backoffs[state])

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        tables = self.tables
        return sum(array.nbytes for array in (tables.keys, tables.log_probs, tables.backoffs, tables.links))

    def _after(self, place: int) -> int:
        if self.order == 1:
            return 0
        return place + 1 if place < self.num_states - 1 else int(self.tables.links[place])
