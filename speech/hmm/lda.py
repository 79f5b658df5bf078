"""Linear discriminant analysis: the projection that separates tied states best (Haeb-Umbach & Ney 1992).

Statistics are sums, so those of shards add up in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
    found: Tensor = torch.linalg.solve_triangular(lower.T, chosen, upper=True).T
    return found.float().contiguous()
