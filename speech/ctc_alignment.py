"""Forced alignment with a CTC model: when each token and word of a known transcript is spoken.

The best path through the transcript's tokens and blanks is found by torchaudio's `forced_align` (Kürzinger et al. 2020,
"CTC-segmentation"). CTC tokens are short: a unit starts late and ends early compared with the sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torchaudio.functional import TokenSpan, forced_align, merge_tokens

from speech.hypotheses import Word
from speech.tokens import TokenError, Tokenizer


class AlignmentError(ValueError):
    """A transcript that cannot be aligned with its speech."""


@dataclass(frozen=True)
class CtcAlignment:
    """The alignment of an utterance.

    Attributes:
        words: Words with times and confidences.
        tokens: Tokens with times and confidences.
        score: Log posterior of the path per frame.
    """

    words: list[Word]
    tokens: list[Word]
    score: float


def align_tokens(
    log_probs_TV: Tensor, tokenizer: Tokenizer, text: str, frame_seconds: float, offset: float = 0.0
) -> CtcAlignment:
    """Align a transcript.

    Args:
        log_probs_TV: Log posteriors [frames, tokens], the blank first.
        tokenizer: The model's tokenizer.
        text: The normalized transcript.
        frame_seconds: Frame shift in seconds.
        offset: Start time of the first frame in seconds.

    Raises:
        AlignmentError: The transcript is empty, longer than the speech, or has unknown tokens.
    """
    try:
        tokens = tokenizer.encode(text)
    except TokenError as error:
        raise AlignmentError(str(error)) from error
    if not tokens:
        raise AlignmentError("the transcript is empty")
    if _needed(tokens) > len(log_probs_TV):
        raise AlignmentError(f"{len(log_probs_TV)} frames are too few for {len(tokens)} tokens")
    spans, score = _aligned(log_probs_TV, tokens)
    if score == float("-inf"):
        raise AlignmentError("no path of the transcript has a probability")

    def unit(label: str, start: int, end: int, confidence: float) -> Word:
        began, lasted = offset + start * frame_seconds, (end - start) * frame_seconds
        return Word(label, round(max(0.0, began), 3), round(lasted, 3), round(min(confidence, 1.0), 4))

    words: list[Word] = []
    for label, group in zip(tokenizer.decode(tokens).split(), tokenizer.word_groups(tokens), strict=True):
        own = [spans[place] for place in group]
        words.append(unit(label, own[0].start, own[-1].end, sum(span.score for span in own) / len(own)))
    units = [unit(tokenizer.symbols[span.token], span.start, span.end, span.score) for span in spans]
    return CtcAlignment(words, units, score)


def token_spans(log_probs_TV: Tensor, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """First frame of each token on the best path, and the one after its last; none if the frames are too few.

    Args:
        log_probs_TV: Log posteriors [frames, tokens] on the CPU, the blank first.
        tokens: The tokens.
    """
    if not 0 < _needed(tokens) <= len(log_probs_TV):
        return []
    spans, score = _aligned(log_probs_TV, tokens)
    return [(span.start, span.end) for span in spans] if score > float("-inf") else []


def _needed(tokens: Sequence[int]) -> int:
    """Frames that tokens need at least: one each, and a blank between two equal ones."""
    return len(tokens) + sum(a == b for a, b in pairwise(tokens))


def _aligned(log_probs_TV: Tensor, tokens: Sequence[int]) -> tuple[list[TokenSpan], float]:
    """Frames and mean posteriors of tokens on the best path, and the mean log posterior of its frames."""
    path, scores = forced_align(log_probs_TV[None].float(), torch.tensor([tokens], dtype=torch.int32))
    return merge_tokens(path[0], scores[0].exp()), float(scores.mean())
