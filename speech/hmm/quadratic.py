"""Sums of x xᵀ weighted for each feature by its precision: what MLLT and fMLLR are estimated from."""

from __future__ import annotations

import torch
from torch import Tensor

_FRAMES = 4096  # at a time: the products of a frame's features take 861 floats where there are 40


def weighted_products(weights: Tensor, frames: Tensor) -> Tensor:
    """Σ_n w_ni x_n x_nᵀ for each i.

    Args:
        weights: `[N, D]`.
        frames: `[N, E]`.

    Returns:
        float64 `[D, E, E]`.
    """
    size = frames.shape[1]
    row, column = torch.triu_indices(size, size, device=frames.device)
    total = torch.zeros(weights.shape[1], len(row), dtype=torch.float64, device=frames.device)
    for part, values in zip(torch.split(weights, _FRAMES), torch.split(frames, _FRAMES), strict=True):
        total += (part.T @ (values[:, row] * values[:, column])).double()
    found = total.new_zeros(weights.shape[1], size, size)
    found[:, row, column] = total
    found[:, column, row] = total
    return found
