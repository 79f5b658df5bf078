"""Converts an alignment (one token for each frame) to its token sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def collapse(
    path: NDArray[np.integer[Any]], posteriors: NDArray[np.floating[Any]], blank: int
) -> tuple[list[int], list[int], list[float]]:
    """Merges repetitions and removes blanks (the map B of Graves 2006, section 3.1).

    Args:
        path: Token of each frame, [T], T ≥ 1.
        posteriors: Posterior of that token in that frame, [T].
        blank: Index of the blank.

    Returns:
        The tokens, the frame in which each starts, and the highest posterior within each.
    """
    starts = np.flatnonzero(np.diff(path, prepend=-1))
    peaks = np.maximum.reduceat(posteriors, starts)
    spoken = path[starts] != blank
    return path[starts][spoken].tolist(), starts[spoken].tolist(), peaks[spoken].tolist()


_IMPOSSIBLE = -1e7
NEVER = -1e9
"""Log probability of what must never be chosen; finite, since the difference of two minus infinities is NaN."""


def emissions_for(log_probs: NDArray[np.float32], width: int, num_frames: int) -> NDArray[np.float32]:
    """Log posteriors as flashlight-text reads them: finite, with columns and frames at the end that are never chosen.

    Args:
        log_probs: [T, V].
        width: Columns, V or more.
        num_frames: Frames, T or more.
    """
    emissions = np.full((num_frames, width), NEVER, dtype=np.float32)
    rows, columns = log_probs.shape
    np.maximum(log_probs, _IMPOSSIBLE, out=emissions[:rows, :columns])
    return emissions
