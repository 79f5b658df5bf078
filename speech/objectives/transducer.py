"""Transducer loss: the negative log probability of a transcript over all its alignments (Graves 2012, arXiv:1211.3711).

In each frame, a transducer says any number of tokens, and then the blank, which goes on to the next frame. The sum over
all ways to do so is torchaudio's `rnnt_loss`. That function takes float32 or float16 scores of the whole vocabulary,
[batch, frames, tokens + 1, vocabulary], without gaps in memory, and targets and lengths as int32; the greatest lengths
must be those of the tensor; and it keeps a gradient as large as the scores. So it gets log probabilities of two outputs
only: the blank, and the token that comes next. The loss and its gradient are the same, since it reads no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from configurable.lazy import torch
from devices.transfers import beside, expected_wait
from speech.objectives.base import CtcShareConfig, Objective, Targets
from speech.objectives.ctc import with_ctc

if TYPE_CHECKING:
    from torch import Tensor


class TransducerConfig(CtcShareConfig):
    """Transducer loss, over all alignments of the tokens, and CTC of the encoder if it has that."""

    kind: Literal["transducer"] = "transducer"
    joint_mb: int = Field(default=1024, ge=1)
    """Memory for the joiner's values in a training step, in MiB. What needs more is computed in parts, and again in the
    backward pass."""

    @override
    def build(self) -> Objective:
        return JointTransducer(self)


class JointTransducer(Objective):
    """`ctc_weight` times the loss of CTC, and the rest times the transducer's.

    Outputs are those of `joint_lattice`. An utterance without frames, or too short for CTC, has the loss 0.

    Args:
        cfg: Its configuration.
    """

    cfg: TransducerConfig

    @override
    def losses(self, outputs: Tensor, frames: Tensor, targets: Targets) -> tuple[Tensor, int]:
        ctc, lattice = parted_lattice(outputs, targets)
        frames = frames.cpu()
        losses = transducer_losses(lattice, frames, targets.token_lengths)
        losses = losses.masked_fill(~beside(frames > 0, losses), 0.0)
        if ctc.shape[2]:
            return with_ctc(losses, ctc, frames, targets, self.cfg.ctc_weight)
        return losses, int((frames == 0).sum())

    @override
    def items(self, targets: Targets) -> int:
        return int(targets.token_lengths.sum())


def transducer_losses(lattice: Tensor, frames: Tensor, token_lengths: Tensor) -> Tensor:
    """Loss of each utterance [batch].

    Args:
        lattice: Natural log probabilities of the blank and of the next token [batch, frames, tokens + 1, 2].
        frames: Frames of each utterance [batch], on the host; none counts as one.
        token_lengths: Tokens of each utterance [batch], on the host.
    """
    from torchaudio.functional import rnnt_loss

    frames = frames.clamp(min=1)
    most, longest = int(frames.max()), int(token_lengths.max())
    lattice = torch.nn.functional.pad(lattice, (0, 0, 0, 0, 0, max(0, most - lattice.shape[1])))
    there = torch.ones(len(frames), longest, dtype=torch.int32)
    given = (beside(tensor.int(), lattice) for tensor in (there, frames, token_lengths))
    with expected_wait(lattice.device):  # it reads the greatest lengths
        losses: Tensor = rnnt_loss(
            lattice[:, :most, : longest + 1].float().contiguous(),
            *given,
            blank=0,
            reduction="none",
            fused_log_softmax=False,
        )
    return losses


def joint_lattice(posteriors: Tensor | None, lattice: Tensor) -> Tensor:
    """What a transducer puts out: [batch, frames, (tokens of the vocabulary if there is CTC) + 2 (most tokens + 1)].

    Args:
        posteriors: Log probabilities by CTC [batch, frames, vocabulary]; None without CTC.
        lattice: Those of the blank and of the next token [batch, frames, most tokens + 1, 2].
    """
    return lattice.flatten(2) if posteriors is None else torch.cat((posteriors, lattice.flatten(2)), dim=2)


def parted_lattice(outputs: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """The two parts of `joint_lattice`; the first one has no tokens without CTC."""
    places = targets.tokens.shape[1] + 1
    vocab = outputs.shape[2] - 2 * places
    lattice = outputs[:, :, vocab:].unflatten(2, (places, 2))  # type: ignore[no-untyped-call]
    return outputs[:, :, :vocab], lattice
