"""Alignment of tokens with the outputs of a CTC model.

The best path through the transcript's tokens and blanks is found by torchaudio's `forced_align` (Kürzinger et al. 2020,
"CTC-segmentation"). CTC tokens are short: a unit starts late and ends early compared with the sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torchaudio.functional import TokenSpan, forced_align, merge_tokens

from speech.alignments import Alignment, Span
from speech.tokens import TokenError, Tokenizer
from speech.words import FrameTimes


class AlignmentError(ValueError):
    """A transcript that cannot be aligned with its speech."""


def align_tokens(name: str, log_probs_TV: Tensor, tokenizer: Tokenizer, text: str, times: FrameTimes) -> Alignment:
    """Align a transcript with the outputs of a CTC model.

    Args:
        name: The utterance.
        log_probs_TV: Log posteriors [frames, tokens], the blank first.
        tokenizer: The model's tokenizer.
        text: The normalized transcript.
        times: Of the frames, from the start of the utterance.

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
    units = tuple(Span(tokenizer.symbols[span.token], span.start, span.end, span.score) for span in spans)
    words: list[Span] = []
    for label, group in zip(tokenizer.decode(tokens).split(), tokenizer.word_groups(tokens), strict=True):
        own = [spans[place] for place in group]
        words.append(Span(label, own[0].start, own[-1].end, sum(span.score for span in own) / len(own)))
    return Alignment(name, tuple(words), units, score, None, times.shift, times.offset, times.end, times.later)


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
