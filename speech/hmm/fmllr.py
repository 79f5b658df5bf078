"""Feature-space maximum-likelihood linear regression: a speaker's affine transform (Gales 1998, CSL 12).

x̂ = A x + b = W ξ with ξ = (x, 1) maximizes β log |A| + Σ_i (w_i k_i - ½ w_i G_i w_iᵀ), row by row. Speaker-adaptive
training applies such a transform to each training speaker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.hmm.gmm import DiagGmm
from speech.hmm.quadratic import weighted_products

_Floats = NDArray[np.float64]
SILENCE_WEIGHT = 0.01
"""Weight of frames of silence and noise, which say little about the speaker; Kaldi's in `decode_fmllr.sh`."""


@dataclass
class FmllrStatistics:
    """Sums over a speaker's frames.

    Attributes:
        products: float64 `[D, D + 1, D + 1]`, G_i = Σ γ / σ²_i ξ ξᵀ.
        linear: float64 `[D, D + 1]`, k_i = Σ γ μ_i / σ²_i ξ.
        count: Frames, weighted.
    """

    products: Tensor
    linear: Tensor
    count: float = 0.0

    @classmethod
    def zeros(cls, dim: int) -> FmllrStatistics:
        """No frames."""
        kind = torch.float64
        return cls(torch.zeros(dim, dim + 1, dim + 1, dtype=kind), torch.zeros(dim, dim + 1, dtype=kind))

    @classmethod
    def expected(cls, gmm: DiagGmm, count: float) -> FmllrStatistics:
        """What frames drawn from the mixtures themselves give on average: the identity transforms them best.

        As a prior, they keep a transform near the identity where a speaker has said little.

        Args:
            gmm: The mixtures, each as likely as the others.
            count: Number of frames.
        """
        inside = gmm.weights > 0
        weights, means = gmm.weights[inside].double(), gmm.means[inside].double()
        variances = gmm.variances[inside].double()
        scaled = weights.unsqueeze(1) * (count / gmm.num_pdfs) / variances
        extended = torch.cat([means, means.new_ones(len(means), 1)], dim=1)
        products, dim = weighted_products(scaled, extended), gmm.dim
        products[:, range(dim), range(dim)] += scaled.T @ variances
        return cls(products.cpu(), ((scaled * means).T @ extended).cpu(), count)

    def add(
        self, gmm: DiagGmm, frames: Tensor, pdfs: Tensor, weights: Tensor | None = None, adapted: Tensor | None = None
    ) -> FmllrStatistics:
        """Add frames, in place.

        Args:
            gmm: The mixtures that the transformed frames should fit.
            frames: `[N, D]`, not adapted.
            pdfs: int64 `[N]`.
            weights: `[N]`, of the frames: low for silence, which carries little information about the speaker.
            adapted: `[N, D]`, the frames under the transform so far, for the components' posteriors.
        """
        weights = torch.ones(len(frames), device=frames.device) if weights is None else weights.to(frames)
        precisions, targets = torch.zeros_like(frames), torch.zeros_like(frames)
        for tile in gmm.tiles(frames if adapted is None else adapted, pdfs):
            width = tile.posteriors.shape[2]
            inverse = gmm.variances[tile.pdfs, :width].reciprocal()
            where = tile.frames[tile.inside]
            precisions[where] = torch.bmm(tile.posteriors, inverse)[tile.inside]
            targets[where] = torch.bmm(tile.posteriors, gmm.means[tile.pdfs, :width] * inverse)[tile.inside]
        extended = torch.cat([frames, frames.new_ones(len(frames), 1)], dim=1)
        self.products += weighted_products(precisions * weights.unsqueeze(1), extended).cpu()
        self.linear += ((targets * weights.unsqueeze(1)).double().T @ extended.double()).cpu()
        self.count += float(weights.sum(dtype=torch.float64))
        return self

    def __add__(self, other: FmllrStatistics) -> FmllrStatistics:
        return FmllrStatistics(self.products + other.products, self.linear + other.linear, self.count + other.count)


def identity(dim: int) -> Tensor:
    """The transform that changes nothing: float64 `[D, D + 1]`."""
    return torch.eye(dim, dim + 1, dtype=torch.float64)


def estimate_fmllr(stats: FmllrStatistics, minimum: float = 500.0, iterations: int = 20) -> Tensor:
    """A speaker's transform, by row updates from the identity.

    w_i = (α p_i + k_i) G_i⁻¹ with p_i the row's cofactors and a zero, where α solves
    α² p G⁻¹ pᵀ + α p G⁻¹ kᵀ - β = 0 and makes the auxiliary function larger (Gales 1998, equations 18 to 20).

    Args:
        stats: Sums over the speaker's frames.
        minimum: With fewer frames, the identity.
        iterations: Passes over all rows.

    Returns:
        float64 `[D, D + 1]`.
    """
    dim = len(stats.linear)
    start = identity(dim)
    if stats.count < minimum:
        return start
    # numpy: the thousands of small operations take a tenth of the time that they take with torch
    transform, linear = start.numpy().copy(), stats.linear.numpy()
    row_inverses = torch.linalg.inv(stats.products).numpy()
    for _ in range(iterations):
        before = transform.copy()
        inverse = np.linalg.inv(transform[:, :dim])
        for i in range(dim):
            transform[i] = _row(row_inverses[i], linear[i], np.append(inverse[:, i], 0.0), stats.count)
            # Sherman-Morrison: the inverse after the change of one row
            product = transform[i, :dim] @ inverse
            scale, product[i] = product[i], product[i] - 1.0
            inverse -= np.outer(inverse[:, i] / scale, product)
        if np.abs(transform - before).max() < 1e-6:
            break
    return torch.from_numpy(transform)


def _row(inverse: _Floats, linear: _Floats, cofactors: _Floats, count: float) -> _Floats:
    """One row, given the cofactors (up to a factor) of the others."""
    direction = inverse @ cofactors
    square, cross = float(cofactors @ direction), float(linear @ direction)
    root = math.sqrt(cross**2 + 4.0 * count * square)
    solutions = [(-cross + sign * root) / (2.0 * square) for sign in (1.0, -1.0)]
    gains = [count * math.log(abs(a * square + cross)) - 0.5 * a**2 * square for a in solutions]
    best = solutions[0] if gains[0] >= gains[1] else solutions[1]
    row: _Floats = best * direction + inverse @ linear
    return row
