"""Mixtures: densities, EM, splitting."""

import itertools
import math

import numpy as np
import pytest
import torch
from hmm_toys import random_model

from speech.hmm import gmm as gmms
from speech.hmm.gmm import DiagGmm, accumulate, merge, split_targets, update
from speech.hmm.transforms import FmllrStatistics, MlltStatistics


def mixture(seed=0, pdfs=5, size=3, dim=4):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.softmax(torch.randn(pdfs, size, generator=generator), 1)
    weights[0, 1:] = 0.0
    weights[0, 0] = 1.0
    means = torch.randn(pdfs, size, dim, generator=generator)
    return DiagGmm(weights, means, torch.rand(pdfs, size, dim, generator=generator) + 0.3)


def sample(seed=1, count=400, dim=4, pdfs=5):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(count, dim, generator=generator), torch.randint(pdfs, (count,), generator=generator)


def density(gmm, pdf, frame):
    """log Σ w N(x), term by term."""
    total = 0.0
    for weight, mean, variance in zip(gmm.weights[pdf], gmm.means[pdf], gmm.variances[pdf], strict=True):
        squares = ((frame - mean).double().square() / variance + torch.log(2 * math.pi * variance.double())).sum()
        total += float(weight) * math.exp(-0.5 * float(squares))
    return math.log(total)


def test_densities_equal_the_definition():
    gmm, (frames, _) = mixture(), sample(count=20)
    chosen = torch.tensor([3, 0, 4])
    densities = gmm.log_likelihoods(frames, chosen)
    expected = [[density(gmm, pdf, frame) for pdf in chosen.tolist()] for frame in frames]
    torch.testing.assert_close(densities.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gmm.log_likelihoods(frames)[:, chosen], densities)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_sums_of_exponentials_are_those_of_torch_to_the_bit(scale):
    scores = scale * torch.randn(7, 5, 40, generator=torch.Generator().manual_seed(3))
    scores[2, 1:] = -torch.inf  # padding
    assert torch.equal(gmms._log_sum_exp(scores.clone()), torch.logsumexp(scores, dim=1))


def test_densities_in_parts_equal_those_at_once(monkeypatch):
    gmm, (frames, _) = mixture(pdfs=30), sample(count=20)
    at_once = gmm.log_likelihoods(frames)
    monkeypatch.setattr(gmms, "_CACHED", 2 * 3 * 20)
    torch.testing.assert_close(gmm.log_likelihoods(frames), at_once)
    assert gmm.log_likelihoods(frames[:0]).shape == (0, 30)


def test_frame_that_no_mixture_explains_has_a_density_that_is_a_number():
    assert not mixture().log_likelihoods(torch.full((1, 4), 1e20)).isnan().any()


def test_statistics_equal_sums_over_single_frames():
    gmm, (frames, pdfs) = mixture(), sample(count=100)
    stats = accumulate(gmm, frames, pdfs)
    expected = np.zeros((5, 3, 8))
    for frame, pdf in zip(frames, pdfs.tolist(), strict=True):
        parts = [
            float(gmm.weights[pdf, k]) * math.exp(density(DiagGmm(torch.ones(1, 1), gmm.means[pdf, k][None, None],
            gmm.variances[pdf, k][None, None]), 0, frame)) for k in range(3)
        ]  # fmt: skip
        posterior = np.array(parts) / sum(parts)
        expected[pdf] += posterior[:, None] * torch.cat([frame, frame.square()]).numpy()
    np.testing.assert_allclose(stats.sums.numpy(), expected, rtol=1e-4, atol=1e-3)
    assert float(stats.occupancies.sum()) == pytest.approx(100, abs=1e-3)
    assert stats.average == pytest.approx(
        np.mean([density(gmm, p, x) for x, p in zip(frames, pdfs.tolist(), strict=True)]), 1e-4
    )


def test_merged_statistics_do_not_depend_on_order_or_division():
    gmm, (frames, pdfs) = mixture(), sample(count=1000)
    whole = accumulate(gmm, frames, pdfs)
    cuts = [slice(0, 13), slice(13, 500), slice(500, 1000)]
    parts = [accumulate(gmm, frames[cut], pdfs[cut]) for cut in cuts]
    for order in (parts, parts[::-1], [parts[1], parts[2], parts[0]]):
        total = merge(order)
        torch.testing.assert_close(total.sums, whole.sums, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(total.occupancies, whole.occupancies, rtol=1e-6, atol=1e-4)
        assert total.log_likelihood == pytest.approx(whole.log_likelihood, rel=1e-6)
        assert total.num_frames == 1000
    first, second = merge(parts), merge(parts[::-1])
    torch.testing.assert_close(first.sums, second.sums, rtol=1e-12, atol=1e-9)


def test_em_raises_the_likelihood_and_finds_the_mixture():
    rng = np.random.default_rng(0)
    truth = random_model(rng, size=3).gmm
    pdfs = torch.full((4000,), 2)
    which = torch.multinomial(truth.weights[2], 4000, replacement=True, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(4000, truth.dim, generator=torch.Generator().manual_seed(1))
    frames = truth.means[2][which] + truth.variances[2][which].sqrt() * noise
    start = DiagGmm.of_moments(torch.zeros(3, truth.dim), torch.ones(3, truth.dim))
    gmm, averages = start, []
    for _ in range(12):
        if gmm.counts[2] < 3:
            gmm = gmm.split([1, 1, int(gmm.counts[2]) + 1])
        for _ in range(6):
            stats = accumulate(gmm, frames, pdfs)
            averages.append(stats.average)
            gmm = update(gmm, stats, torch.full((truth.dim,), 1e-3))
    assert all(b > a - 1e-3 for a, b in itertools.pairwise(averages[2:]))
    assert averages[-1] == pytest.approx(float(truth.log_likelihoods(frames)[:, 2].mean()), abs=0.02)
    assert gmm.counts.tolist() == [1, 1, 3]
    torch.testing.assert_close(gmm.means[0, :1], start.means[0])  # no frames: as it was


def test_rare_components_are_removed_and_variances_floored():
    gmm = DiagGmm(torch.tensor([[0.5, 0.5]]), torch.tensor([[[0.0], [100.0]]]), torch.ones(1, 2, 1))
    frames = torch.cat([torch.zeros(50, 1), torch.full((3, 1), 100.0)])
    stats = accumulate(gmm, frames, torch.zeros(53, dtype=torch.long))
    updated = update(gmm, stats, torch.tensor([0.25]), minimum=10)
    assert updated.weights.tolist() == [[1.0]]
    assert updated.means.flatten().tolist() == [0.0]
    assert updated.variances.flatten().tolist() == [0.25]


def test_components_are_distributed_by_a_power_of_occupancy():
    assert split_targets([1000.0, 1000.0, 0.0], 11, power=0.25) == [5, 5, 1]
    many, few = split_targets([160_000.0, 10_000.0], 30, power=0.25)
    assert (many, few) == (20, 10)
    assert split_targets([50.0], 10, minimum=20) == [2]


def test_split_nearly_keeps_the_density_and_is_deterministic():
    gmm, (frames, _) = mixture(), sample()
    grown = gmm.split([4, 5, 3, 1, 6], seed=3)
    assert grown.counts.tolist() == [4, 5, 3, 3, 6]
    assert (grown.log_likelihoods(frames) - gmm.log_likelihoods(frames)).abs().mean() < 0.1
    torch.testing.assert_close(grown.means, gmm.split([4, 5, 3, 1, 6], seed=3).means)
    torch.testing.assert_close(grown.weights.sum(1), torch.ones(5))


@pytest.mark.gpu
def test_gpu_gives_the_same_sums():
    gmm, (frames, pdfs) = mixture(), sample(count=500)
    there = gmm.to("cuda")
    densities = there.log_likelihoods(frames.cuda()).cpu()
    torch.testing.assert_close(densities, gmm.log_likelihoods(frames), rtol=1e-5, atol=1e-4)
    ours, theirs = accumulate(gmm, frames, pdfs), accumulate(there, frames.cuda(), pdfs.cuda())
    torch.testing.assert_close(theirs.sums.cpu(), ours.sums, rtol=1e-4, atol=1e-3)
    floor = torch.full((4,), 0.01)
    means = update(there, theirs, floor).means.cpu()
    torch.testing.assert_close(means, update(gmm, ours, floor).means, rtol=1e-4, atol=1e-4)
    mllt = [
        MlltStatistics.zeros(4).add(gmm, frames, pdfs),
        MlltStatistics.zeros(4).add(there, frames.cuda(), pdfs.cuda()),
    ]
    torch.testing.assert_close(mllt[1].products, mllt[0].products, rtol=1e-3, atol=1e-2)
    fmllr = (
        FmllrStatistics.zeros(4).add(gmm, frames, pdfs),
        FmllrStatistics.zeros(4).add(there, frames.cuda(), pdfs.cuda()),
    )
    torch.testing.assert_close(fmllr[1].products, fmllr[0].products, rtol=1e-3, atol=1e-2)
