"""The best hypotheses of a recording, from those of the pieces that it was cut into."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from speech.decoding import Hypothesis
from speech.words import FrameTimes, Word, placed_words


@dataclass(frozen=True)
class TimedAlternative:
    """One of the best hypotheses of a recording."""

    text: str
    """Its words."""
    score: float
    """What the search gave it; of several pieces, the sum."""
    posterior: float
    """Its probability, given that one of the hypotheses is right; of several pieces, the product."""
    words: tuple[Word, ...] = ()
    """The words with their times, from searches of words."""


NOTHING = TimedAlternative("", 0.0, 1.0)
"""The only hypothesis of a piece without any."""


def timed_alternatives(hypothesis: Hypothesis, times: FrameTimes) -> list[TimedAlternative]:
    """The best hypotheses of a piece; itself if there are no others.

    Args:
        hypothesis: What the decoder found.
        times: Of the frames.
    """
    if not hypothesis.nbest:
        return [TimedAlternative(hypothesis.text, hypothesis.score, 1.0)]
    return [
        TimedAlternative(
            one.text,
            one.score,
            one.posterior,
            tuple(placed_words(one.text, one.word_frames, one.word_confidences, times)),
        )
        for one in hypothesis.nbest
    ]


def joined_alternatives(pieces: Iterable[Sequence[TimedAlternative]], count: int) -> list[TimedAlternative]:
    """The best hypotheses of a recording: the best combinations of its pieces' hypotheses, the best first.

    Args:
        pieces: The hypotheses of each piece, the best first.
        count: How many are asked for.
    """
    best = [NOTHING]
    for options in pieces:
        pairs = sorted((_joined(first, second) for first in best for second in options), key=lambda one: -one.score)
        texts: dict[str, TimedAlternative] = {}
        for pair in pairs:
            same = texts.get(pair.text)
            texts[pair.text] = replace(same, posterior=same.posterior + pair.posterior) if same else pair
        best = list(texts.values())[:count]
    return best


def _joined(first: TimedAlternative, second: TimedAlternative) -> TimedAlternative:
    return TimedAlternative(
        " ".join(one.text for one in (first, second) if one.text),
        first.score + second.score,
        first.posterior * second.posterior,
        first.words + second.words,
    )
