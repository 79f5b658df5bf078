"""I-vectors on simulated speech whose answer is known, and against their definition computed frame by frame."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import load_beside

from speech.hmm.ivector import BaumWelch, IvectorExtractor, statistics
from speech.hmm.model import ModelError

ubm = load_beside(__file__, "test_ubm.py")
COMPONENTS, DIM, RANK = 6, 4, 2


def generator(seed):
    return torch.Generator().manual_seed(seed)


def extractor(seed=0, components=COMPONENTS, dim=DIM, rank=RANK, scale=0.6):
    model = ubm.mixture(components, dim, seed, spread=4.0)
    drawn = torch.randn(components, dim, rank, generator=generator(seed + 7), dtype=torch.float64)
    return IvectorExtractor(model, scale * drawn)


def speech(truth, frames, seed):
    """Frames of a speaker [T, D], and its w [R]."""
    w = torch.randn(truth.rank, generator=generator(seed), dtype=torch.float64)
    shifted = truth.model.gmm.means + (truth.matrix @ w).float()
    moved = type(truth.model)(type(truth.model.gmm)(truth.model.gmm.weights, shifted, truth.model.gmm.variances))
    return ubm.drawn(moved, frames, 3 * seed + 1), w


def speakers(truth, count, frames=150):
    return BaumWelch.stack([statistics(truth.model, speech(truth, frames, seed)[0]) for seed in range(count)])


def naive_posterior(one, frames):
    """Posterior mean and covariance of w, summed frame by frame in the original coordinates."""
    posteriors, _ = ubm.naive_posteriors(one.model, frames)
    means, variances = one.model.gmm.means[0].double().numpy(), one.model.gmm.variances[0].double().numpy()
    matrix = one.matrix.numpy()
    precision, linear = np.eye(one.rank), np.zeros(one.rank)
    for frame, weights in zip(frames.double().numpy(), posteriors, strict=True):
        for c, weight in enumerate(weights):
            scaled = matrix[c].T @ np.diag(1.0 / variances[c])
            precision += weight * scaled @ matrix[c]
            linear += weight * scaled @ (frame - means[c])
    covariance = np.linalg.inv(precision)
    return covariance @ linear, covariance


def test_posterior_is_the_closed_form_summed_frame_by_frame():
    one = extractor(components=3, dim=2)
    frames, _ = speech(one, 9, 4)
    found = one.posterior(statistics(one.model, frames))
    mean, covariance = naive_posterior(one, frames)
    np.testing.assert_allclose(found.means, mean, atol=1e-5)
    np.testing.assert_allclose(found.covariances, covariance, atol=1e-5)
    np.testing.assert_allclose(one.ivector(frames), mean, atol=1e-5)
    units = BaumWelch.stack([statistics(one.model, part) for part in (frames[:4], frames[4:], frames)])
    np.testing.assert_allclose(one.posterior(units).means[2], mean, atol=1e-5)
    np.testing.assert_allclose(one.posterior(units).means[0], naive_posterior(one, frames[:4])[0], atol=1e-5)


def test_likelihood_equals_that_of_the_integrated_model():
    one = extractor(components=3, dim=2, rank=1)
    stats = statistics(one.model, speech(one, 9, 4)[0])
    w = np.linspace(-12, 12, 20_001)
    moved = one.loadings[..., 0].flatten().numpy()
    linear, square = stats.sums.flatten().numpy() @ moved, stats.counts.repeat_interleave(2).numpy() @ moved**2
    integrand = np.exp(w * linear - 0.5 * w**2 * square - 0.5 * w**2) / np.sqrt(2 * np.pi)
    assert float(one.posterior(stats).log_likelihoods) == pytest.approx(np.log(np.trapezoid(integrand, w)), abs=1e-9)


def test_ivectors_recover_the_speakers_coordinates():
    truth = extractor()
    for seed in range(5):
        frames, w = speech(truth, 4000, seed)
        found = truth.posterior(statistics(truth.model, frames))
        deviation = (found.means - w) / found.covariances.diagonal().sqrt()
        assert deviation.abs().max() < 4.5


def test_little_speech_shrinks_to_the_prior():
    one = extractor()
    nothing = statistics(one.model, torch.zeros(0, DIM))
    assert torch.equal(one.posterior(nothing).means, torch.zeros(RANK, dtype=torch.float64))
    torch.testing.assert_close(one.posterior(nothing).covariances, torch.eye(RANK, dtype=torch.float64))
    assert float(one.posterior(nothing).log_likelihoods) == 0.0
    whole = statistics(one.model, speech(one, 4000, 2)[0])
    sizes = [
        float(one.posterior(BaumWelch(share * whole.counts, share * whole.sums)).means.norm())
        for share in (1.0, 1e-2, 1e-3, 1e-4, 1e-6)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 1e-2 * sizes[0]


def test_em_recovers_the_subspace_and_raises_the_likelihood_in_each_iteration():
    truth = extractor()
    stats, found = speakers(truth, 300), IvectorExtractor.random(truth.model, RANK, seed=3)
    likelihoods = []
    for _ in range(12):
        sums = found.accumulate(stats)
        likelihoods.append(sums.log_likelihood)
        found = found.updated(sums)
    assert all(later > earlier for earlier, later in pairwise(likelihoods[:5]))
    assert all(later > earlier - 1e-6 for earlier, later in pairwise(likelihoods))  # it has converged
    bases = [torch.linalg.qr(one.loadings.flatten(0, 1))[0] for one in (truth, found)]
    cosines = torch.linalg.svdvals(bases[0].T @ bases[1])
    assert torch.rad2deg(torch.arccos(cosines.clamp(max=1.0))).max() < 5.0
    # Not only the directions: the speakers' covariance is T Tᵀ.
    products = [one.loadings.flatten(0, 1) @ one.loadings.flatten(0, 1).T for one in (truth, found)]
    assert float((products[0] - products[1]).norm() / products[0].norm()) < 0.15


def test_after_training_the_ivectors_are_standard_normal():
    truth = extractor()
    stats, found = speakers(truth, 200), IvectorExtractor.random(truth.model, RANK, seed=3)
    for _ in range(10):
        found = found.updated(found.accumulate(stats))
    moments = found.accumulate(stats)
    identity = torch.eye(RANK, dtype=torch.float64)
    torch.testing.assert_close(moments.prior / moments.units, identity, rtol=0, atol=0.02)


def test_sums_do_not_depend_on_order_or_division():
    one = extractor()
    stats = speakers(one, 100, frames=20)
    order = torch.randperm(100, generator=generator(1))
    halves = [BaumWelch(stats.counts[part], stats.sums[part]) for part in (order[:30], order[30:])]
    whole, parts = one.accumulate(stats), one.accumulate(halves[1]) + one.accumulate(halves[0])
    assert parts.units == whole.units == 100
    for name in ("second", "first", "prior"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-9, atol=1e-9)
    assert parts.log_likelihood == pytest.approx(whole.log_likelihood)


def test_statistics_of_parts_add_up():
    one = extractor()
    frames, _ = speech(one, 5000, 1)
    whole, parts = (
        statistics(one.model, frames),
        statistics(one.model, frames[:77]) + statistics(one.model, frames[77:]),
    )
    torch.testing.assert_close(parts.counts, whole.counts, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(parts.sums, whole.sums, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("period", [1, 7])
def test_prefix_ivector_is_computed_from_the_frames_so_far(period):
    one = extractor()
    frames, _ = speech(one, 500, 1)
    found = one.prefix_ivectors(frames, period)
    assert found.shape == (500, RANK)
    for frame in (0, 1, 6, 7, 8, 300, 450, 499):
        expected = one.ivector(frames[: frame - frame % period + 1])
        torch.testing.assert_close(found[frame], expected, rtol=1e-5, atol=1e-5)
    if period == 1:
        torch.testing.assert_close(found[-1], one.ivector(frames), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.prefix_ivectors(frames[:123], period), found[:123])


def test_prefix_extraction_continues_from_earlier_speech():
    one = extractor()
    frames, _ = speech(one, 60, 1)
    before = statistics(one.model, frames[:20])
    found = one.prefix_ivectors(frames[20:], 1, before)
    torch.testing.assert_close(found, one.prefix_ivectors(frames, 1)[20:], rtol=1e-5, atol=1e-5)
    assert one.prefix_ivectors(frames[:0]).shape == (0, RANK)


def test_component_without_frames_keeps_its_loadings():
    one = extractor()
    stats = speakers(one, 20)
    stats.counts[:, 2], stats.sums[:, 2] = 0.0, 0.0
    sums = one.accumulate(stats)
    scale = torch.linalg.cholesky(sums.prior / sums.units)
    torch.testing.assert_close(one.updated(sums).loadings[2], one.loadings[2] @ scale)
    assert bool(one.updated(sums).loadings.isfinite().all())


def test_estimation_without_speech_is_refused():
    one = extractor()
    nothing = BaumWelch(torch.zeros(0, COMPONENTS).double(), torch.zeros(0, COMPONENTS, DIM).double())
    with pytest.raises(ValueError, match="no statistics to estimate the total variability"):
        one.updated(one.accumulate(nothing))


def test_saved_extractor_is_loaded_and_damage_is_named(tmp_path):
    one, path = extractor(), tmp_path / "ivector.safetensors"
    one.save(path)
    again = IvectorExtractor.load(path)
    frames, _ = speech(one, 50, 1)
    assert torch.equal(again.ivector(frames), one.ivector(frames))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ModelError, match=r"ivector\.safetensors holds no i-vector extractor"):
        IvectorExtractor.load(path)
    with pytest.raises(ModelError, match="holds no i-vector extractor"):
        IvectorExtractor.load(tmp_path / "absent")
    gmm = {name: getattr(one.model.gmm, name) for name in ("weights", "means", "variances")}
    save_file(gmm | {"loadings": torch.zeros(2, DIM, RANK)}, path)
    with pytest.raises(ModelError, match="does not fit the background model"):
        IvectorExtractor.load(path)


@pytest.mark.gpu
def test_gpu_gives_the_same_ivectors():
    one = extractor()
    frames, _ = speech(one, 500, 1)
    there = one.to("cuda")
    torch.testing.assert_close(there.ivector(frames.cuda()).cpu(), one.ivector(frames), rtol=1e-4, atol=1e-4)
    sums = there.updated(there.accumulate(BaumWelch.stack([statistics(there.model, frames.cuda())])))
    expected = one.updated(one.accumulate(BaumWelch.stack([statistics(one.model, frames)])))
    torch.testing.assert_close(sums.matrix.cpu(), expected.matrix, rtol=1e-3, atol=1e-3)
