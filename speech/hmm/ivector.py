"""I-vectors: the coordinates of a speaker in a low-dimensional space of mixtures (Dehak et al. 2011, IEEE TASLP 19(4)).

The universal background model (UBM) is one Gaussian mixture with diagonal covariances for the speech of all speakers,
log p(x) = log Σ_c w_c N(x; m_c, σ²_c): a `DiagGmm` with one pdf, grown from a single Gaussian by EM and splitting
(Reynolds et al. 2000, "Speaker verification using adapted Gaussian mixture models").

The mean of component c for speaker s is m_c + T_c w_s with a standard normal w_s: an i-vector is the posterior mean of
w_s. From the statistics N_c = Σ_t γ_tc and F_c = Σ_t γ_tc (x_t - m_c) of some speech,

    L = I + Σ_c N_c T_cᵀ Σ_c⁻¹ T_c        w = L⁻¹ Σ_c T_cᵀ Σ_c⁻¹ F_c

T is estimated by EM with a minimum divergence step (Kenny 2008, "A study of inter-speaker variability in speaker
verification"). All is done in whitened coordinates, Σ_c^(-1/2) F_c and Σ_c^(-1/2) T_c, in float64; the same code runs
on a CPU and on a GPU.

    model = BackgroundModel(gmm)
    extractor = IvectorExtractor.random(model, rank=100)
    speakers = [statistics(model, frames) for frames in speech_of_each_speaker]
    for _ in range(10):
        extractor = extractor.updated(extractor.accumulate(BaumWelch.stack(speakers)))
    extractor.posterior(statistics(model, frames)).means
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from speech.files import DAMAGED, check_finite
from speech.hmm.gmm import DiagGmm, GmmStatistics, update
from speech.hmm.model import ModelError, write_tensors

_CHUNK = 4096  # frames at a time: 32 MB of posteriors of 2048 components
# HTK's floor of variances, and Kaldi's minimum occupancy: the defaults of the mixtures of HMMs, too
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


_UNITS = 64  # posteriors at a time: 5 MB of covariances for i-vectors of 100 dimensions
_START = 0.1  # standard deviation of the random whitened T that EM starts from


@dataclass(frozen=True)
class BaumWelch:
    """Baum-Welch statistics of some speech, or of several units of speech (speakers, utterances).

    Attributes:
        counts: float64 `[..., C]`, N_c.
        sums: float64 `[..., C, D]`, F_c, centred at the component's mean and divided by its standard deviation.
    """

    counts: Tensor
    sums: Tensor

    def __add__(self, other: BaumWelch) -> BaumWelch:
        return BaumWelch(self.counts + other.counts, self.sums + other.sums)

    @classmethod
    def stack(cls, parts: Sequence[BaumWelch]) -> BaumWelch:
        """Statistics of units `[U, ...]`, from those of each."""
        return cls(torch.stack([stats.counts for stats in parts]), torch.stack([stats.sums for stats in parts]))


def statistics(model: BackgroundModel, frames: Tensor) -> BaumWelch:
    """Statistics of speech.

    Args:
        model: The background model.
        frames: `[T, D]`; with no frames, the sums are zero.
    """
    counts, sums = _zeros(model)
    for part, posteriors, _ in model.posteriors(frames):
        weights = posteriors.double()
        counts += weights.sum(0)
        sums += weights.T @ part.double()
    return _whitened(model, counts, sums)


def _zeros(model: BackgroundModel) -> tuple[Tensor, Tensor]:
    means = model.gmm.means[0].double()
    return torch.zeros_like(means[:, 0]), torch.zeros_like(means)


def _whitened(model: BackgroundModel, counts: Tensor, sums: Tensor) -> BaumWelch:
    """Statistics from counts `[..., C]` and sums of frames `[..., C, D]`."""
    means, variances = model.gmm.means[0].double(), model.gmm.variances[0].double()
    return BaumWelch(counts, (sums - counts.unsqueeze(-1) * means) / variances.sqrt())


@dataclass(frozen=True)
class Posterior:
    """What some speech says about w.

    Attributes:
        means: float64 `[..., R]`, the i-vectors.
        covariances: float64 `[..., R, R]`.
        log_likelihoods: float64 `[...]`, of the statistics, relative to that of the background model.
    """

    means: Tensor
    covariances: Tensor
    log_likelihoods: Tensor


@dataclass
class VariabilityStatistics:
    """Sums over units for the M step of T.

    Attributes:
        second: float64 `[C, R, R]`, Σ N_c E[w wᵀ].
        first: float64 `[C, D, R]`, Σ F_c E[w]ᵀ.
        prior: float64 `[R, R]`, Σ E[w wᵀ].
        units: Number of units.
        log_likelihood: Of all units, relative to that of the background model.
    """

    second: Tensor
    first: Tensor
    prior: Tensor
    units: int = 0
    log_likelihood: float = 0.0

    def __add__(self, other: VariabilityStatistics) -> VariabilityStatistics:
        return VariabilityStatistics(
            self.second + other.second,
            self.first + other.first,
            self.prior + other.prior,
            self.units + other.units,
            self.log_likelihood + other.log_likelihood,
        )


@dataclass(frozen=True)
class IvectorExtractor:
    """A background model with its total variability matrix.

    Attributes:
        model: C components in D dimensions.
        loadings: float64 `[C, D, R]`, T_c divided by the component's standard deviation.
    """

    model: BackgroundModel
    loadings: Tensor

    @classmethod
    def random(cls, model: BackgroundModel, rank: int, seed: int = 0) -> IvectorExtractor:
        """An extractor of i-vectors of `rank` dimensions with a random T: where EM starts."""
        shape = model.num_components, model.dim, rank
        drawn = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return cls(model, (_START * drawn).to(model.gmm.means.device))

    @property
    def rank(self) -> int:
        """Dimensions of an i-vector, R."""
        return self.loadings.shape[2]

    @property
    def matrix(self) -> Tensor:
        """The total variability matrix T: float64 `[C, D, R]`."""
        return self.loadings * self.model.gmm.variances[0].double().sqrt().unsqueeze(2)

    def to(self, device: torch.device | str) -> IvectorExtractor:
        """The same extractor on a device."""
        return IvectorExtractor(self.model.to(device), self.loadings.to(device))

    @cached_property
    def _products(self) -> Tensor:
        """T_cᵀ Σ_c⁻¹ T_c: float64 `[C, R²]`."""
        return (self.loadings.transpose(1, 2) @ self.loadings).flatten(1)

    def posterior(self, stats: BaumWelch) -> Posterior:
        """The posterior of w.

        Args:
            stats: Of one unit, or of units `[U, ...]`; without frames, the posterior is the prior.
        """
        shape, rank = stats.counts.shape[:-1], self.rank
        linear = stats.sums.flatten(-2) @ self.loadings.flatten(0, 1)
        identity = torch.eye(rank, dtype=torch.float64, device=linear.device)
        precisions = (stats.counts @ self._products).reshape(*shape, rank, rank) + identity
        factors = torch.linalg.cholesky(precisions)
        means = torch.cholesky_solve(linear.unsqueeze(-1), factors).squeeze(-1)
        half_determinant = factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return Posterior(means, torch.cholesky_inverse(factors), 0.5 * (linear * means).sum(-1) - half_determinant)

    def ivector(self, frames: Tensor) -> Tensor:
        """The i-vector of some speech, of an utterance or of all that a speaker says: float32 `[R]`.

        Args:
            frames: `[T, D]`.
        """
        return self.posterior(statistics(self.model, frames)).means.float()

    def prefix_ivectors(self, frames: Tensor, period: int = 10, before: BaumWelch | None = None) -> Tensor:
        """I-vectors for streaming: that of frame t knows no later frame.

        Args:
            frames: `[T, D]`.
            period: The i-vector is estimated again at every n-th frame, starting with the first; by default at every
                tenth, as in Kaldi (`--ivector-period`).
            before: Statistics of what the speaker said before.

        Returns:
            float32 `[T, R]`; row t is the i-vector of frames 0 to t - t mod `period`.
        """
        if not len(frames):
            return frames.new_zeros(0, self.rank)
        posteriors = torch.cat([of_tile for _, of_tile, _ in self.model.posteriors(frames)])
        counts, sums = _zeros(self.model)
        means = []
        estimated = torch.arange(0, len(frames), period)
        for some in torch.split(estimated, _UNITS):
            rows: list[tuple[Tensor, Tensor]] = []
            for last in some.tolist():
                new = slice(max(last - period + 1, 0), last + 1)
                own = posteriors[new].double()
                counts, sums = counts + own.sum(0), sums + own.T @ frames[new].double()
                rows.append((counts, sums))
            stats = _whitened(self.model, *map(torch.stack, zip(*rows, strict=True)))
            means.append(self.posterior(stats if before is None else stats + before).means)
        return torch.cat(means).repeat_interleave(period, dim=0)[: len(frames)].float()

    def accumulate(self, stats: BaumWelch) -> VariabilityStatistics:
        """The E step for T.

        Args:
            stats: Of units `[U, ...]`.
        """
        components, dim, rank = self.loadings.shape
        zeros = self.loadings.new_zeros
        total = VariabilityStatistics(zeros(components, rank, rank), zeros(components, dim, rank), zeros(rank, rank))
        for counts, sums in zip(torch.split(stats.counts, _UNITS), torch.split(stats.sums, _UNITS), strict=True):
            posterior = self.posterior(BaumWelch(counts, sums))
            means = posterior.means
            moments = posterior.covariances + means.unsqueeze(2) * means.unsqueeze(1)
            total.second += (counts.T @ moments.flatten(1)).view_as(total.second)
            total.first += (sums.flatten(1).T @ means).view_as(total.first)
            total.prior += moments.sum(0)
            total.units += len(counts)
            total.log_likelihood += float(posterior.log_likelihoods.sum())
        return total

    def updated(self, stats: VariabilityStatistics) -> IvectorExtractor:
        """The M step: T_c = (Σ F_c E[w]ᵀ)(Σ N_c E[w wᵀ])⁻¹, then the coordinates in which w is standard normal.

        The second part is the minimum divergence step: with the mean P of E[w wᵀ] over units, T P^(1/2) and a standard
        normal prior explain the same speech as T and a prior with covariance P.

        Args:
            stats: Sums over all units; a component without frames keeps its T.

        Raises:
            ValueError: There are no units.
        """
        if not stats.units:
            raise ValueError("there are no statistics to estimate the total variability from: give it speech")
        unseen = stats.second.diagonal(dim1=1, dim2=2).sum(1) <= 0
        identity = torch.eye(self.rank, dtype=torch.float64, device=self.loadings.device)
        second = torch.where(unseen[:, None, None], identity, stats.second)
        loadings = torch.linalg.solve(second, stats.first.transpose(1, 2)).transpose(1, 2)
        loadings = torch.where(unseen[:, None, None], self.loadings, loadings)
        return IvectorExtractor(self.model, loadings @ torch.linalg.cholesky(stats.prior / stats.units))

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        gmm = self.model.gmm
        tensors = {"weights": gmm.weights, "means": gmm.means, "variances": gmm.variances, "loadings": self.loadings}
        write_tensors(path, {name: value.cpu() for name, value in tensors.items()})

    @classmethod
    def load(cls, path: Path) -> IvectorExtractor:
        """The inverse of `save`.

        Raises:
            ModelError: The file is missing, damaged or not an extractor.
        """
        try:
            tensors = load_file(path)
            check_finite(tensors)
            gmm = DiagGmm(tensors["weights"], tensors["means"], tensors["variances"])
            gmm.check()
            loadings = tensors["loadings"].double()
            if gmm.num_pdfs != 1 or loadings.shape[:2] != gmm.means.shape[1:] or loadings.dim() != 3:
                raise ValueError("T does not fit the background model")
        except DAMAGED as error:
            raise ModelError(f"{path} holds no i-vector extractor ({error!r}): estimate it again") from error
        return cls(BackgroundModel(gmm), loadings)
