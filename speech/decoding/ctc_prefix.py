"""CTC prefix scores: the log probability that a text begins with some tokens, whatever follows.

Graves 2012, "Supervised Sequence Labelling", section 7.5; in a search with a decoder network, Watanabe et al. 2017,
"Hybrid CTC/Attention Architecture", algorithm 2. Here for all hypotheses of a batch at once, and without a loop over
frames: a forward variable is a sum over the frame in which the last token begins, so its logarithm at all frames is a
cumulative sum in the logarithmic domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configurable.lazy import torch
from speech.features.cmvn import frame_mask

if TYPE_CHECKING:
    from torch import Tensor

_NEVER = -1e6
"""Log probability of what is impossible; finite, since the difference of two infinities is NaN."""


@dataclass(frozen=True)
class CtcPrefixes:
    """Forward variables of hypotheses before the first frame and after each frame, float64 [batch, W, frames + 1]."""

    token: Tensor
    """Log probability of the hypothesis and of paths that end in its last token."""
    blank: Tensor
    """Of paths that end in a blank."""
    last: Tensor
    """The last token of each hypothesis [batch, W]; -1 before the first one."""

    def reordered(self, parents_BW: Tensor) -> CtcPrefixes:
        """Those of the hypotheses that others go on from."""
        rows = torch.arange(len(parents_BW), device=parents_BW.device).unsqueeze(1)
        return CtcPrefixes(self.token[rows, parents_BW], self.blank[rows, parents_BW], self.last[rows, parents_BW])

    def utterances(self, rows: Tensor) -> CtcPrefixes:
        """Those of some utterances."""
        return CtcPrefixes(self.token[rows], self.blank[rows], self.last[rows])


class CtcPrefixScorer:
    """Scores continuations of hypotheses by the log posteriors of an encoder with CTC.

    Args:
        log_probs: Natural log posteriors [batch, frames, tokens], the blank first.
        frames: Frames of each utterance [batch].
    """

    def __init__(self, log_probs: Tensor, frames: Tensor) -> None:
        inside = frame_mask(frames, log_probs.shape[1], log_probs.device).unsqueeze(2)
        scores = log_probs.double().clamp(min=_NEVER).masked_fill(~inside, _NEVER)
        # nothing but blanks behind an utterance: the last frame's variables stay what they are
        scores[:, :, 0].masked_fill_(~inside.squeeze(2), 0.0)
        self._scores_BTV = scores
        self._blanks_BT1 = _summed(scores[:, :, 0])

    def utterances(self, rows: Tensor) -> CtcPrefixScorer:
        """The scorer of some utterances."""
        part = object.__new__(CtcPrefixScorer)
        part._scores_BTV, part._blanks_BT1 = self._scores_BTV[rows], self._blanks_BT1[rows]
        return part

    def start(self) -> CtcPrefixes:
        """The variables of the empty hypothesis, one for each utterance."""
        blank = self._blanks_BT1.unsqueeze(1)
        return CtcPrefixes(torch.full_like(blank, _NEVER), blank, torch.full_like(blank[:, :, 0], -1).long())

    def ends(self, before: CtcPrefixes) -> Tensor:
        """Log probability of each hypothesis as the whole text [batch, W]."""
        return torch.logaddexp(before.token[:, :, -1], before.blank[:, :, -1])

    def extended(self, before: CtcPrefixes, tokens_BWK: Tensor) -> Tensor:
        """Log probability of each hypothesis with each of some further tokens as the beginning of a text [batch, W, K].

        Args:
            before: The hypotheses.
            tokens_BWK: The tokens; the blank cannot follow.
        """
        phi_BWKT = self._entries(before, tokens_BWK)
        return torch.logsumexp(phi_BWKT + self._columns(tokens_BWK), dim=3)

    def step(self, before: CtcPrefixes, tokens_BW: Tensor) -> CtcPrefixes:
        """The variables of each hypothesis with one more token."""
        tokens_BWK = tokens_BW.unsqueeze(2)
        phi_BWT = self._entries(before, tokens_BWK).squeeze(2)
        token = _forward(phi_BWT, _summed(self._columns(tokens_BWK).squeeze(2)))
        blank = _forward(token[:, :, :-1], self._blanks_BT1.unsqueeze(1))
        return CtcPrefixes(token, blank, tokens_BW)

    def _entries(self, before: CtcPrefixes, tokens_BWK: Tensor) -> Tensor:
        """Log probability of the paths, up to each frame, that a further token may follow [batch, W, K, frames].

        Between two equal tokens there must be a blank.
        """
        blank = before.blank[:, :, None, :-1]
        either = torch.logaddexp(blank, before.token[:, :, None, :-1])
        return torch.where((tokens_BWK == before.last.unsqueeze(2)).unsqueeze(3), blank, either)

    def _columns(self, tokens_BWK: Tensor) -> Tensor:
        """Log posteriors of tokens in each frame [batch, W, K, frames]."""
        batch, beam, count = tokens_BWK.shape
        index = tokens_BWK.reshape(batch, 1, beam * count).expand(-1, self._scores_BTV.shape[1], -1)
        return self._scores_BTV.gather(2, index).transpose(1, 2).reshape(batch, beam, count, -1)


def _summed(scores: Tensor) -> Tensor:
    """Sums of [..., T] over the frames before the first frame and after each, [..., T + 1]."""
    return torch.nn.functional.pad(scores.cumsum(dim=-1), (1, 0))


def _forward(entries: Tensor, summed: Tensor) -> Tensor:
    """Log probability of being in a token after each frame [..., T + 1].

    Args:
        entries: Log probability of the paths up to each frame that may enter it [..., T].
        summed: Sums of its log posteriors [..., T + 1].
    """
    entered = torch.logcumsumexp(entries - summed[..., :-1], dim=-1) + summed[..., 1:]
    return torch.nn.functional.pad(entered, (1, 0), value=_NEVER)
