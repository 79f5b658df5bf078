"""Word times and confidences, from the CTC alignment of a hypothesis."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from speech.hypotheses import Hypothesis, Word

if TYPE_CHECKING:
    from torch import Tensor

    from speech.tokens import Tokenizer


class Piece(NamedTuple):
    """Where a piece of an utterance is that was cut into several."""

    first: int
    """Number of its first frame within the utterance."""
    offset: float
    """Start of this frame, in seconds; before `begin` if silence was added around the piece."""
    begin: float
    """Start of the piece, in seconds."""


@dataclass(frozen=True)
class FrameTimes:
    """When the output frames of a piece of a recording are, in seconds from the start of the recording."""

    shift: float
    """Between two frames."""
    offset: float = 0.0
    """Start of the first frame."""
    begin: float = 0.0
    """Start of the piece."""
    end: float = math.inf
    """End of the piece."""
    later: tuple[Piece, ...] = ()
    """If it was cut again: all pieces of it after the first one."""

    def _piece_of(self, frame: int) -> tuple[float, float, float]:
        """Start of a frame, and begin and end of the piece that it is in."""
        pieces = (Piece(0, self.offset, self.begin), *self.later)
        number = bisect_right(pieces, max(0, frame), key=lambda piece: piece.first) - 1
        piece = pieces[number]
        end = self.end if number == len(self.later) else self.later[number].begin
        return piece.offset + (frame - piece.first) * self.shift, piece.begin, end

    def words(self, spans: Sequence[tuple[str, int, int, float]]) -> list[Word]:
        """Words one after another.

        Frames may lie in the silence that is added around a piece; words stay inside their pieces, apart from each
        other, and at least a frame long if there is room.

        Args:
            spans: Text, first frame, the one after the last, and confidence of each word, in order.
        """
        placed: list[tuple[float, float, float, float]] = []
        passed = -math.inf
        for _, first, end, _ in spans:
            start, begin, _ = self._piece_of(first)
            last, _, limit = self._piece_of(end - 1)
            start = max(start, begin, passed)
            stop = max(start, last) + self.shift
            placed.append((start, stop, begin, limit))
            passed = min(stop, limit)
        words, following = list[Word](), math.inf
        for (text, _, _, confidence), (start, stop, begin, limit) in zip(
            reversed(spans), reversed(placed), strict=True
        ):
            stop = min(stop, limit, following)
            start = following = max(begin, min(start, stop - self.shift))
            first_ms, last_ms = round(1000 * start), round(1000 * stop)  # rounded alike, so that words do not overlap
            words.append(Word(text, first_ms / 1000, (last_ms - first_ms) / 1000, round(confidence, 4)))
        return words[::-1]


def timed_words(hypothesis: Hypothesis, log_probs_TV: Tensor, tokenizer: Tokenizer, times: FrameTimes) -> list[Word]:
    """The words of a hypothesis, in order.

    Args:
        hypothesis: The hypothesis; its `frames` are the tokens' start frames in the best alignment.
        log_probs_TV: The log posteriors from which it was decoded [frames, tokens].
        tokenizer: The model's tokenizer.
        times: Of the frames.
    """
    if hypothesis.word_frames:
        confidences = hypothesis.word_confidences or [hypothesis.confidence] * len(hypothesis.word_frames)
        return placed_words(hypothesis.text, hypothesis.word_frames, confidences, times)
    best_T = log_probs_TV.argmax(dim=1).tolist()
    starts = [*hypothesis.frames, len(best_T)]
    ends = [_end(best_T, token, *pair) for token, pair in zip(hypothesis.tokens, pairwise(starts), strict=True)]
    groups = tokenizer.word_groups(hypothesis.tokens)

    def peak(place: int) -> float:
        posteriors = log_probs_TV[starts[place] : ends[place], hypothesis.tokens[place]]
        return min(float(posteriors.max().exp()), 1.0)

    means = [sum(peak(place) for place in group) / len(group) for group in groups]
    words = tokenizer.decode(hypothesis.tokens).split()
    confidences = hypothesis.word_confidences or means
    return times.words(
        [
            (word, starts[group[0]], ends[group[-1]], confidence)
            for word, group, confidence in zip(words, groups, confidences, strict=True)
        ]
    )


def placed_words(
    text: str, word_frames: Sequence[tuple[int, int]], confidences: Sequence[float], times: FrameTimes
) -> list[Word]:
    """Words whose times the search knows; none if it does not.

    Args:
        text: The words.
        word_frames: First output frame of each word and the one after its last; may be empty.
        confidences: Of each word.
        times: Of the frames.
    """
    if not word_frames:
        return []
    return times.words(
        [
            (word, first, end, confidence)
            for word, (first, end), confidence in zip(text.split(), word_frames, confidences, strict=True)
        ]
    )


def _end(best_T: list[int], token: int, start: int, limit: int) -> int:
    """End (exclusive) of a token: it lasts while it stays the most probable one."""
    end = start + 1
    while end < limit and best_T[end] == token:
        end += 1
    return end
