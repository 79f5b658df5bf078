"""Word times and confidences, from the CTC alignment of a hypothesis."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from speech.decoding import Hypothesis
from speech.tokens import Tokenizer


@dataclass(frozen=True)
class Word:
    """A recognized word."""

    word: str
    """The text of the word."""
    start: float
    """Start of its first token, in seconds from the start of the recording."""
    duration: float
    """Seconds until the end of its last token. CTC tokens are short, so the word tends to be slightly longer."""
    confidence: float
    """Mean of its tokens' highest posteriors, 0 to 1; from a search of words, the word's posterior."""


@dataclass
class _Spelled:
    first: int
    end: int
    peaks: list[float]


def timed_words(
    hypothesis: Hypothesis, log_probs_TV: Tensor, tokenizer: Tokenizer, frame_seconds: float, offset: float = 0.0
) -> list[Word]:
    """The words of a hypothesis, in order.

    Args:
        hypothesis: The hypothesis; its `frames` are the tokens' start frames in the best alignment.
        log_probs_TV: The log posteriors from which it was decoded [frames, tokens].
        tokenizer: The model's tokenizer.
        frame_seconds: Frame shift in seconds.
        offset: Start time of the first frame in seconds.
    """
    if hypothesis.word_frames:
        confidences = hypothesis.word_confidences or [hypothesis.confidence] * len(hypothesis.word_frames)
        return placed_words(hypothesis.text, hypothesis.word_frames, confidences, frame_seconds, offset)
    spelled: list[_Spelled] = []
    words: list[str] = []
    best_T = log_probs_TV.argmax(dim=1).tolist()
    starts = [*hypothesis.frames, len(best_T)]
    for k, token in enumerate(hypothesis.tokens):
        before, words = words, tokenizer.decode(hypothesis.tokens[: k + 1]).split()
        if words == before:  # a space separates words and belongs to none
            continue
        end = _end(best_T, token, starts[k], starts[k + 1])
        peak = float(log_probs_TV[starts[k] : end, token].max().exp())
        if len(words) > len(spelled):
            spelled.append(_Spelled(starts[k], end, []))
        spelled[-1].end = end
        spelled[-1].peaks.append(min(peak, 1.0))
    means = [sum(where.peaks) / len(where.peaks) for where in spelled]
    return [
        Word(
            text,
            round(max(0.0, offset + where.first * frame_seconds), 3),
            round((where.end - where.first) * frame_seconds, 3),
            round(confidence, 4),
        )
        for text, where, confidence in zip(words, spelled, hypothesis.word_confidences or means, strict=True)
    ]


def placed_words(
    text: str,
    word_frames: Sequence[tuple[int, int]],
    confidences: Sequence[float],
    frame_seconds: float,
    offset: float = 0.0,
) -> list[Word]:
    """Words whose times the search knows; none if it does not.

    Args:
        text: The words.
        word_frames: First output frame of each word and the one after its last; may be empty.
        confidences: Of each word.
        frame_seconds: Frame shift in seconds.
        offset: Start time of the first frame in seconds.
    """
    if not word_frames:
        return []
    return [
        Word(
            word,
            round(max(0.0, offset + first * frame_seconds), 3),
            round((end - first) * frame_seconds, 3),
            round(confidence, 4),
        )
        for word, (first, end), confidence in zip(text.split(), word_frames, confidences, strict=True)
    ]


def _end(best_T: list[int], token: int, start: int, limit: int) -> int:
    """End (exclusive) of a token: it lasts while it stays the most probable one."""
    end = start + 1
    while end < limit and best_T[end] == token:
        end += 1
    return end
