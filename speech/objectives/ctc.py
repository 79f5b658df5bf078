"""Connectionist temporal classification (Graves et al. 2006)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from configurable.lazy import torch
from devices.transfers import beside
from speech.objectives.base import Objective, ObjectiveConfig, Targets

if TYPE_CHECKING:
    from torch import Tensor


class CtcConfig(ObjectiveConfig):
    """Connectionist temporal classification, over all alignments of the tokens."""

    kind: Literal["ctc"] = "ctc"

    @override
    def build(self) -> Objective:
        return Ctc(self)


class Ctc(Objective):
    """The negative log probability of a transcript over all its alignments with the frames, blanks between tokens."""

    @override
    def losses(self, outputs: Tensor, frames: Tensor, targets: Targets) -> tuple[Tensor, int]:
        frames, lengths = frames.cpu(), targets.token_lengths
        unalignable = int((needed_frames(targets.tokens, lengths) > frames).sum())
        given = outputs.transpose(0, 1), beside(targets.tokens, outputs), frames, lengths
        if outputs.is_cuda and outputs.requires_grad:
            from speech.objectives.ctc_on_gpu import CtcWithGradient

            losses: Tensor = CtcWithGradient.apply(*given)  # type: ignore[no-untyped-call]
        else:
            losses = torch.nn.functional.ctc_loss(*given, reduction="none", zero_infinity=True)
        return losses, unalignable

    @override
    def items(self, targets: Targets) -> int:
        return int(targets.token_lengths.sum())


def with_ctc(losses: Tensor, log_probs: Tensor, frames: Tensor, targets: Targets, weight: float) -> tuple[Tensor, int]:
    """`weight` times the losses of CTC, and the rest times others.

    Args:
        losses: The others [batch].
        log_probs: Outputs of CTC [batch, frames, vocab].
        frames: Frames of each utterance [batch].
        targets: The transcripts, on the host.
        weight: Share of CTC.

    Returns:
        Losses [batch], 0 for an utterance that is too short for CTC, and how many of these there are.
    """
    ctc, unalignable = Ctc(CtcConfig()).losses(log_probs, frames, targets)
    fits = needed_frames(targets.tokens, targets.token_lengths) <= frames.cpu()
    return (weight * ctc + (1 - weight) * losses).masked_fill(~beside(fits, losses), 0.0), unalignable


def needed_frames(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Output frames that CTC needs at least: one a token, and a blank between two equal ones.

    Args:
        tokens: Token numbers [batch, tokens].
        lengths: Tokens of each utterance [batch].
    """
    inside = torch.arange(1, max(1, tokens.shape[1]), device=tokens.device)[None, :] < lengths[:, None]
    repeats = ((tokens[:, 1:] == tokens[:, :-1]) & inside).sum(dim=1)
    return lengths + repeats
