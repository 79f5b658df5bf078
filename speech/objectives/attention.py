"""Joint CTC and attention: cross-entropy of a decoder network's tokens, and CTC over the encoder's frames.

Watanabe et al. 2017, "Hybrid CTC/Attention Architecture for End-to-End Speech Recognition". CTC makes the encoder align
monotonically from the start, which the decoder's attention would have to discover; a search may use both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from configurable.lazy import torch
from devices.transfers import beside
from speech.objectives.base import CtcShareConfig, Objective, Targets, smoothed_log_probs
from speech.objectives.ctc import with_ctc

if TYPE_CHECKING:
    from torch import Tensor


class AttentionConfig(CtcShareConfig):
    """Cross-entropy of the tokens that a decoder network predicts, and CTC of its encoder."""

    kind: Literal["attention"] = "attention"
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    """Share of each token's probability that is spread over all tokens (Szegedy et al. 2016)."""

    @override
    def build(self) -> Objective:
        return JointAttention(self)


class JointAttention(Objective):
    """`ctc_weight` times the loss of CTC, and the rest times the decoder network's cross-entropy.

    Outputs are those of `joint_outputs`: the encoder's frames, if it has CTC, and behind them the decoder network's
    places, one more than the batch's most tokens. An utterance that is too short for CTC has the loss 0.

    Args:
        cfg: Its configuration.
        end: The token that ends a text.
    """

    cfg: AttentionConfig

    def __init__(self, cfg: AttentionConfig, end: int = 0) -> None:
        super().__init__(cfg)
        self._end = end

    @override
    def losses(self, outputs: Tensor, frames: Tensor, targets: Targets) -> tuple[Tensor, int]:
        encoded, decoded = parted_outputs(outputs, targets)
        wanted, counted = self._wanted(decoded, targets)
        chosen = smoothed_log_probs(decoded, wanted, self.cfg.label_smoothing)
        losses = -chosen.masked_fill(~counted, 0.0).sum(dim=1)
        weight = self.cfg.ctc_weight
        return with_ctc(losses, encoded, frames, targets, weight) if weight else (losses, 0)

    def _wanted(self, decoded: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """The token at each place, the end behind the last one, and which places count; both [batch, places]."""
        lengths = targets.token_lengths.unsqueeze(1)
        places = torch.arange(decoded.shape[1])
        tokens = torch.nn.functional.pad(targets.tokens.long(), (0, 1), value=self._end)
        wanted = tokens.masked_fill(places >= lengths, self._end)
        return beside(wanted, decoded), beside(places <= lengths, decoded)

    @override
    def items(self, targets: Targets) -> int:
        return int(targets.token_lengths.sum()) + len(targets.token_lengths)

    @override
    def figures(self, outputs: Tensor, frames: Tensor, targets: Targets) -> dict[str, tuple[float, int]]:
        decoded = parted_outputs(outputs, targets)[1]
        wanted, counted = self._wanted(decoded, targets)
        right = (decoded.argmax(dim=2) == wanted) & counted
        return {"token_accuracy": (float(right.sum()), int(counted.sum()))}


def with_start(tokens: Tensor, starts: Sequence[Sequence[int]]) -> Tensor:
    """What a decoder network reads: texts [batch, most tokens] with the tokens that precede each of them.

    Args:
        tokens: The texts.
        starts: What precedes each text, or all of them.
    """
    return torch.cat((torch.tensor(starts).expand(len(tokens), -1), tokens.long()), dim=1)


def joint_outputs(encoded: Tensor | None, decoded: Tensor) -> Tensor:
    """What a network puts out that has an encoder and a decoder network: [batch, frames + places, tokens].

    Args:
        encoded: Log probabilities of the encoder's frames [batch, frames, tokens]; None without CTC.
        decoded: Those of the decoder network's places [batch, most tokens + 1, tokens].
    """
    return decoded if encoded is None else torch.cat((encoded, decoded), dim=1)


def parted_outputs(outputs: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """The two parts of `joint_outputs`; the first one has no frames without CTC."""
    frames = outputs.shape[1] - targets.tokens.shape[1] - 1
    return outputs[:, :frames], outputs[:, frames:]
