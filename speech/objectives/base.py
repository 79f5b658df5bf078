"""What training minimizes: losses of a batch from a model's outputs and the utterances' transcripts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pydantic import Field

from configurable.choices import Choice

if TYPE_CHECKING:
    from torch import Tensor


NO_STATE = -1
"""In place of a tied state: a frame that does not count, or padding."""


class ObjectiveConfig(Choice, ABC):
    """What training minimizes, of systems whose encoder puts out log probabilities of frames."""

    @abstractmethod
    def build(self) -> Objective:
        """Make the objective."""

    @property
    def alignments_folder(self) -> str:
        """Folder or URL of the alignments that targets are read from, if the configuration names one."""
        return ""


class CtcShareConfig(ObjectiveConfig, ABC):
    """What training minimizes, of systems whose encoder may have CTC beside another network."""

    ctc_weight: float = Field(default=0.3, ge=0, le=1)
    """Share of CTC in the loss (Watanabe et al. 2017), if the encoder has it; the other network has the rest."""


class Targets(Protocol):
    """Transcripts of several utterances.

    Attributes:
        tokens: Token numbers [batch, most tokens].
        token_lengths: Tokens of each utterance [batch].
    """

    tokens: Tensor
    token_lengths: Tensor


@runtime_checkable
class FrameTargets(Protocol):
    """Forced alignments of several utterances, which objectives of tied states get.

    Attributes:
        states: Tied state of each aligned frame [batch, most frames], `NO_STATE` where there is none.
        state_lengths: Aligned frames of each utterance [batch]; 0 without an alignment.
        frame_factor: Aligned frames to an output frame.
    """

    states: Tensor
    state_lengths: Tensor
    frame_factor: int


class Objective(ABC):
    """One objective.

    Args:
        cfg: Its configuration.
    """

    def __init__(self, cfg: ObjectiveConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def losses(self, outputs: Tensor, frames: Tensor, targets: Targets) -> tuple[Tensor, int]:
        """Loss of each utterance, in nats.

        Args:
            outputs: Log probabilities [batch, frames, vocab].
            frames: Output frames of each utterance [batch]; read on the host, which waits for those of a GPU.
            targets: What the same utterances should be recognized as, on the host.

        Returns:
            Losses [batch] on the outputs' device, zero for an utterance that its outputs cannot stand for, and how many
            of these there are.
        """

    @abstractmethod
    def items(self, targets: Targets) -> int:
        """What the sum of losses is divided by: a number of tokens, or of frames."""

    def figures(self, outputs: Tensor, frames: Tensor, targets: Targets) -> dict[str, tuple[float, int]]:
        """Further figures of a validation: for each name a sum, and what its total is divided by.

        Args:
            outputs: As of `losses`.
            frames: As of `losses`.
            targets: As of `losses`.
        """
        return {}


def smoothed_log_probs(outputs: Tensor, wanted: Tensor, smoothing: float) -> Tensor:
    """Log probability of each target, of which a share is spread over all outputs (Szegedy et al. 2016, section 7).

    Args:
        outputs: Log probabilities [batch, places, outputs].
        wanted: Number of the target at each place [batch, places].
        smoothing: The share.

    Returns:
        [batch, places]: expected log probability under the smoothed target.
    """
    chosen = outputs.gather(2, wanted.unsqueeze(2)).squeeze(2)
    return (1 - smoothing) * chosen + smoothing * outputs.mean(dim=2) if smoothing else chosen
