"""The language model over word pieces gives every way to spell words the probability of the words."""

import itertools

import pytest
from flashlight.lib.text.decoder import LMState

from speech.decoding.paths import NEVER
from speech.decoding.trie_lm import TrieLm, word_trie

SPELLINGS = [[0, 1], [0, 1, 2], [3], [4, 2]]
"""Pieces of four words; the first one begins the second."""


class Bigrams:
    """Words after one word, with log10 probabilities that are all different."""

    END = 4

    def __init__(self):
        self.last = {}

    @staticmethod
    def probability(before, label):
        return -0.1 - 0.37 * (before + 2) - 0.011 * (label + 1) ** 2

    def start(self, start_with_nothing):
        state = LMState()
        self.last[state] = -1
        return state

    def score(self, state, label):
        after = state.child(label)
        self.last[after] = label
        return after, self.probability(self.last[state], label)

    def finish(self, state):
        return state, self.probability(self.last[state], self.END)


WEIGHT, WORD_SCORE = 2.5, -0.75


def total(pieces):
    """What the pieces of an utterance add, its end included."""
    lm = Bigrams()
    trie = TrieLm(lm, word_trie(lm, SPELLINGS), WEIGHT, WORD_SCORE)
    state, score = trie.start(True), 0.0
    for piece in pieces:
        state, added = trie.score(state, piece)
        score += added
    return score + trie.finish(state)[1]


@pytest.mark.parametrize(
    "words", [words for count in (0, 1, 2, 3) for words in itertools.product(range(4), repeat=count)]
)
def test_pieces_add_up_to_the_probability_of_their_words(words):
    path = [-1, *words, Bigrams.END]
    wanted = sum(WEIGHT * Bigrams.probability(*pair) for pair in itertools.pairwise(path)) + WORD_SCORE * len(words)
    assert total(piece for word in words for piece in SPELLINGS[word]) == pytest.approx(wanted)


@pytest.mark.parametrize("pieces", [[0], [2], [3, 0], [0, 1, 4], [1], [4, 2, 2]])
def test_pieces_that_are_no_words_are_impossible(pieces):
    assert total(pieces) <= NEVER
