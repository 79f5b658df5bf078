"""Deltas, splicing and stride, applied after normalization; Kaldi's definitions.

At its ends, an utterance is extended by its first and last frame; padding is never used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speech.features.cmvn import frame_mask
from speech.features.config import FeatureConfig

_WINDOW = 2
"""Frames to either side that a delta covers."""


def repeat_edges(feats: Tensor, lengths: Tensor, left: int, right: int) -> Tensor:
    """Extend each utterance by copies of its first and last frame.

    Args:
        feats: `[B, T, F]`.
        lengths: `[B]`, frames of each utterance.
        left: frames to add in front.
        right: frames to add at the end.

    Returns:
        `[B, left + T + right, F]`: frame t of the result is frame t - left of the utterance, or the nearest one. Later
        frames than `right` after an utterance's end, and all frames of an empty utterance, are unspecified.
    """
    batch, total, dim = feats.shape
    if total == 0:
        return feats.new_zeros(batch, left + right, dim)
    places = torch.arange(-left, total + right, device=feats.device)
    last = (lengths.to(feats.device) - 1).clamp(min=0).unsqueeze(1)
    index = places.clamp(min=0).unsqueeze(0).minimum(last)
    return feats.gather(1, index.unsqueeze(2).expand(-1, -1, dim))


def delta_filters(order: int, window: int) -> list[Tensor]:
    """Delta filters of orders 0 to `order`: float64, the n-th of size `[2 * n * window + 1]`.

    Order 1 is the regression slope Σ j·x(t+j) / Σ j² over j in -window..window (HTK Book, section 5.9), order n the
    same filter applied n times.
    """
    slope = torch.arange(-window, window + 1, dtype=torch.float64)
    slope = slope / slope.square().sum()
    filters = [torch.ones(1, dtype=torch.float64)]
    for _ in range(order):
        spread = filters[-1].new_zeros(len(slope), len(filters[-1]) + 2 * window)
        for row, weight in enumerate(slope):
            spread[row, row : row + len(filters[-1])] = weight * filters[-1]
        filters.append(spread.sum(0))
    return filters


def add_deltas(feats: Tensor, lengths: Tensor, order: int = 2, window: int = _WINDOW) -> Tensor:
    """Append deltas (Kaldi's `add-deltas`).

    Args:
        feats: `[B, T, F]`.
        lengths: `[B]`, frames of each utterance.
        order: highest order: 2 appends deltas and delta-deltas.
        window: frames to either side that a delta covers.

    Returns:
        `[B, T, (order + 1) * F]`, zero in the padding.
    """
    total, reach = feats.shape[1], order * window
    wide = repeat_edges(feats, lengths, reach, reach)
    blocks = []
    for number, weights in enumerate(delta_filters(order, window)):
        start = reach - number * window
        block = torch.zeros_like(feats)
        for shift, weight in enumerate(weights.tolist()):
            if weight:
                block.add_(wide[:, start + shift : start + shift + total], alpha=weight)
        blocks.append(block)
    return _zero_padding(torch.cat(blocks, dim=2), lengths)


def splice(feats: Tensor, lengths: Tensor, left: int, right: int) -> Tensor:
    """Concatenate each frame with its neighbours (Kaldi's `splice-feats`).

    Args:
        feats: `[B, T, F]`.
        lengths: `[B]`, frames of each utterance.
        left: frames before.
        right: frames after.

    Returns:
        `[B, T, (left + 1 + right) * F]`, earliest frame first, zero in the padding.
    """
    total = feats.shape[1]
    wide = repeat_edges(feats, lengths, left, right)
    return _zero_padding(torch.cat([wide[:, k : k + total] for k in range(left + 1 + right)], dim=2), lengths)


def thin(feats: Tensor, lengths: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Keep frames 0, stride, 2 * stride, … (Kaldi's `subsample-feats`); returns features and frame counts."""
    return feats[:, ::stride], thinned(lengths, stride)


def thinned(lengths: Tensor, stride: int) -> Tensor:
    """Frames that `thin` keeps of each number of frames."""
    return torch.div(lengths + stride - 1, stride, rounding_mode="floor")


def _zero_padding(feats: Tensor, lengths: Tensor) -> Tensor:
    return feats.masked_fill_(~frame_mask(lengths, feats.shape[1], feats.device).unsqueeze(2), 0.0)


class Expand(nn.Module):
    """Deltas, splicing and stride as configured; none by default.

    Example:
        >>> expand = Expand(LogMelConfig(delta_order=2, splice_left=1, splice_right=1))
        >>> feats, frames = expand(torch.zeros(1, 50, 40), torch.tensor([50]))
        >>> feats.shape
        torch.Size([1, 50, 360])
    """

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def reach(self) -> tuple[int, int]:
        """Frames before and after a frame that its deltas and its splicing read."""
        config = self.config
        return _WINDOW * config.delta_order + config.splice_left, _WINDOW * config.delta_order + config.splice_right

    def num_frames(self, lengths: Tensor) -> Tensor:
        """Frames that are left of each number of frames."""
        return thinned(lengths, self.config.stride)

    @torch.no_grad()
    def forward(self, feats: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Apply deltas, splicing and stride to normalized features.

        Args:
            feats: `[B, T, F]`.
            lengths: `[B]`, frames of each utterance.

        Returns:
            Features `[B, ceil(T / stride), F * config.frame_factor]`, zero in the padding, and frame counts `[B]`.
        """
        config = self.config
        if config.delta_order:
            feats = add_deltas(feats, lengths, config.delta_order)
        if config.splice_left or config.splice_right:
            feats = splice(feats, lengths, config.splice_left, config.splice_right)
        return thin(feats, lengths, config.stride) if config.stride > 1 else (feats, lengths)
