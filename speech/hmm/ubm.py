"""The universal background model (UBM): one Gaussian mixture with diagonal covariances for the speech of all speakers.

    log p(x) = log Σ_c w_c N(x; m_c, σ²_c)

It is a `DiagGmm` with one pdf, grown from a single Gaussian by EM and splitting (Reynolds et al. 2000, "Speaker
verification using adapted Gaussian mixture models").
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from speech.hmm.gmm import DiagGmm
from speech.hmm.statistics import GmmStatistics, update

_CHUNK = 4096  # frames at a time: 32 MB of posteriors of 2048 components
_FLOOR = 0.01  # of the variance of all frames: the smallest variance of a component
_MINIMUM = 10.0  # frames: components that explain fewer are removed


@dataclass(frozen=True)
class BackgroundModel:
    """A mixture of C components in D dimensions.

    Attributes:
        gmm: Mixtures of one pdf.
    """

    gmm: DiagGmm

    @classmethod
    def standard(cls, dim: int) -> BackgroundModel:
        """One Gaussian with zero mean and unit variance: where EM starts."""
        return cls(DiagGmm.of_moments(torch.zeros(1, dim), torch.ones(1, dim)))

    @property
    def num_components(self) -> int:
        """Number of components, C."""
        return self.gmm.num_components

    @property
    def dim(self) -> int:
        """Number of features in a frame, D."""
        return self.gmm.dim

    def to(self, device: torch.device | str) -> BackgroundModel:
        """The same model on a device."""
        return BackgroundModel(self.gmm.to(device))

    @cached_property
    def _components(self) -> DiagGmm:
        """The components as pdfs of their own, whose densities of many frames are one matrix product."""
        return DiagGmm.of_moments(self.gmm.means[0], self.gmm.variances[0])

    def posteriors(self, frames: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Posteriors of the components, some thousand frames at a time.

        Args:
            frames: `[T, D]`.

        Yields:
            Frames `[t, D]`, posteriors `[t, C]` and log densities `[t]`, all float32.
        """
        log_weights = self.gmm.weights[0].log()
        for part in torch.split(frames, _CHUNK):
            scores = self._components.log_likelihoods(part) + log_weights
            total = torch.logsumexp(scores, dim=1)
            yield part, (scores - total.unsqueeze(1)).exp_(), total

    def accumulate(self, frames: Tensor, into: GmmStatistics | None = None) -> GmmStatistics:
        """The E step: sums over frames, in float64.

        Args:
            frames: `[T, D]`.
            into: Statistics to add to, in place.
        """
        stats = GmmStatistics.zeros(self.gmm) if into is None else into
        for part, posteriors, scores in self.posteriors(frames):
            weights = posteriors.double()
            stats.occupancies[0] += weights.sum(0)
            stats.sums[0] += weights.T @ torch.cat([part, part.square()], dim=1).double()
            stats.log_likelihood += float(scores.sum(dtype=torch.float64))
            stats.num_frames += len(part)
        return stats

    def updated(self, stats: GmmStatistics, components: int, seed: int = 0) -> BackgroundModel:
        """The M step; then components are split until there are as many as wanted.

        Args:
            stats: Sums over all frames.
            components: Wanted number of components.
            seed: Of the directions in which components are split.

        Raises:
            ValueError: There are no frames.
        """
        if not stats.num_frames:
            raise ValueError("there are no frames to estimate a background model from: give it speech")
        dim = self.dim
        moments = stats.sums[0].sum(0) / stats.num_frames
        variances = moments[dim:] - moments[:dim].square()
        gmm = update(self.gmm, stats, _FLOOR * variances.clamp(min=1e-6), _MINIMUM)
        return BackgroundModel(gmm.split([components], seed))


def component_schedule(components: int, iterations: int) -> list[int]:
    """Number of components after each iteration of EM: doubled after every n-th, up to `components`.

    Halves of a component move apart slowly, so a size needs several iterations.
    """
    doublings = math.ceil(math.log2(components)) if components > 1 else 0
    sizes = [min(2**power, components) for power in range(doublings + 1)]
    grown = [size for size in sizes[1:] for _ in range(iterations)]
    return [1, *grown, components]
