"""Gaussian mixtures with diagonal covariances, one for each tied state (pdf), all in the same tensors; and their EM.

    log b_j(x) = log Σ_k w_jk N(x; μ_jk, σ²_jk)

A component's log density is linear in (x, x²), so densities of many frames are one matrix product. Mixtures have
different numbers of components: rows are padded with components of weight 0, which come last, and work is done for
mixtures of about the same size at a time. The same code runs on a CPU and on a GPU.

Training is the EM algorithm (Dempster et al. 1977; for mixtures: Bilmes 1998). Its sums are float64 and add up in any
order: those of shards are made anywhere and merged.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

# numbers of components that mixtures are padded to, so that few shapes occur and at most a third is padding
_WIDTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256)
MOST_COMPONENTS = _WIDTHS[-1]
"""Components of one of several mixtures, at most."""
_CACHED = 1 << 17  # scores of components at a time on a CPU: they and what becomes of them stay in its cache
_NEGLIGIBLE = -80.0  # log of what changes no float32 sum with 1 in it; exp of much less is denormal, and slow
_TILE = 32  # frames of one pdf that are computed together
_TILES = 1024  # tiles at a time: some ten megabytes of intermediate results
_PERTURB = 0.2  # of a standard deviation: how far the halves of a split component move apart (as in HTK)


@dataclass(frozen=True)
class Tiles:
    """Frames of some pdfs with the posteriors of their mixtures' components.

    Attributes:
        frames: int64 `[M, R]`, which frames; where `inside` is false, some frame.
        inside: bool `[M, R]`.
        pdfs: int64 `[M]`, the pdf of each tile.
        posteriors: float32 `[M, R, K]`, zero outside.
        log_likelihoods: float32 `[M, R]`, zero outside.
    """

    frames: Tensor
    inside: Tensor
    pdfs: Tensor
    posteriors: Tensor
    log_likelihoods: Tensor


class DiagGmm:
    """Mixtures of P pdfs with up to K components in D dimensions.

    Args:
        weights: `[P, K]`; zero for padding, which comes last in a row.
        means: `[P, K, D]`.
        variances: `[P, K, D]`, positive.
    """

    def __init__(self, weights: Tensor, means: Tensor, variances: Tensor) -> None:
        self.weights, self.means, self.variances = weights.float(), means.float(), variances.float()
        self.counts = (weights > 0).sum(1)

    def check(self) -> None:
        """Check mixtures that were read from a file.

        Raises:
            ValueError: Their shapes do not fit together, or a number is out of range.
        """
        shape = (*self.weights.shape, self.means.shape[-1])
        if not (len(shape) == 3 and 0 not in shape and self.means.shape == self.variances.shape == shape):
            raise ValueError(f"mixtures of {shape} have other means or variances")
        if not all(torch.isfinite(part).all() for part in (self.weights, self.means, self.variances)):
            raise ValueError("a number of the mixtures is infinite or NaN")
        if not (self.variances > 0).all() or not ((self.weights >= 0) & (self.weights <= 1.001)).all():
            raise ValueError("a variance of the mixtures is not positive, or a weight is no probability")
        filled = torch.arange(shape[1]) < self.counts.cpu().unsqueeze(1)
        if not (filled.any(1) & ((self.weights.cpu() > 0) == filled).all(1)).all():
            raise ValueError("a mixture has no component, or padding between them")

    @property
    def num_pdfs(self) -> int:
        """Number of mixtures, P."""
        return len(self.weights)

    @property
    def dim(self) -> int:
        """Number of features in a frame, D."""
        return self.means.shape[2]

    @property
    def num_components(self) -> int:
        """Components of all mixtures."""
        return int(self.counts.sum())

    def to(self, device: torch.device | str) -> DiagGmm:
        """The same mixtures on a device."""
        return DiagGmm(self.weights.to(device), self.means.to(device), self.variances.to(device))

    @classmethod
    def of_moments(cls, means: Tensor, variances: Tensor) -> DiagGmm:
        """One Gaussian for each pdf, from `[P, D]` each."""
        return cls(torch.ones(len(means), 1, device=means.device), means.unsqueeze(1), variances.unsqueeze(1))

    @cached_property
    def _inverse(self) -> Tensor:
        return self.variances.reciprocal()

    @cached_property
    def _linear(self) -> Tensor:
        """Coefficients of (x, x²): `[P, K, 2 D]`."""
        return torch.cat([self.means * self._inverse, -0.5 * self._inverse], dim=2)

    @cached_property
    def _constant(self) -> Tensor:
        """The terms without x: `[P, K]`, -inf for padding."""
        squares = (self.means.double().square() / self.variances + self.variances.double().log()).sum(2)
        return (self.weights.double().log() - 0.5 * (squares + self.dim * math.log(2 * math.pi))).float()

    @cached_property
    def _width_class(self) -> Tensor:
        widths = torch.tensor(_WIDTHS, device=self.counts.device)
        return torch.bucketize(self.counts, widths)

    def _groups(self, pdfs: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Places in `pdfs` of mixtures of about the same size, and the size."""
        classes = self._width_class[pdfs]
        for number in torch.unique(classes).tolist():
            yield (classes == number).nonzero().squeeze(1), min(_WIDTHS[number], self.weights.shape[1])

    def log_likelihoods(self, frames: Tensor, pdfs: Tensor | None = None) -> Tensor:
        """Log densities of frames under some pdfs (or all).

        Args:
            frames: `[T, D]`.
            pdfs: int64 `[Q]`.

        Returns:
            float32 `[T, Q]`.
        """
        pdfs = torch.arange(self.num_pdfs, device=frames.device) if pdfs is None else pdfs
        extended = torch.cat([frames, frames.square()], dim=1).T.contiguous()
        log_probs = frames.new_empty(len(pdfs), len(frames))
        for places, width in self._groups(pdfs):
            most = len(places) if frames.is_cuda else max(1, _CACHED // (width * max(1, len(frames))))
            for part in torch.split(places, most):
                chosen = pdfs[part]
                linear = self._linear[chosen, :width].reshape(-1, 2 * self.dim)
                constant = self._constant[chosen, :width].reshape(-1, 1)
                scores = torch.addmm(constant, linear, extended).view(len(chosen), width, len(frames))
                log_probs[part] = scores[:, 0] if width == 1 else _log_sum_exp(scores)
        return log_probs.T.contiguous()

    def tiles(self, frames: Tensor, pdfs: Tensor) -> Iterator[Tiles]:
        """Posteriors of the components of each frame's pdf.

        Args:
            frames: `[N, D]`.
            pdfs: int64 `[N]`, the pdf of each frame.

        Yields:
            Every frame is in one tile.
        """
        order = torch.argsort(pdfs, stable=True)
        present, numbers = torch.unique(pdfs, return_counts=True)
        tiles = (numbers + _TILE - 1) // _TILE
        tile_pdf = present.repeat_interleave(tiles)
        first = (numbers.cumsum(0) - numbers).repeat_interleave(tiles)
        rank = torch.arange(len(tile_pdf), device=frames.device) - (tiles.cumsum(0) - tiles).repeat_interleave(tiles)
        places = (first + rank * _TILE).unsqueeze(1) + torch.arange(_TILE, device=frames.device)
        inside = places < (first + numbers.repeat_interleave(tiles)).unsqueeze(1)
        index = order[places.clamp(max=max(len(order) - 1, 0))]
        extended = torch.cat([frames, frames.square()], dim=1)
        for rows, width in self._groups(tile_pdf):
            for part in torch.split(rows, _TILES):
                yield self._tile(extended, index[part], inside[part], tile_pdf[part], width)

    def _tile(self, extended: Tensor, index: Tensor, inside: Tensor, pdfs: Tensor, width: int) -> Tiles:
        linear, constant = self._linear[pdfs, :width], self._constant[pdfs, :width].unsqueeze(1)
        scores = torch.baddbmm(constant, extended[index], linear.transpose(1, 2))
        total = torch.logsumexp(scores, dim=2)
        posteriors = (scores - total.unsqueeze(2)).exp_() * inside.unsqueeze(2)
        return Tiles(index, inside, pdfs, posteriors, total * inside)

    def transformed(self, matrix: Tensor) -> DiagGmm:
        """The mixtures with their means multiplied by a matrix `[D, D]` (variances are left as they are)."""
        return DiagGmm(self.weights, (self.means.double() @ matrix.double().T).float(), self.variances)

    def split(self, targets: Sequence[int], seed: int = 0) -> DiagGmm:
        """Grow mixtures to wanted numbers of components by splitting their heaviest ones.

        A component is replaced by two of half its weight, whose means differ by a random part of the standard
        deviation (Young et al. 2006, HTK Book, section 10.6).

        Args:
            targets: Wanted number of components of each pdf; a mixture that has as many or more stays.
            seed: Of the random directions.
        """
        width = max(max(targets), self.weights.shape[1])
        grown = [_padded(part, width) for part in (self.weights, self.means, self.variances)]
        weights, means, variances = (part.cpu() for part in grown)
        generator = torch.Generator().manual_seed(seed)
        counts = self.counts.cpu().clone()
        wanted = torch.as_tensor(list(targets))
        while len(rows := (counts < wanted).nonzero().squeeze(1)):
            heaviest, end = weights[rows].argmax(1), counts[rows]
            noise = torch.randn(len(rows), self.dim, generator=generator)
            move = _PERTURB * variances[rows, heaviest].sqrt() * noise
            weights[rows, heaviest] *= 0.5
            weights[rows, end] = weights[rows, heaviest]
            variances[rows, end] = variances[rows, heaviest]
            means[rows, end] = means[rows, heaviest] - move
            means[rows, heaviest] += move
            counts[rows] += 1
        return DiagGmm(weights, means, variances).to(self.weights.device)


def _log_sum_exp(scores: Tensor) -> Tensor:
    """What `torch.logsumexp` over the second dimension gives, several times sooner; the scores are changed."""
    largest = scores.amax(1).clamp_(min=torch.finfo(scores.dtype).min)
    scores.sub_(largest.unsqueeze(1)).clamp_(min=_NEGLIGIBLE).exp_()
    return scores.sum(1).log_().add_(largest)


def _padded(values: Tensor, width: int) -> Tensor:
    """Values `[P, K, ...]` with K raised to `width` by zeros, for variances by ones (as the mean of a padded one)."""
    fill = torch.zeros(len(values), width - values.shape[1], *values.shape[2:], device=values.device)
    return torch.cat([values, fill + 1 if values.dim() == 3 else fill], dim=1).clone()


def split_targets(occupancies: Sequence[float], total: int, power: float = 0.25, minimum: float = 20.0) -> list[int]:
    """How many components each mixture gets: proportional to a power of its occupancy.

    Components are assigned one at a time to the mixture with the largest occupancy^power / components (as in Kaldi's
    `GetSplitTargets`; powers of 0.2 to 0.25 give rare states more than their share).

    Args:
        occupancies: Frames of each pdf.
        total: Components of all mixtures.
        power: Of the occupancy.
        minimum: Frames that each component must have.

    Returns:
        Components of each pdf, at least one.
    """
    targets = [1] * len(occupancies)
    queue = [(-(max(value, 1e-3) ** power), i) for i, value in enumerate(occupancies)]
    heapq.heapify(queue)
    left = total - len(targets)
    while left > 0 and queue:
        _, i = heapq.heappop(queue)
        if occupancies[i] / (targets[i] + 1) < minimum:
            continue
        targets[i] += 1
        left -= 1
        heapq.heappush(queue, (-(occupancies[i] ** power) / targets[i], i))
    return targets


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
