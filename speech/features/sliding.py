"""Mean and variance normalization over a window that slides along the utterance (Kaldi's `apply-cmvn-sliding`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speech.features.cmvn import STD_FLOOR, frame_mask
from speech.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def window_bounds(lengths: Tensor, places: Tensor, window: int, min_window: int, center: bool) -> tuple[Tensor, Tensor]:
    """First frame and end (exclusive) of the window of the frames at some places, int64 `[B, T]` each.

    A centred window is moved into the utterance at its ends. The other kind holds the frame and the `window` frames
    before it; at the start of an utterance it reaches ahead until it holds `min_window` frames.

    Args:
        lengths: `[B]`, frames of each utterance.
        places: `[T]`, or other ones in each utterance `[B, T]`.
        window: see `sliding_normalize`, as are the rest.
        min_window: for `center=False`.
        center: the window surrounds the frame.
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
    min_window: int = 100,
    center: bool = True,
    variance: bool = True,
    counted: Tensor | None = None,
    floor: float = 0.0,
) -> Tensor:
    """Normalize each frame by the mean (and standard deviation) of the window around it.

    Sums are running sums in float64, so that the cost of a frame does not depend on the window. With `counted`, a
    window holds `window` of the frames that count; one that does not has the window of the last one before it that
    does, or of the first.

    Args:
        feats: `[B, T, F]`.
        lengths: `[B]`, frames of each utterance.
        window: frames of the window.
        min_window: frames that it has at the start of an utterance, for `center=False`.
        center: the window surrounds the frame; else it ends there.
        variance: divide by the standard deviation (at least `STD_FLOOR`), too.
        counted: bool `[B, T]`, the frames that means are taken of; else all of an utterance's.
        floor: raise values that are more than this many standard deviations below their mean; 0 raises none.

    Returns:
        `[B, T, F]`, zero in the padding; with `variance` zero for a window of one frame.
    """
    inside = frame_mask(lengths, feats.shape[1], feats.device)
    lengths = lengths.to(feats.device)
    frames = torch.where(inside.unsqueeze(2), feats, 0.0).to(torch.float64)
    used, places = frames, torch.arange(feats.shape[1], device=feats.device)
    if counted is not None:
        # windows are laid over the frames that count, which are moved together
        order = counted.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        used = frames.gather(1, order.unsqueeze(2).expand_as(frames))
        places, lengths = (counted.cumsum(1) - 1).clamp(min=0), counted.sum(1)
    mean, spread, sizes = _window_moments(used, lengths, window_bounds(lengths, places, window, min_window, center))
    centred = frames - mean
    std = spread.sqrt().clamp(min=STD_FLOOR)
    if floor:
        centred = centred.maximum(-floor * std)
    if variance:
        centred = torch.where(sizes > 1, centred / std, 0.0)
    return torch.where(inside.unsqueeze(2), centred, 0.0).to(feats.dtype)


def _window_moments(frames: Tensor, lengths: Tensor, bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each window `[B, T, F]`, and how many frames it has `[B, T, 1]`."""
    start, end = bounds
    # Around the utterance's own mean: the difference of two running sums of large squares would lose the variance.
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
