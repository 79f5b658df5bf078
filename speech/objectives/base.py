"""What training minimizes: losses of a batch from a model's outputs and the utterances' transcripts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

from speech.choices import Choice

if TYPE_CHECKING:
    from torch import Tensor


class ObjectiveConfig(Choice):
    """What training minimizes."""


class Targets(Protocol):
    """Transcripts of several utterances.

    Attributes:
        tokens: Token numbers [batch, most tokens].
        token_lengths: Tokens of each utterance [batch].
    """

    tokens: Tensor
    token_lengths: Tensor


class Objective(ABC):
    """One objective.

    Attributes:
        config: Class of its configuration.
        outputs: What models trained with it put out; decoders that read that have it as `Decoder.reads`.
    """

    config: ClassVar[type[ObjectiveConfig]]
    outputs: ClassVar[str]

    def __init__(self, cfg: ObjectiveConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def losses(self, outputs: Tensor, frames: Tensor, targets: Targets) -> tuple[Tensor, int]:
        """Loss of each utterance, in nats.

        Args:
            outputs: Log probabilities [batch, frames, vocab].
            frames: Output frames of each utterance [batch].
            targets: Transcripts of the same utterances.

        Returns:
            Losses [batch], zero for an utterance that its outputs cannot stand for, and how many of these there are.
        """

    @abstractmethod
    def items(self, targets: Targets) -> int:
        """What the sum of losses is divided by: a number of tokens, or of frames."""
