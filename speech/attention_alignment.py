"""When tokens are spoken, by what a decoder network's heads attend to.

As Whisper does for its words' times (Radford et al. 2022; `find_alignment` in its `timing.py`): the weights of the
heads that follow the speech are standardized over the tokens, smoothed over frames and averaged; the best monotonic
path gives each token its frames.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from configurable.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_MEDIAN = 7
"""Frames of the median filter, as in Whisper."""


def attended_frames(weights_HLT: Tensor) -> list[tuple[int, int]]:
    """First frame of each token and the one after its last; none if there are fewer frames than tokens.

    Args:
        weights_HLT: Attention weights [heads, tokens, frames] of the places that predict the tokens; the last one
            predicts the end, which takes the silence behind the last word.
    """
    _, tokens, frames = weights_HLT.shape
    if frames < tokens:
        return []
    std, mean = torch.std_mean(weights_HLT.double(), dim=1, keepdim=True, correction=0)
    standardized = (weights_HLT.double() - mean) / std.clamp(min=1e-12)
    path = monotonic_path(_smoothed(standardized).mean(dim=0).cpu().numpy())
    starts = np.flatnonzero(np.diff(path, prepend=-1)).tolist()
    return list(pairwise([*starts, frames]))[:-1]


def _smoothed(weights_HLT: Tensor) -> Tensor:
    """Medians over a few frames; the edges are reflected."""
    half = _MEDIAN // 2
    if weights_HLT.shape[2] <= half:
        return weights_HLT
    padded = torch.nn.functional.pad(weights_HLT, (half, half), mode="reflect")
    return padded.unfold(2, _MEDIAN, 1).median(dim=3).values


def monotonic_path(gains_LT: NDArray[np.float64]) -> NDArray[np.int64]:
    """The token of each frame on the path with the highest sum, on which each token follows the one before it.

    Args:
        gains_LT: Gain of each token in each frame, no more tokens than frames.
    """
    tokens, frames = gains_LT.shape
    best = np.full(tokens, -np.inf)
    best[0] = gains_LT[0, 0]
    entered = np.zeros((frames, tokens), dtype=bool)
    for frame in range(1, frames):
        before = np.concatenate(([-np.inf], best[:-1]))
        entered[frame] = before > best
        best = np.maximum(before, best) + gains_LT[:, frame]
    path = np.empty(frames, dtype=np.int64)
    token = tokens - 1
    for frame in range(frames - 1, -1, -1):
        path[frame] = token
        token -= int(entered[frame, token])
    return path
