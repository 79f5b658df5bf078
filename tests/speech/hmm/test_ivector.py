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


def naive_posterior(model, frames):
    """Posterior mean and covariance of w, summed frame by frame in the original coordinates."""
    posteriors, _ = ubm.naive_posteriors(model.model, frames)
    means, variances = model.model.gmm.means[0].double().numpy(), model.model.gmm.variances[0].double().numpy()
    matrix = model.matrix.numpy()
    precision, linear = np.eye(model.rank), np.zeros(model.rank)
    for frame, weights in zip(frames.double().numpy(), posteriors, strict=True):
        for c, weight in enumerate(weights):
            scaled = matrix[c].T @ np.diag(1.0 / variances[c])
            precision += weight * scaled @ matrix[c]
            linear += weight * scaled @ (frame - means[c])
    covariance = np.linalg.inv(precision)
    return covariance @ linear, covariance


def test_posterior_is_the_closed_form_summed_frame_by_frame():
    model = extractor(components=3, dim=2)
    frames, _ = speech(model, 9, 4)
    posterior = model.posterior(statistics(model.model, frames))
    mean, covariance = naive_posterior(model, frames)
    np.testing.assert_allclose(posterior.means, mean, atol=1e-5)
    np.testing.assert_allclose(posterior.covariances, covariance, atol=1e-5)
    np.testing.assert_allclose(model.ivector(frames), mean, atol=1e-5)
    units = BaumWelch.stack([statistics(model.model, part) for part in (frames[:4], frames[4:], frames)])
    np.testing.assert_allclose(model.posterior(units).means[2], mean, atol=1e-5)
    np.testing.assert_allclose(model.posterior(units).means[0], naive_posterior(model, frames[:4])[0], atol=1e-5)


def test_likelihood_equals_that_of_the_integrated_model():
    model = extractor(components=3, dim=2, rank=1)
    stats = statistics(model.model, speech(model, 9, 4)[0])
    w = np.linspace(-12, 12, 20_001)
    moved = model.loadings[..., 0].flatten().numpy()
    linear, square = stats.sums.flatten().numpy() @ moved, stats.counts.repeat_interleave(2).numpy() @ moved**2
    integrand = np.exp(w * linear - 0.5 * w**2 * square - 0.5 * w**2) / np.sqrt(2 * np.pi)
    assert float(model.posterior(stats).log_likelihoods) == pytest.approx(np.log(np.trapezoid(integrand, w)), abs=1e-9)


def test_ivectors_recover_the_speakers_coordinates():
    truth = extractor()
    for seed in range(5):
        frames, w = speech(truth, 4000, seed)
        posterior = truth.posterior(statistics(truth.model, frames))
        deviation = (posterior.means - w) / posterior.covariances.diagonal().sqrt()
        assert deviation.abs().max() < 4.5


def test_little_speech_shrinks_to_the_prior():
    model = extractor()
    nothing = statistics(model.model, torch.zeros(0, DIM))
    assert torch.equal(model.posterior(nothing).means, torch.zeros(RANK, dtype=torch.float64))
    torch.testing.assert_close(model.posterior(nothing).covariances, torch.eye(RANK, dtype=torch.float64))
    assert float(model.posterior(nothing).log_likelihoods) == 0.0
    whole = statistics(model.model, speech(model, 4000, 2)[0])
    sizes = [
        float(model.posterior(BaumWelch(share * whole.counts, share * whole.sums)).means.norm())
        for share in (1.0, 1e-2, 1e-3, 1e-4, 1e-6)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 1e-2 * sizes[0]


def test_em_recovers_the_subspace_and_raises_the_likelihood_in_each_iteration():
    truth = extractor()
    stats, trained = speakers(truth, 300), IvectorExtractor.random(truth.model, RANK, seed=3)
    likelihoods = []
    for _ in range(12):
        sums = trained.accumulate(stats)
        likelihoods.append(sums.log_likelihood)
        trained = trained.updated(sums)
    assert all(later > earlier for earlier, later in pairwise(likelihoods[:5]))
    assert all(later > earlier - 1e-6 for earlier, later in pairwise(likelihoods))  # it has converged
    bases = [torch.linalg.qr(model.loadings.flatten(0, 1))[0] for model in (truth, trained)]
    cosines = torch.linalg.svdvals(bases[0].T @ bases[1])
    assert torch.rad2deg(torch.arccos(cosines.clamp(max=1.0))).max() < 5.0
    # Not only the directions: the speakers' covariance is T Tᵀ.
    products = [model.loadings.flatten(0, 1) @ model.loadings.flatten(0, 1).T for model in (truth, trained)]
    assert float((products[0] - products[1]).norm() / products[0].norm()) < 0.15


def test_after_training_the_ivectors_are_standard_normal():
    truth = extractor()
    stats, trained = speakers(truth, 200), IvectorExtractor.random(truth.model, RANK, seed=3)
    for _ in range(10):
        trained = trained.updated(trained.accumulate(stats))
    moments = trained.accumulate(stats)
    identity = torch.eye(RANK, dtype=torch.float64)
    torch.testing.assert_close(moments.prior / moments.units, identity, rtol=0, atol=0.02)


def test_sums_do_not_depend_on_order_or_division():
    model = extractor()
    stats = speakers(model, 100, frames=20)
    order = torch.randperm(100, generator=generator(1))
    halves = [BaumWelch(stats.counts[part], stats.sums[part]) for part in (order[:30], order[30:])]
    whole, parts = model.accumulate(stats), model.accumulate(halves[1]) + model.accumulate(halves[0])
    assert parts.units == whole.units == 100
    for name in ("second", "first", "prior"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-9, atol=1e-9)
    assert parts.log_likelihood == pytest.approx(whole.log_likelihood)


def test_statistics_of_parts_add_up():
    model = extractor()
    frames, _ = speech(model, 5000, 1)
    whole, parts = (
        statistics(model.model, frames),
        statistics(model.model, frames[:77]) + statistics(model.model, frames[77:]),
    )
    torch.testing.assert_close(parts.counts, whole.counts, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(parts.sums, whole.sums, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("period", [1, 7])
def test_prefix_ivector_is_computed_from_the_frames_so_far(period):
    model = extractor()
    frames, _ = speech(model, 500, 1)
    ivectors = model.prefix_ivectors(frames, period)
    assert ivectors.shape == (500, RANK)
    for frame in (0, 1, 6, 7, 8, 300, 450, 499):
        expected = model.ivector(frames[: frame - frame % period + 1])
        torch.testing.assert_close(ivectors[frame], expected, rtol=1e-5, atol=1e-5)
    if period == 1:
        torch.testing.assert_close(ivectors[-1], model.ivector(frames), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.prefix_ivectors(frames[:123], period), ivectors[:123])


def test_prefix_extraction_continues_from_earlier_speech():
    model = extractor()
    frames, _ = speech(model, 60, 1)
    before = statistics(model.model, frames[:20])
    ivectors = model.prefix_ivectors(frames[20:], 1, before)
    torch.testing.assert_close(ivectors, model.prefix_ivectors(frames, 1)[20:], rtol=1e-5, atol=1e-5)
    assert model.prefix_ivectors(frames[:0]).shape == (0, RANK)


def test_component_without_frames_keeps_its_loadings():
    model = extractor()
    stats = speakers(model, 20)
    stats.counts[:, 2], stats.sums[:, 2] = 0.0, 0.0
    sums = model.accumulate(stats)
    scale = torch.linalg.cholesky(sums.prior / sums.units)
    torch.testing.assert_close(model.updated(sums).loadings[2], model.loadings[2] @ scale)
    assert bool(model.updated(sums).loadings.isfinite().all())


def test_estimation_without_speech_is_refused():
    model = extractor()
    nothing = BaumWelch(torch.zeros(0, COMPONENTS).double(), torch.zeros(0, COMPONENTS, DIM).double())
    with pytest.raises(ValueError, match="no statistics to estimate the total variability"):
        model.updated(model.accumulate(nothing))


def test_saved_extractor_is_loaded_and_damage_is_named(tmp_path):
    model, path = extractor(), tmp_path / "ivector.safetensors"
    model.save(path)
    again = IvectorExtractor.load(path)
    frames, _ = speech(model, 50, 1)
    assert torch.equal(again.ivector(frames), model.ivector(frames))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ModelError, match=r"ivector\.safetensors holds no i-vector extractor"):
        IvectorExtractor.load(path)
    with pytest.raises(ModelError, match="holds no i-vector extractor"):
        IvectorExtractor.load(tmp_path / "absent")
    gmm = {name: getattr(model.model.gmm, name) for name in ("weights", "means", "variances")}
    save_file(gmm | {"loadings": torch.zeros(2, DIM, RANK)}, path)
    with pytest.raises(ModelError, match="does not fit the background model"):
        IvectorExtractor.load(path)


@pytest.mark.gpu
def test_gpu_gives_the_same_ivectors():
    model = extractor()
    frames, _ = speech(model, 500, 1)
    there = model.to("cuda")
    torch.testing.assert_close(there.ivector(frames.cuda()).cpu(), model.ivector(frames), rtol=1e-4, atol=1e-4)
    sums = there.updated(there.accumulate(BaumWelch.stack([statistics(there.model, frames.cuda())])))
    expected = model.updated(model.accumulate(BaumWelch.stack([statistics(model.model, frames)])))
    torch.testing.assert_close(sums.matrix.cpu(), expected.matrix, rtol=1e-3, atol=1e-3)
