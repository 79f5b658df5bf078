"""What every decoder is: log posteriors in, hypotheses out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from speech.choices import ChoiceWithFiles
from speech.tokens import Tokenizer


class DecodeError(ValueError):
    """Log posteriors that cannot be decoded: a wrong shape, a wrong number of tokens, impossible lengths, or NaN."""


class DecodeConfig(ChoiceWithFiles):
    """How hypotheses are searched."""


@dataclass(frozen=True)
class Alternative:
    """One of several hypotheses of an utterance."""

    text: str
    """Its words."""
    score: float
    """What the search gave it."""
    posterior: float
    """Its probability among all hypotheses that the search ended with, 0 to 1."""


@dataclass(frozen=True)
class Hypothesis:
    """What was recognized in one utterance."""

    tokens: list[int] = field(default_factory=list)
    """Token ids without blanks and repetitions."""
    text: str = ""
    """The tokens as text."""
    score: float = 0.0
    """Natural log probability: of the best alignment (greedy), of all alignments that the search kept (others); with
    what a language model and word scores add."""
    frames: list[int] = field(default_factory=list)
    """For each token the frame in which it starts, in the best alignment, counted in frames of the model's output."""
    confidence: float = 0.0
    """Mean over tokens of the token's highest posterior, 0 to 1; without tokens the mean posterior of the blank, and
    0 if there was no frame. Searches of words: mean over words of `word_confidences`, without words the posterior of
    silence."""
    word_confidences: list[float] = field(default_factory=list)
    """For each word its posterior over the hypotheses that the search ended with; empty if the search is not one of
    words."""
    nbest: list[Alternative] = field(default_factory=list)
    """The best hypotheses, this one first, where more than one was asked for."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON value."""
        return asdict(self)


class Decoder(ABC):
    """Searches hypotheses in CTC log posteriors (Graves 2006). Subclasses decode one batch that has been checked.

    Attributes:
        config: Class of its configuration.
        slow: Whether it takes longer than the model, so that several processes pay.
    """

    config: ClassVar[type[DecodeConfig]]
    slow: ClassVar[bool] = False

    def __init__(self, cfg: DecodeConfig, tokenizer: Tokenizer) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer

    def prepare(self) -> None:  # noqa: B027 - most have no files
        """Read what files it needs now, not at the first utterance."""

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[Hypothesis]:
        """Returns the best hypothesis of each utterance.

        Args:
            log_probs: Natural log posteriors (log softmax), [B, T, V] on any device; V is the tokenizer's size, the
                blank comes first.
            lengths: Number of frames of each utterance, [B]; what lies beyond is padding and never looked at.

        Raises:
            DecodeError: The shapes, the lengths or the values are impossible.
        """
        log_probs, frame_counts = self._check(log_probs, lengths)
        return self._decode(log_probs, frame_counts)

    @abstractmethod
    def _decode(self, log_probs: Tensor, lengths: Sequence[int]) -> list[Hypothesis]:
        """Decodes checked float32 log posteriors [B, T, V]."""

    def _check(self, log_probs: Tensor, lengths: Tensor) -> tuple[Tensor, list[int]]:
        if log_probs.dim() != 3 or log_probs.shape[2] != self.tokenizer.size:
            raise DecodeError(
                f"log_probs must be [batch, frames, {self.tokenizer.size} tokens], not {list(log_probs.shape)}: "
                "the model and the tokenizer must belong together"
            )
        batch, num_frames, _ = log_probs.shape
        counts = [int(count) for count in lengths.tolist()]
        if len(counts) != batch or any(not 0 <= count <= num_frames for count in counts):
            raise DecodeError(f"lengths must be {batch} numbers in 0 to {num_frames}, not {counts}")
        log_probs = log_probs.detach().float()
        valid = (
            torch.arange(num_frames, device=log_probs.device) < torch.tensor(counts, device=log_probs.device)[:, None]
        )
        if bool((log_probs.isnan().any(dim=2) & valid).any()):
            raise DecodeError("log_probs holds NaN: the model has diverged, or its input was damaged")
        return log_probs, counts

    def _hypothesis(
        self, tokens: list[int], frames: list[int], peaks: Sequence[float], score: float, silence: float
    ) -> Hypothesis:
        """Puts a hypothesis together; `silence`, the blank's mean posterior, is its confidence without tokens."""
        confidence = sum(peaks) / len(peaks) if peaks else silence
        return Hypothesis(tokens, self.tokenizer.decode(tokens), score, frames, min(max(float(confidence), 0.0), 1.0))
