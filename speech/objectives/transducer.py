"""Transducer loss: the negative log probability of a transcript over all its alignments (Graves 2012, arXiv:1211.3711).

In each frame, a transducer says any number of tokens, and then the blank, which goes on to the next frame. The sum over
all ways to do so is torchaudio's `rnnt_loss`. That function takes float32 or float16 scores of the whole vocabulary,
[batch, frames, tokens + 1, vocabulary], without gaps in memory, and targets and lengths as int32; the greatest lengths
must be those of the tensor; and it keeps a gradient as large as the scores. So it gets log probabilities of two outputs
only: the blank, and the token that comes next. The loss and its gradient are the same, since it reads no others.

The pruned loss (Kuang et al. 2022, arXiv:2206.13236) sums over alignments in a band: in each frame, the joiner scores
only the `prune_range` places of the text that are most probable by a simple joiner, which is trained beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator
from typing_extensions import override

from configurable.lazy import torch
from devices.transfers import beside, expected_wait
from speech.objectives.base import CtcShareConfig, Objective, Targets
from speech.objectives.ctc import with_ctc

if TYPE_CHECKING:
    from torch import Tensor


SIMPLE_WEIGHT = 0.5
"""Of the simple joiner's loss beside the pruned one, as in icefall (`simple_loss_scale`)."""
_OUTSIDE = -1e8
"""Log probability of what is outside the band; finite, so that differences of two are, too."""


class TransducerConfig(CtcShareConfig):
    """Transducer loss, over all alignments of the tokens, and CTC of the encoder if it has that."""

    kind: Literal["transducer"] = "transducer"
    joint_mb: int = Field(default=1024, ge=1)
    """Memory for the joiner's values in a training step, in MiB. What needs more is computed in parts, and again in the
    backward pass."""
    prune_range: int = Field(default=0, ge=0)
    """Places of the text that the joiner scores in each frame of training, at least 2 (pruned loss of Kuang et al.
    2022, who use 5); 0: all."""

    @field_validator("prune_range")
    @classmethod
    def _says_tokens(cls, value: int) -> int:
        if value == 1:
            raise ValueError("a band of one place has no room for a token: use 5, or 0 for the whole text")
        return value

    @override
    def build(self) -> Objective:
        return JointTransducer(self)


class JointTransducer(Objective):
    """`ctc_weight` times the loss of CTC, and the rest times the transducer's.

    Outputs are those of `joint_lattice`, of the joiner, and with `prune_range` of the simple one before it, whose loss
    is added. An utterance without frames, or too short for CTC, has the loss 0.

    Args:
        cfg: Its configuration.
    """

    cfg: TransducerConfig

    @override
    def losses(self, outputs: Tensor, frames: Tensor, targets: Targets) -> tuple[Tensor, int]:
        ctc, *lattices = parted_lattice(outputs, targets, 2 if self.cfg.prune_range else 1)
        frames = frames.cpu()
        *simple, losses = (transducer_losses(lattice, frames, targets.token_lengths) for lattice in lattices)
        losses = sum((SIMPLE_WEIGHT * other for other in simple), losses)
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


def band_width(prune_range: int, frames: Tensor, token_lengths: Tensor) -> int:
    """Places of a batch's band: `prune_range`, or as many as the text with the most tokens a frame needs.

    Args:
        prune_range: As configured.
        frames: Frames of each utterance [batch], on the host; none counts as one.
        token_lengths: Tokens of each utterance [batch], on the host.
    """
    frames = frames.clamp(min=1)
    needed = (token_lengths + frames - 1) // frames + 1
    return max(prune_range, int(needed.max()))


def band_starts(lattice: Tensor, frames: Tensor, token_lengths: Tensor, width: int) -> Tensor:
    """The first place of each frame's band [batch, frames] (Kuang et al. 2022).

    It is the one with which a band has most of the probability of all alignments, changed such that the first band has
    the first place, the last one the last, none begins before the one of the frame before, and neighbours overlap.

    Args:
        lattice: What `transducer_losses` reads, of the simple joiner.
        frames: As of `transducer_losses`.
        token_lengths: As of `transducer_losses`.
        width: Places of a band, less than those of the lattice, see `band_width`.
    """
    with torch.enable_grad():
        given = lattice.detach().requires_grad_()
        total = transducer_losses(given, frames, token_lengths).sum()
        (gradient,) = torch.autograd.grad(total, given)
    blanks, said = gradient.neg().unbind(3)  # how probable it is that an alignment has them
    inside = blanks.unfold(2, width, 1).sum(3) + said[:, :, :-1].unfold(2, width - 1, 1).sum(3)
    last = beside((token_lengths + 1 - width).clamp(min=0), lattice).unsqueeze(1)
    places = torch.arange(lattice.shape[1], device=lattice.device)
    ended = places >= beside(frames.clamp(min=1) - 1, lattice).unsqueeze(1)
    starts = _rising(torch.where(ended, last, torch.minimum(inside.argmax(2), last)))
    room = (width - 1) * places  # a step of the band leaves one place in common
    return room - _rising(room - starts).clamp(min=0)


def _rising(values: Tensor) -> Tensor:
    """The greatest sequence that never falls and nowhere exceeds the values [batch, frames]."""
    return values.flip(1).cummin(1).values.flip(1)


def spread_band(band: Tensor, places: Tensor, num_places: int) -> Tensor:
    """A lattice [batch, frames, num_places, 2] of those in a band [batch, frames, width, 2].

    Args:
        band: Log probabilities.
        places: The place of each [batch, frames, width].
        num_places: Tokens of the longest text, and one.
    """
    outside = band.new_full((*band.shape[:2], num_places, 2), _OUTSIDE)
    return outside.scatter(2, places.unsqueeze(3).expand(-1, -1, -1, 2), band)


def joint_lattice(posteriors: Tensor | None, *lattices: Tensor) -> Tensor:
    """What a transducer puts out: [batch, frames, (tokens of the vocabulary if there is CTC) + 2 (most tokens + 1)].

    Args:
        posteriors: Log probabilities by CTC [batch, frames, vocabulary]; None without CTC.
        lattices: Those of the blank and of the next token [batch, frames, most tokens + 1, 2], by one joiner or two.
    """
    flat = [lattice.flatten(2) for lattice in lattices]
    return torch.cat(flat if posteriors is None else [posteriors, *flat], dim=2)


def parted_lattice(outputs: Tensor, targets: Targets, joiners: int = 1) -> tuple[Tensor, ...]:
    """The parts of `joint_lattice`; the first one has no tokens without CTC."""
    places = targets.tokens.shape[1] + 1
    sizes = [outputs.shape[2] - joiners * 2 * places, *[2 * places] * joiners]
    ctc, *flat = torch.split(outputs, sizes, dim=2)
    return ctc, *(lattice.unflatten(2, (places, 2)) for lattice in flat)  # type: ignore[no-untyped-call]
