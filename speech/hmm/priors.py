"""State priors, and likelihoods from a network's posteriors (Bourlard and Morgan 1994).

A hybrid recognizer decodes with p(frame | state), which is p(state | frame) / p(state) times a constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class StateOutputs(NamedTuple):
    """What a decoder needs to know about a network whose outputs are tied states."""

    log_priors: tuple[float, ...]
    """Natural logarithm of each state's share of the training frames."""
    frame_factor: int = 1
    """Frames of the graph to an output frame."""


def log_priors(counts: ArrayLike, floor: float = 1.0) -> tuple[float, ...]:
    """Natural logarithm of each state's share of the frames.

    Args:
        counts: Frames of each state in the alignments; see `AlignmentTable.counts`.
        floor: Frames that a rarer state counts as, so that its likelihood stays finite.

    Returns:
        One value a state; their exponentials add up to one.
    """
    frames = np.maximum(np.asarray(counts, dtype=np.float64), floor)
    return tuple((np.log(frames) - math.log(frames.sum())).tolist())


def scaled_likelihoods(
    log_posteriors: NDArray[np.float32], priors: Sequence[float], frame_factor: int = 1
) -> NDArray[np.float32]:
    """Log likelihoods up to a constant for each frame, at the rate of the alignments.

    Args:
        log_posteriors: `[T', P]`, of output frames.
        priors: `[P]`, of `log_priors`.
        frame_factor: aligned frames to an output frame, each of which gets its likelihoods.

    Returns:
        float32 `[T' * frame_factor, P]`.
    """
    likelihoods = (log_posteriors - np.asarray(priors, dtype=np.float32)).astype(np.float32)
    return np.repeat(likelihoods, frame_factor, axis=0) if frame_factor > 1 else likelihoods
