"""A language model over word pieces that follows a trie of words and asks a language model of words.

flashlight-text's own search over a trie is made for spellings that end in a token of their own, as letters with a space
do. Where a word's last piece may last for several frames, or twice in a row, it loses these alignments or takes one
piece for two. Its search without a lexicon has neither fault; this model keeps it inside the lexicon. Importing it
needs flashlight-text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flashlight.lib.text.decoder import LM, LMState

from speech.decoding.paths import NEVER
from speech.lm.kenlm import FlashlightLm, LmState


@dataclass(slots=True)
class TrieNode:
    """A place inside words that begin with the same pieces."""

    children: dict[int, TrieNode] = field(default_factory=dict)
    word: int = -1
    """The word that ends here."""
    best: float = NEVER
    """The highest log10 unigram probability of the words below, given in advance so that narrow beams see it."""


def word_trie(lm: FlashlightLm, spellings: Sequence[Sequence[int]]) -> TrieNode:
    """Returns the root of a trie of words.

    Args:
        lm: The language model of words.
        spellings: The pieces of each word, by label. A word's first piece never goes on inside another word.
    """
    root, start = TrieNode(best=0.0), lm.start(True)
    for label, pieces in enumerate(spellings):
        node, unigram = root, lm.score(start, label)[1]
        for piece in pieces:
            node = node.children.setdefault(piece, TrieNode())
            node.best = max(node.best, unigram)
        node.word = label
    return root


@dataclass(slots=True)
class _Place:
    """Where a partial hypothesis is."""

    node: TrieNode
    words: LmState
    """What the language model knows of the words that have ended."""
    score: float
    """What the last piece added."""


class TrieLm(LM):  # type: ignore[misc]
    """Scores pieces: minus infinity outside the lexicon, at a word's end what the language model says of the word.

    Args:
        lm: The language model of words.
        root: The trie of its words, from `word_trie`.
        lm_weight: Factor of log10 probabilities.
        word_score: Added for each word.
    """

    def __init__(self, lm: FlashlightLm, root: TrieNode, lm_weight: float, word_score: float) -> None:
        LM.__init__(self)
        self._lm, self._weight, self._word_score, self._root = lm, lm_weight, word_score, root
        self._places: dict[LmState, _Place] = {}
        self._dead: LmState = LMState()

    def start(self, start_with_nothing: bool) -> LmState:
        """The state before the first piece; forgets the states of the utterance before."""
        state: LmState = LMState()
        self._places = {state: _Place(self._root, self._lm.start(start_with_nothing), 0.0)}
        return state

    def score(self, state: LmState, piece: int) -> tuple[LmState, float]:
        """The state after another piece, and what it adds."""
        place = self._places.get(state)
        if place is None or (step := self._step(place, piece)) is None:
            return self._dead, NEVER
        node, add_word = step
        after = state.child(piece)
        known = self._places.get(after)
        if known is None:
            known = self._enter(place, node, add_word)
            self._places[after] = known
        return after, known.score

    def _step(self, place: _Place, piece: int) -> tuple[TrieNode, bool] | None:
        """The next node, and whether a word ends before it."""
        inside = place.node.children.get(piece)
        if inside is not None:
            return inside, False
        begun = self._root.children.get(piece) if place.node.word >= 0 else None
        return None if begun is None else (begun, True)

    def _enter(self, place: _Place, node: TrieNode, add_word: bool) -> _Place:
        if not add_word:
            return _Place(node, place.words, self._weight * (node.best - place.node.best))
        words, score = self._lm.score(place.words, place.node.word)
        return _Place(node, words, self._weight * (score - place.node.best + node.best) + self._word_score)

    def finish(self, state: LmState) -> tuple[LmState, float]:
        """The end of an utterance: its last word must be complete."""
        place = self._places.get(state)
        if place is None or (place.node is not self._root and place.node.word < 0):
            return self._dead, NEVER
        words, added = place.words, 0.0
        if place.node is not self._root:
            words, score = self._lm.score(words, place.node.word)
            added = self._weight * (score - place.node.best) + self._word_score
        return state, added + self._weight * self._lm.finish(words)[1]
