"""Maximum-likelihood linear transform, that is global semi-tied covariances (Gales 1999, IEEE Trans. SAP 7).

A square matrix for which features fit diagonal covariances best. It is estimated row by row from, for each feature i,
G_i = Σ γ / σ²_i (x - μ)(x - μ)ᵀ; afterwards features and means are multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speech.hmm.gmm import DiagGmm
from speech.hmm.quadratic import weighted_products


@dataclass
class MlltStatistics:
    """Sums over frames.

    Attributes:
        products: float64 `[D, D, D]`, G_i.
        num_frames: How many frames.
    """

    products: Tensor
    num_frames: float = 0.0

    @classmethod
    def zeros(cls, dim: int) -> MlltStatistics:
        """No frames."""
        return cls(torch.zeros(dim, dim, dim, dtype=torch.float64))

    def add(self, gmm: DiagGmm, frames: Tensor, pdfs: Tensor) -> MlltStatistics:
        """Add frames `[N, D]` of pdfs `[N]`, in place.

        With S_m = Σ γ_m x: G_i = Σ_n (Σ_m γ_nm / σ²_mi) x_n x_nᵀ - Σ_m (S_m μ_mᵀ + μ_m S_mᵀ - γ_m μ_m μ_mᵀ) / σ²_mi.
        """
        dim = gmm.dim
        precisions = torch.zeros(len(frames), dim, device=frames.device)
        for tile in gmm.tiles(frames, pdfs):
            width = tile.posteriors.shape[2]
            means = gmm.means[tile.pdfs, :width].reshape(-1, dim)
            inverse = gmm.variances[tile.pdfs, :width].reciprocal()
            sums = torch.bmm(tile.posteriors.transpose(1, 2), frames[tile.frames]).reshape(-1, dim)
            counts = tile.posteriors.sum(1).reshape(-1, 1)
            weighted = torch.bmm(tile.posteriors, inverse)
            precisions[tile.frames[tile.inside]] = weighted[tile.inside]
            self.products -= _cross_terms(inverse.reshape(-1, dim), means, sums - 0.5 * counts * means).cpu()
        self.products += weighted_products(precisions, frames).cpu()
        self.num_frames += len(frames)
        return self

    def __add__(self, other: MlltStatistics) -> MlltStatistics:
        return MlltStatistics(self.products + other.products, self.num_frames + other.num_frames)


def _cross_terms(inverse: Tensor, means: Tensor, sums: Tensor) -> Tensor:
    """Σ_m (s_m μ_mᵀ + μ_m s_mᵀ) / σ²_mi for each i: float64 `[D, D, D]`."""
    dim = means.shape[1]
    used = sums.abs().sum(1) > 0
    products = torch.einsum("mj,mk->mjk", sums[used], means[used]).reshape(-1, dim * dim)
    found = (inverse[used].T @ products).double().view(dim, dim, dim)
    return found + found.transpose(1, 2)


def estimate_mllt(stats: MlltStatistics, iterations: int = 100) -> Tensor:
    """The transform that maximizes n log |A| - ½ Σ_i a_i G_i a_iᵀ, row by row.

    a_i = c_i G_i⁻¹ sqrt(n / (c_i G_i⁻¹ c_iᵀ)), with c_i the row's cofactors (Gales 1999, equation 26).

    Args:
        stats: Sums over all frames.
        iterations: Passes over all rows.

    Returns:
        float64 `[D, D]`.
    """
    dim = len(stats.products)
    inverses = torch.linalg.inv(stats.products)
    matrix = torch.eye(dim, dtype=torch.float64, device=inverses.device)
    for _ in range(iterations):
        before = matrix.clone()
        for i in range(dim):
            cofactors = torch.linalg.inv(matrix)[:, i]  # but for the determinant, which the scale takes out
            direction = inverses[i] @ cofactors
            matrix[i] = direction * (stats.num_frames / (cofactors @ direction)).sqrt()
        if (matrix - before).abs().max() < 1e-7:
            break
    return matrix
