"""Statistics of the EM algorithm and the M step (Dempster et al. 1977; for mixtures: Bilmes 1998).

Sums are float64 and add up in any order: those of shards are made anywhere and merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from speech.hmm.gmm import DiagGmm


@dataclass
class GmmStatistics:
    """Sufficient statistics of some frames for EM.

    Attributes:
        occupancies: float64 `[P, K]`, frames of each component.
        sums: float64 `[P, K, 2 D]`, the frames' sums and sums of squares, weighted by the posteriors.
        log_likelihood: Of all frames.
        num_frames: Number of frames.
    """

    occupancies: Tensor
    sums: Tensor
    log_likelihood: float = 0.0
    num_frames: int = 0

    @classmethod
    def zeros(cls, gmm: DiagGmm) -> GmmStatistics:
        """No frames."""
        shape, device = gmm.weights.shape, gmm.weights.device
        zeros = torch.zeros(*shape, 2 * gmm.dim, dtype=torch.float64, device=device)
        return cls(torch.zeros(shape, dtype=torch.float64, device=device), zeros)

    def __add__(self, other: GmmStatistics) -> GmmStatistics:
        return GmmStatistics(
            self.occupancies + other.occupancies,
            self.sums + other.sums,
            self.log_likelihood + other.log_likelihood,
            self.num_frames + other.num_frames,
        )

    def cpu(self) -> GmmStatistics:
        """The same statistics in the main memory."""
        return GmmStatistics(self.occupancies.cpu(), self.sums.cpu(), self.log_likelihood, self.num_frames)

    @property
    def average(self) -> float:
        """Log likelihood of a frame."""
        return self.log_likelihood / max(self.num_frames, 1)


def accumulate(
    gmm: DiagGmm,
    frames: Tensor,
    pdfs: Tensor,
    into: GmmStatistics | None = None,
    posterior_frames: Tensor | None = None,
) -> GmmStatistics:
    """The E step: sums over frames whose pdfs are known (Viterbi training).

    Args:
        gmm: The mixtures.
        frames: `[N, D]`.
        pdfs: int64 `[N]`.
        into: Statistics to add to, in place.
        posterior_frames: `[N, D']`, frames that the posteriors are computed from, if they are others than those that
            are summed: single-pass retraining for other features.

    Returns:
        The statistics.
    """
    stats = GmmStatistics.zeros(gmm) if into is None else into
    extended = torch.cat([frames, frames.square()], dim=1)
    for tile in gmm.tiles(frames if posterior_frames is None else posterior_frames, pdfs):
        width = tile.posteriors.shape[2]
        occupancies = tile.posteriors.sum(1, dtype=torch.float64)
        sums = torch.bmm(tile.posteriors.transpose(1, 2), extended[tile.frames])
        stats.occupancies[:, :width].index_add_(0, tile.pdfs, occupancies)
        stats.sums[:, :width].index_add_(0, tile.pdfs, sums.double())
        stats.log_likelihood += float(tile.log_likelihoods.sum(dtype=torch.float64))
    stats.num_frames += len(frames)
    return stats


class Summable(Protocol):
    """Statistics of parts of the data that add up to those of all of it."""

    def __add__(self, other: Self) -> Self:
        """The statistics of both."""


S = TypeVar("S", bound=Summable)


def merge(parts: Iterable[S]) -> S:
    """Statistics of all parts together, added in their order.

    Raises:
        ValueError: There are none.
    """
    iterator = iter(parts)
    total = next(iterator, None)
    if total is None:
        raise ValueError("there are no statistics to merge: no shard has been accumulated")
    for part in iterator:
        total = total + part
    return total


def update(gmm: DiagGmm, stats: GmmStatistics, variance_floor: Tensor, minimum: float = 10.0) -> DiagGmm:
    """The M step.

    Args:
        gmm: The mixtures that the statistics were made with.
        stats: Sums over all frames.
        variance_floor: `[D]`, smallest variances.
        minimum: Components that explain fewer frames are removed, but for a mixture's largest one; a mixture whose
            largest one has fewer keeps its parameters.

    Returns:
        New mixtures.
    """
    occupancies, dim = stats.occupancies, gmm.dim
    kept = occupancies >= minimum
    kept.scatter_(1, occupancies.argmax(1, keepdim=True), True)
    starved = occupancies.max(1).values < minimum
    safe = occupancies.clamp(min=1e-10).unsqueeze(2)
    means = stats.sums[..., :dim] / safe
    variances = (stats.sums[..., dim:] / safe - means.square()).maximum(variance_floor.to(means))
    weights = torch.where(kept, occupancies, 0.0)
    weights /= weights.sum(1, keepdim=True).clamp(min=1e-10)
    weights[starved] = gmm.weights[starved].double()
    means[starved], variances[starved] = gmm.means[starved].double(), gmm.variances[starved].double()
    return _sorted(weights, means, variances)


def _sorted(weights: Tensor, means: Tensor, variances: Tensor) -> DiagGmm:
    """Components by weight, so that those without weight come last, and as few of these as possible."""
    order = weights.argsort(dim=1, descending=True, stable=True)
    order = order[:, : max(int((weights > 0).sum(1).max()), 1)]
    wide = order.unsqueeze(2).expand(-1, -1, means.shape[2])
    weights = weights.gather(1, order)
    empty = (weights <= 0).unsqueeze(2)
    means, variances = means.gather(1, wide), variances.gather(1, wide)
    return DiagGmm(weights, torch.where(empty, 0.0, means), torch.where(empty, 1.0, variances))
