"""Mean and variance normalization over a window that slides along the utterance (Kaldi's `apply-cmvn-sliding`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configurable.lazy import torch
from speech.features.cmvn import STD_FLOOR, frame_mask

if TYPE_CHECKING:
    from torch import Tensor


MIN_WINDOW = 100
"""Frames of the smallest window at the start of an utterance, if windows are not centred."""


def window_bounds(lengths: Tensor, places: Tensor, window: int, min_window: int, center: bool) -> tuple[Tensor, Tensor]:
    """Start and end (exclusive) of the windows of some frames, int64 `[B, T]` each.

    At the ends of an utterance, a centred window is shifted into it. A window that is not centred contains the frame
    and the `window` frames before it; at the start of an utterance it extends ahead to at least `min_window` frames.

    Args:
        lengths: `[B]`, frames of each utterance.
        places: indices of the frames, `[T]`, or separately for each utterance `[B, T]`.
        window: size of the window in frames.
        min_window: smallest window at the start of an utterance, for `center=False`.
        center: whether the window is centred at the frame.
    """
    if center:
        start = places - window // 2
        end = start + window - start.clamp(max=0)
    else:
        start = places - window
        end = (places + 1).clamp(min=min_window)
    start = start.clamp(min=0)
    beyond = (end - lengths.unsqueeze(1)).clamp(min=0)
    return (start - beyond).clamp(min=0), end - beyond


def sliding_normalize(
    feats: Tensor,
    lengths: Tensor,
    *,
    window: int = 600,
    min_window: int = MIN_WINDOW,
    center: bool = True,
    variance: bool = True,
    counted: Tensor | None = None,
    floor: float = 0.0,
) -> Tensor:
    """Normalize each frame by the mean (and standard deviation) of its window.

    Uses running sums in float64, so the cost per frame does not depend on the window. With `counted`, windows contain
    only counted frames; a frame that is not counted uses the window of the last counted frame before it, or of the
    first one.

    Args:
        feats: `[B, T, F]`.
        lengths: `[B]`, frames of each utterance.
        window: size of the window in frames.
        min_window: smallest window at the start of an utterance, for `center=False`.
        center: whether the window is centred at the frame; otherwise it ends there.
        variance: whether to divide by the standard deviation (at least `STD_FLOOR`).
        counted: bool `[B, T]`, the frames from which statistics are computed; by default all frames of an utterance.
        floor: raise values to at least this many standard deviations below their mean; 0 disables it.

    Returns:
        `[B, T, F]`, zero in the padding; with `variance`, zero also for a window of one frame.
    """
    inside = frame_mask(lengths, feats.shape[1], feats.device)
    lengths = lengths.to(feats.device)
    frames = torch.where(inside.unsqueeze(2), feats, 0.0).to(torch.float64)
    used, places = frames, torch.arange(feats.shape[1], device=feats.device)
    if counted is not None:
        # move the counted frames together, so that windows contain only them
        ranks, sizes = counted.long().cumsum(1) - 1, counted.sum(1)
        order = torch.where(counted, ranks, places + sizes.unsqueeze(1) - ranks - 1)
        used = torch.zeros_like(frames).scatter(1, order.unsqueeze(2).expand_as(frames), frames)
        places, lengths = ranks.clamp(min=0), sizes
    mean, spread, sizes = _window_moments(used, lengths, window_bounds(lengths, places, window, min_window, center))
    centred = frames - mean
    std = spread.sqrt().clamp(min=STD_FLOOR)
    if floor:
        centred = centred.maximum(-floor * std)
    if variance:
        centred = torch.where(sizes > 1, centred / std, 0.0)
    return torch.where(inside.unsqueeze(2), centred, 0.0).to(feats.dtype)


def _window_moments(frames: Tensor, lengths: Tensor, bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each window `[B, T, F]`, and its number of frames `[B, T, 1]`."""
    start, end = bounds
    # Subtract the utterance's mean first: a difference of running sums of large squares would lose the variance.
    inside = frame_mask(lengths, frames.shape[1]).unsqueeze(2)
    frames = torch.where(inside, frames, 0.0)
    middle = frames.sum(1, keepdim=True) / lengths.clamp(min=1).view(-1, 1, 1)
    frames = torch.where(inside, frames - middle, 0.0)
    sizes = (end - start).clamp(min=1).unsqueeze(2)
    mean = _window_sums(frames, start, end) / sizes
    spread = (_window_sums(frames.square(), start, end) / sizes - mean.square()).clamp(min=0)
    return mean + middle, spread, sizes


def _window_sums(frames: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Sums of frames from `start` to `end`: `[B, T, F]`."""
    sums = torch.nn.functional.pad(frames.cumsum(1), (0, 0, 1, 0))
    shape = (-1, -1, frames.shape[2])
    last = frames.shape[1]
    upper = sums.gather(1, end.clamp(0, last).unsqueeze(2).expand(shape))
    return upper - sums.gather(1, start.clamp(0, last).unsqueeze(2).expand(shape))
