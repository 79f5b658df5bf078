"""Linear transforms of features: LDA, MLLT and fMLLR. Their statistics are sums, so those of shards add up.

- Linear discriminant analysis: the projection that separates tied states best (Haeb-Umbach & Ney 1992).
- Maximum-likelihood linear transform, that is global semi-tied covariances (Gales 1999, IEEE Trans. SAP 7): a square
  matrix for which features fit diagonal covariances best. It is estimated row by row from, for each feature i,
  G_i = Σ γ / σ²_i (x - μ)(x - μ)ᵀ; afterwards features and means are multiplied by it.
- Feature-space maximum-likelihood linear regression, a speaker's affine transform (Gales 1998, CSL 12): x̂ = A x + b =
  W ξ with ξ = (x, 1) maximizes β log |A| + Σ_i (w_i k_i - ½ w_i G_i w_iᵀ), row by row. Speaker-adaptive training
  applies such a transform to each training speaker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.hmm.gmm import DiagGmm


@dataclass
class LdaStatistics:
    """Sums over frames of known classes.

    Attributes:
        counts: float64 `[C]`, frames of each class.
        sums: float64 `[C, F]`.
        products: float64 `[F, F]`, Σ x xᵀ over all frames.
    """

    counts: Tensor
    sums: Tensor
    products: Tensor

    @classmethod
    def zeros(cls, classes: int, dim: int) -> LdaStatistics:
        """No frames."""
        kind = torch.float64
        return cls(
            torch.zeros(classes, dtype=kind), torch.zeros(classes, dim, dtype=kind), torch.zeros(dim, dim, dtype=kind)
        )

    def add(self, frames: Tensor, classes: Tensor) -> LdaStatistics:
        """Add frames `[N, F]` of classes `[N]`, in place."""
        frames, classes = frames.cpu(), classes.cpu()
        self.counts += torch.bincount(classes, minlength=len(self.counts)).double()
        self.sums.index_add_(0, classes, frames.double())
        wide = frames.double()  # in float32 the difference of two large sums would lose the variance within classes
        self.products += wide.T @ wide
        return self

    def __add__(self, other: LdaStatistics) -> LdaStatistics:
        return LdaStatistics(self.counts + other.counts, self.sums + other.sums, self.products + other.products)


def estimate_lda(stats: LdaStatistics, dim: int) -> Tensor:
    """The projection with the largest ratio of between-class to within-class variance.

    Solves B v = λ W v; features come out by falling λ, with unit within-class variance.

    Args:
        stats: Sums over all frames.
        dim: Features to keep, D.

    Returns:
        float32 `[D, F]`.
    """
    total = stats.counts.sum()
    mean = stats.sums.sum(0) / total
    means = stats.sums / stats.counts.clamp(min=1e-10).unsqueeze(1)
    between = stats.sums.T @ means / total
    between -= torch.outer(mean, mean)
    within = stats.products / total - torch.outer(mean, mean) - between
    lower = torch.linalg.cholesky(within + 1e-8 * within.diagonal().mean() * torch.eye(len(within), dtype=within.dtype))
    whitened = torch.linalg.solve_triangular(lower, between, upper=False)
    whitened = torch.linalg.solve_triangular(lower, whitened.T, upper=False)
    _, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
    chosen = vectors.flip(1)[:, :dim]
    projection: Tensor = torch.linalg.solve_triangular(lower.T, chosen, upper=True).T
    return projection.float().contiguous()


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
    terms = (inverse[used].T @ products).double().view(dim, dim, dim)
    return terms + terms.transpose(1, 2)


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
    products = total.new_zeros(weights.shape[1], size, size)
    products[:, row, column] = total
    products[:, column, row] = total
    return products
