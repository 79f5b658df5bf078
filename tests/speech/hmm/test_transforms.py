"""LDA, MLLT and fMLLR on data whose answer is known."""

import pytest
import torch

from speech.hmm.gmm import DiagGmm
from speech.hmm.transforms import (
    FmllrStatistics,
    LdaStatistics,
    MlltStatistics,
    estimate_fmllr,
    estimate_lda,
    estimate_mllt,
    identity,
    weighted_products,
)

CLASSES, DIM, FRAMES = 12, 5, 40_000


def generator(seed):
    return torch.Generator().manual_seed(seed)


def drawn(gmm, seed=0):
    pdfs = torch.randint(gmm.num_pdfs, (FRAMES,), generator=generator(seed))
    noise = torch.randn(FRAMES, gmm.dim, generator=generator(seed + 1))
    return gmm.means[pdfs, 0] + gmm.variances[pdfs, 0].sqrt() * noise, pdfs


def gaussians(seed=2, spread=3.0):
    means = spread * torch.randn(CLASSES, DIM, generator=generator(seed))
    return DiagGmm.of_moments(means, 2 * torch.rand(CLASSES, DIM, generator=generator(seed + 1)) + 0.2)


def test_weighted_products_equal_the_definition():
    weights, frames = torch.rand(50, 3, generator=generator(0)), torch.randn(50, 4, generator=generator(1))
    expected = torch.einsum("ni,nj,nk->ijk", weights.double(), frames.double(), frames.double())
    torch.testing.assert_close(weighted_products(weights, frames), expected, rtol=1e-5, atol=1e-5)


def test_lda_finds_the_plane_that_separates_classes():
    centres = torch.zeros(CLASSES, 6)
    centres[:, :2] = 4 * torch.randn(CLASSES, 2, generator=generator(0))
    classes = torch.randint(CLASSES, (FRAMES,), generator=generator(1))
    frames = centres[classes] + torch.randn(FRAMES, 6, generator=generator(2))
    mixing = torch.randn(6, 6, generator=generator(3))
    parts = [slice(0, 1000), slice(1000, FRAMES)]
    mixed = frames @ mixing.T
    stats = [LdaStatistics.zeros(CLASSES, 6).add(mixed[part], classes[part]) for part in parts]
    projection = estimate_lda(stats[1] + stats[0], 2).double() @ mixing.double()
    assert projection[:, 2:].abs().max() < 0.03  # only the two that differ between classes
    within = (projection[:, :2] @ projection[:, :2].T).diagonal()
    torch.testing.assert_close(within, torch.ones(2, dtype=torch.float64), rtol=0.05, atol=0.05)


def test_mllt_undoes_a_mixing_of_independent_features():
    truth = gaussians()
    frames, pdfs = drawn(truth)
    mixing = torch.randn(DIM, DIM, generator=generator(9))
    mixed, total = (frames @ mixing.T).double(), torch.eye(DIM, dtype=torch.float64)
    for _ in range(20):
        groups = [mixed[pdfs == pdf] for pdf in range(CLASSES)]
        gmm = DiagGmm.of_moments(torch.stack([x.mean(0) for x in groups]), torch.stack([x.var(0) for x in groups]))
        matrix = estimate_mllt(MlltStatistics.zeros(DIM).add(gmm, mixed.float(), pdfs))
        mixed, total = mixed @ matrix.T, matrix @ total
    together = total @ mixing.double()
    scaled = together.abs() / together.abs().max(1, keepdim=True).values
    assert (scaled > 0.5).sum() == DIM  # a permutation and scales are all that is left
    assert scaled.sort(dim=1).values[:, :-1].max() < 0.05


def test_mllt_raises_the_likelihood_with_several_components():
    gmm = gaussians().split([2] * CLASSES, seed=1)
    frames, pdfs = drawn(gaussians())
    mixed = frames @ (torch.eye(DIM) + 0.2 * torch.randn(DIM, DIM, generator=generator(4))).T
    stats = MlltStatistics.zeros(DIM).add(gmm, mixed, pdfs)
    matrix = estimate_mllt(stats)

    def auxiliary(a):
        return stats.num_frames * torch.linalg.slogdet(a)[1] - 0.5 * torch.einsum("ij,ijk,ik->", a, stats.products, a)

    assert auxiliary(matrix) > auxiliary(torch.eye(DIM, dtype=torch.float64))
    # the definition: Σ γ / σ² (x - μ)(x - μ)ᵀ
    expected = torch.zeros(DIM, DIM, DIM, dtype=torch.float64)
    for tile in gmm.tiles(mixed, pdfs):
        for k in range(tile.posteriors.shape[2]):
            away = (mixed[tile.frames] - gmm.means[tile.pdfs, k].unsqueeze(1)).double()
            weight = tile.posteriors[:, :, k : k + 1].double() / gmm.variances[tile.pdfs, k].unsqueeze(1)
            expected += torch.einsum("mri,mrj,mrk->ijk", weight, away, away)
    torch.testing.assert_close(stats.products, expected, rtol=1e-3, atol=1.0)


def gain(stats, transform):
    """How much a transform raises the auxiliary function over the identity, per frame."""

    def auxiliary(matrix):
        quadratic = torch.einsum("ij,ijk,ik->", matrix, stats.products, matrix)
        determinant = torch.linalg.slogdet(matrix[:, :-1])[1]
        return stats.count * determinant + (matrix * stats.linear).sum() - 0.5 * quadratic

    return float(auxiliary(transform) - auxiliary(identity(len(stats.linear)))) / stats.count


def test_fmllr_recovers_a_speakers_transform():
    gmm = gaussians()
    frames, pdfs = drawn(gmm)
    matrix = torch.eye(DIM) + 0.15 * torch.randn(DIM, DIM, generator=generator(5))
    offset = torch.randn(DIM, generator=generator(6))
    heard = torch.linalg.solve(matrix, (frames - offset).T).T
    stats = FmllrStatistics.zeros(DIM).add(gmm, heard[:9000], pdfs[:9000])
    stats = FmllrStatistics.zeros(DIM).add(gmm, heard[9000:], pdfs[9000:]) + stats
    transform = estimate_fmllr(stats)
    truth = torch.cat([matrix, offset.unsqueeze(1)], dim=1).double()
    torch.testing.assert_close(transform, truth, atol=0.03, rtol=0.03)
    assert gain(stats, transform) > 0.1
    assert gain(stats, transform) >= gain(stats, truth)  # it maximizes the likelihood of the sample


def test_expected_statistics_equal_those_of_sampled_frames():
    weights = torch.tensor([[0.3, 0.7], [1.0, 0.0]])
    means = 2 * torch.randn(2, 2, 3, generator=generator(1))
    variances = torch.rand(2, 2, 3, generator=generator(2)) + 0.5
    gmm = DiagGmm(weights, means, variances)
    pdfs = torch.randint(2, (200_000,), generator=generator(3))
    chosen = torch.multinomial(weights[pdfs], 1, generator=generator(4)).squeeze(1)
    noise = torch.randn(len(pdfs), 3, generator=generator(5))
    frames = means[pdfs, chosen] + variances[pdfs, chosen].sqrt() * noise
    sample, expected = FmllrStatistics.zeros(3).add(gmm, frames, pdfs), FmllrStatistics.expected(gmm, 200_000)
    assert expected.count == sample.count
    # components overlap: a sample's posteriors are softer than the components that drew it, which costs some percent
    torch.testing.assert_close(sample.products / 2e5, expected.products / 2e5, rtol=0.05, atol=0.3)
    torch.testing.assert_close(sample.linear / 2e5, expected.linear / 2e5, rtol=0.05, atol=0.3)
    torch.testing.assert_close(estimate_fmllr(expected), identity(3), atol=1e-9, rtol=0)


def test_prior_keeps_transforms_of_few_frames_near_the_identity():
    gmm = gaussians()
    frames, pdfs = drawn(gmm)
    heard = 0.8 * frames + 0.4
    prior, unchanged = FmllrStatistics.expected(gmm, 500), identity(DIM)

    def change(count, known):
        stats = FmllrStatistics.zeros(DIM).add(gmm, heard[:count], pdfs[:count])
        return float((estimate_fmllr(stats + known if known is not None else stats, minimum=10) - unchanged).norm())

    assert change(100, prior) < 0.5 * change(100, None)
    assert change(100, prior) < change(1000, prior) < change(FRAMES, prior)
    assert change(FRAMES, prior) == pytest.approx(change(FRAMES, None), rel=0.15)


def test_fmllr_of_few_frames_is_identity_and_silence_is_weighted():
    gmm = gaussians()
    frames, pdfs = drawn(gmm)
    few = FmllrStatistics.zeros(DIM).add(gmm, frames[:100], pdfs[:100])
    torch.testing.assert_close(estimate_fmllr(few, minimum=500), identity(DIM))
    weights = torch.zeros(FRAMES)
    weights[:100] = 1.0
    weighted = FmllrStatistics.zeros(DIM).add(gmm, frames, pdfs, weights)
    assert weighted.count == pytest.approx(100)
    torch.testing.assert_close(weighted.products, few.products, rtol=1e-4, atol=1e-2)
