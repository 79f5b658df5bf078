"""A language model with hot words for flashlight-text's searches, to be used with weight 1.

Importing it needs flashlight-text.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashlight.lib.text.decoder import LM, LMState

from speech.decoding.hot_words import HotWords
from speech.lm.kenlm import FlashlightLm, LmState


@dataclass(slots=True)
class _Known:
    """What is known of a partial hypothesis."""

    lm: LmState
    hot: int
    """State of the hot words."""
    score: float
    """What the last label added."""


class BiasedLm(LM):  # type: ignore[misc]
    """Scores labels by a language model and hot words.

    Args:
        lm: The language model.
        weight: Factor of its log10 probabilities.
        hot: The hot words.
    """

    def __init__(self, lm: FlashlightLm, weight: float, hot: HotWords) -> None:
        LM.__init__(self)
        self._lm, self._weight, self._hot = lm, weight, hot
        self._known: dict[LmState, _Known] = {}

    def start(self, start_with_nothing: bool) -> LmState:
        """The state before the first label; forgets the states of the utterance before."""
        state: LmState = LMState()
        self._known = {state: _Known(self._lm.start(start_with_nothing), self._hot.start, 0.0)}
        return state

    def score(self, state: LmState, label: int) -> tuple[LmState, float]:
        """The state after another label, and what it adds."""
        after = state.child(label)
        known = self._known.get(after)
        if known is None:
            before = self._known[state]
            lm, log_prob = self._lm.score(before.lm, label)
            hot, added = self._hot.step(before.hot, label)
            known = self._known[after] = _Known(lm, hot, self._weight * log_prob + added)
        return after, known.score

    def finish(self, state: LmState) -> tuple[LmState, float]:
        """The end of the text, and what it adds."""
        known = self._known[state]
        return state, self._weight * self._lm.finish(known.lm)[1] + self._hot.end(known.hot)
