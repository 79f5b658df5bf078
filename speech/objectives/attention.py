"""Joint CTC and attention: cross-entropy of a decoder network's tokens, and CTC over the encoder's frames.

Watanabe et al. 2017, "Hybrid CTC/Attention Architecture for End-to-End Speech Recognition". CTC makes the encoder align
monotonically from the start, which the decoder's attention would have to discover; a search may use both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pydantic import Field
from typing_extensions import override

from configurable.lazy import torch
from devices.transfers import beside
from speech.objectives.base import CtcShareConfig, Objective, Targets, smoothed_log_probs
from speech.objectives.ctc import with_ctc
from speech.scripts import primary

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


@runtime_checkable
class SpokenTargets(Protocol):
    """Transcripts of several utterances, and their languages.

    Attributes:
        languages: BCP 47 tag of each utterance.
    """

    languages: Sequence[str]


class JointAttention(Objective):
    """`ctc_weight` times the loss of CTC, and the rest times the decoder network's cross-entropy.

    Outputs are those of `joint_outputs`: the encoder's frames, if it has CTC, and behind them the decoder network's
    places, one more than the batch's most tokens. If the languages of texts are predicted, too, a place for them comes
    first. An utterance that is too short for CTC has the loss 0.

    Args:
        cfg: Its configuration.
        end: The token that ends a text.
        languages: Tokens of the languages that are predicted, by primary language; empty for none.
    """

    cfg: AttentionConfig

    def __init__(self, cfg: AttentionConfig, end: int = 0, languages: Mapping[str, int] | None = None) -> None:
        super().__init__(cfg)
        self._end, self._languages = end, languages or {}

    @override
    def losses(self, outputs: Tensor, frames: Tensor, targets: Targets) -> tuple[Tensor, int]:
        encoded, decoded = self._parted(outputs, targets)
        wanted, counted = self._wanted(decoded, targets)
        chosen = smoothed_log_probs(decoded, wanted, self.cfg.label_smoothing)
        losses = -chosen.masked_fill(~counted, 0.0).sum(dim=1)
        weight = self.cfg.ctc_weight
        return with_ctc(losses, encoded, frames, targets, weight) if weight else (losses, 0)

    def _parted(self, outputs: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """The encoder's frames, and the decoder network's places."""
        return parted_outputs(outputs, targets, 2 if self._languages else 1)

    def _wanted(self, decoded: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """The token at each place, the end behind the last one, and which places count; both [batch, places]."""
        lengths = targets.token_lengths.unsqueeze(1)
        tokens = torch.nn.functional.pad(targets.tokens.long(), (0, 1), value=self._end)
        places = torch.arange(tokens.shape[1])
        wanted, counted = tokens.masked_fill(places >= lengths, self._end), places <= lengths
        if self._languages:
            assert isinstance(targets, SpokenTargets)
            spoken = torch.tensor([[self._languages[primary(language)]] for language in targets.languages])
            wanted = torch.cat((spoken, wanted), dim=1)
            counted = torch.cat((torch.ones(len(spoken), 1, dtype=torch.bool), counted), dim=1)
        return beside(wanted, decoded), beside(counted, decoded)

    @override
    def items(self, targets: Targets) -> int:
        texts = len(targets.token_lengths)
        return int(targets.token_lengths.sum()) + texts * (2 if self._languages else 1)

    @override
    def figures(self, outputs: Tensor, frames: Tensor, targets: Targets) -> dict[str, tuple[float, int]]:
        decoded = self._parted(outputs, targets)[1]
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


def parted_outputs(outputs: Tensor, targets: Targets, more: int = 1) -> tuple[Tensor, Tensor]:
    """The two parts of `joint_outputs`; the first one has no frames without CTC.

    Args:
        outputs: Both.
        targets: The texts.
        more: How many more places than its tokens the longest text has.
    """
    frames = outputs.shape[1] - targets.tokens.shape[1] - more
    return outputs[:, :frames], outputs[:, frames:]
