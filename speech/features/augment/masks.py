"""SpecAugment (Park et al. 2019, arXiv 1904.08779, section 2): time warping, time and frequency masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configurable.lazy import torch
from devices.transfers import beside
from speech.features.augment.base import FeatureAugmentation
from speech.features.augment.config import MaskConfig, TimeWarpConfig
from speech.features.augment.draws import Drawn, uniforms
from speech.features.cmvn import frame_mask

if TYPE_CHECKING:
    from torch import Tensor


class Masks(FeatureAugmentation):
    """Sets spans of frames and of features to zero, which is the mean after normalization.

    A time mask covers t frames from t0, t uniform in 0..T, where T is `time_mask_frames` or `time_mask_share` of the
    utterance, whichever is less, and t0 uniform in 0..length - t; a frequency mask likewise.
    """

    def __init__(self, config: MaskConfig, sample_rate: int = 0) -> None:
        self.config = config

    def draw(self, seeds: Sequence[int]) -> Drawn:
        """See `FeatureAugmentation`."""
        return {"draws": uniforms(seeds, "masks", 2 * (self.config.time_masks + self.config.freq_masks))}

    def apply(self, feats: Tensor, lengths: Tensor, drawn: Drawn) -> Tensor:
        """See `FeatureAugmentation`."""
        config, draws = self.config, beside(drawn["draws"], feats)
        batch, num_frames, num_bins = feats.shape
        frames = lengths.to(feats.device, torch.float64)
        longest = (frames * config.time_mask_share).floor().clamp(max=config.time_mask_frames)
        masked_time = _spans(frames, longest, draws[:, : 2 * config.time_masks], num_frames)
        bins = torch.full((batch,), num_bins, dtype=torch.float64, device=feats.device)
        widest = bins.clamp(max=config.freq_mask_bins)
        masked_bins = _spans(bins, widest, draws[:, 2 * config.time_masks :], num_bins)
        masked = masked_time.unsqueeze(2) | masked_bins.unsqueeze(1)
        masked &= frame_mask(lengths, num_frames, feats.device).unsqueeze(2)
        return feats.masked_fill(masked, 0.0)


def _spans(sizes: Tensor, widest: Tensor, draws: Tensor, total: int) -> Tensor:
    """In each row of `sizes[b]` places, spans at most `widest[b]` wide by pairs of draws: bool `[B, total]`."""
    pairs = draws.reshape(len(sizes), -1, 2)
    widths = (pairs[..., 0] * (widest.unsqueeze(1) + 1)).floor()
    starts = (pairs[..., 1] * (sizes.unsqueeze(1) - widths + 1)).floor()
    places = torch.arange(total, dtype=torch.float64, device=sizes.device)
    inside = (places >= starts.unsqueeze(2)) & (places < (starts + widths).unsqueeze(2))
    return inside.any(1)


class TimeWarp(FeatureAugmentation):
    """Moves a point of the utterance in time; both sides follow linearly, first and last frame stay.

    The point c is uniform in W..T-1-W and moved by w, uniform in -W..W, where W is `frames`, or less in a short
    utterance. Frame t of the result is read at t·c/(c+w) up to c+w, beyond at T-1-(T-1-t)·(T-1-c)/(T-1-c-w), between
    two frames by linear interpolation.
    """

    def __init__(self, config: TimeWarpConfig, sample_rate: int = 0) -> None:
        self.frames = config.frames

    def draw(self, seeds: Sequence[int]) -> Drawn:
        """See `FeatureAugmentation`."""
        return {"draws": uniforms(seeds, "time_warp", 2)}

    def apply(self, feats: Tensor, lengths: Tensor, drawn: Drawn) -> Tensor:
        """See `FeatureAugmentation`."""
        num_frames = feats.shape[1]
        if num_frames == 0:
            return feats
        frames = lengths.to(feats.device)
        places = torch.arange(num_frames, dtype=torch.float64, device=feats.device)
        sources = self._sources(frames.double(), places, beside(drawn["draws"], feats))
        lower = sources.floor()
        share = (sources - lower).to(feats).unsqueeze(2)
        last = (frames - 1).clamp(min=0).unsqueeze(1)
        first = lower.long()
        second = torch.minimum(first + 1, last)
        shape = (-1, -1, feats.shape[2])
        before = feats.gather(1, first.unsqueeze(2).expand(shape))
        after = feats.gather(1, second.unsqueeze(2).expand(shape))
        inside = frame_mask(lengths, num_frames, feats.device).unsqueeze(2)
        return torch.where(inside, torch.lerp(before, after, share), feats)

    def moved(self, labels: Tensor, drawn: Drawn, per_frame: float) -> Tensor:
        """See `FeatureAugmentation`: a label is read at the time where `apply` reads its frame, rounded."""
        length = torch.tensor([math.ceil(len(labels) / per_frame)], dtype=torch.float64)
        places = torch.arange(len(labels), dtype=torch.float64) / per_frame
        sources = self._sources(length, places, drawn["draws"].unsqueeze(0))[0]
        return labels[(sources * per_frame).round().long().clamp(max=len(labels) - 1)]

    def _sources(self, lengths: Tensor, places: Tensor, draws: Tensor) -> Tensor:
        """Where `places` `[N]` of the result are read: float64 `[B, N]`, inside the utterance, in frames."""
        last = (lengths - 1).clamp(min=0).unsqueeze(1)
        # Less than half, so that a point has this room on both sides; too short an utterance is left alone.
        reach = ((last - 1) / 2).floor().clamp(min=0, max=self.frames)
        center = reach + (draws[:, :1] * (last - 2 * reach + 1)).floor()
        moved = center + ((draws[:, 1:] * (2 * reach + 1)).floor() - reach)
        moved = torch.minimum(moved.clamp(min=1), (last - 1).clamp(min=1))
        places = torch.minimum(places.unsqueeze(0), last)
        left = places * center / moved
        right = last - (last - places) * (last - center) / (last - moved).clamp(min=1)
        warped = torch.where(places <= moved, left, right)
        return torch.where(reach > 0, warped, places).clamp(min=0).minimum(last)
