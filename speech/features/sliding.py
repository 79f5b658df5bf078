"""Mean and variance normalization over a window that slides along the utterance (Kaldi's `apply-cmvn-sliding`)."""

from __future__ import annotations

import torch
from torch import Tensor

from speech.features.cmvn import STD_FLOOR, frame_mask


def window_bounds(
    lengths: Tensor, num_frames: int, window: int, min_window: int, center: bool
) -> tuple[Tensor, Tensor]:
    """First frame and end (exclusive) of the window of every frame, int64 `[B, num_frames]` each.

    A centred window is moved into the utterance at its ends. The other kind holds the frame and the `window` frames
    before it; at the start of an utterance it reaches ahead until it holds `min_window` frames.
    """
    places = torch.arange(num_frames, device=lengths.device)
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
) -> Tensor:
    """Normalize each frame by the mean (and standard deviation) of the window around it.

    Sums are running sums in float64, so that a frame costs the same whatever the window.

    Args:
        feats: `[B, T, F]`.
        lengths: `[B]`, frames of each utterance.
        window: frames of the window.
        min_window: frames that it has at the start of an utterance, for `center=False`.
        center: the window surrounds the frame; else it ends there.
        variance: divide by the standard deviation (at least `STD_FLOOR`), too.

    Returns:
        `[B, T, F]`, zero in the padding; with `variance` zero for a window of one frame.
    """
    inside = frame_mask(lengths, feats.shape[1], feats.device).unsqueeze(2)
    frames = torch.where(inside, feats, 0.0).to(torch.float64)
    lengths = lengths.to(feats.device)
    # Around the utterance's own mean: the difference of two running sums of large squares would lose the variance.
    counts = lengths.clamp(min=1).view(-1, 1, 1)
    frames = torch.where(inside, frames - frames.sum(1, keepdim=True) / counts, 0.0)
    start, end = window_bounds(lengths, feats.shape[1], window, min_window, center)
    sizes = (end - start).clamp(min=1).unsqueeze(2)
    mean = _window_sums(frames, start, end) / sizes
    centred = frames - mean
    if variance:
        spread = (_window_sums(frames.square(), start, end) / sizes - mean.square()).clamp(min=0)
        centred = torch.where(sizes > 1, centred / spread.sqrt().clamp(min=STD_FLOOR), 0.0)
    return torch.where(inside, centred, 0.0).to(feats.dtype)


def _window_sums(frames: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Sums of frames from `start` to `end`: `[B, T, F]`."""
    sums = torch.nn.functional.pad(frames.cumsum(1), (0, 0, 1, 0))
    shape = (-1, -1, frames.shape[2])
    last = frames.shape[1]
    upper = sums.gather(1, end.clamp(0, last).unsqueeze(2).expand(shape))
    return upper - sums.gather(1, start.clamp(0, last).unsqueeze(2).expand(shape))
