"""The background model: posteriors as defined, EM that raises the likelihood, growth by splitting."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from speech.hmm.gmm import DiagGmm, GmmStatistics
from speech.hmm.ivector import BackgroundModel, component_schedule


def generator(seed):
    return torch.Generator().manual_seed(seed)


def mixture(components=3, dim=2, seed=0, spread=1.0):
    weights = torch.rand(1, components, generator=generator(seed)) + 0.2
    means = spread * torch.randn(1, components, dim, generator=generator(seed + 1))
    variances = torch.rand(1, components, dim, generator=generator(seed + 2)) + 0.3
    return BackgroundModel(DiagGmm(weights / weights.sum(), means, variances))


def drawn(model, frames, seed=0):
    chosen = torch.multinomial(model.gmm.weights[0], frames, replacement=True, generator=generator(seed))
    noise = torch.randn(frames, model.dim, generator=generator(seed + 1))
    return model.gmm.means[0, chosen] + model.gmm.variances[0, chosen].sqrt() * noise


def naive_posteriors(model, frames):
    """Posteriors [T, C] and log densities [T] frame by frame, by the formula."""
    weights, means, variances = (tensor[0].double().numpy() for tensor in vars(model.gmm).values() if tensor.dim() > 1)
    scores = np.array(
        [
            [
                np.log(w)
                - 0.5 * sum((x - m) ** 2 / v + np.log(2 * np.pi * v) for x, m, v in zip(frame, mean, var, strict=True))
                for w, mean, var in zip(weights, means, variances, strict=True)
            ]
            for frame in frames.double().numpy()
        ]
    )
    densities = np.exp(scores)
    return densities / densities.sum(1, keepdims=True), np.log(densities.sum(1))


def test_posteriors_equal_the_definition():
    model = mixture()
    frames = drawn(model, 7)
    [(part, posteriors, scores)] = list(model.posteriors(frames))
    expected = naive_posteriors(model, frames)
    assert torch.equal(part, frames)
    np.testing.assert_allclose(posteriors, expected[0], atol=1e-6)
    np.testing.assert_allclose(scores, expected[1], atol=1e-5)


def test_sums_do_not_depend_on_order_or_division():
    model = mixture(5, 3)
    frames = drawn(model, 9000)
    whole = model.accumulate(frames)
    shuffled = frames[torch.randperm(9000, generator=generator(3))]
    parts = model.accumulate(shuffled[100:]) + model.accumulate(shuffled[:100])
    torch.testing.assert_close(parts.sums, whole.sums, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(parts.occupancies, whole.occupancies, rtol=1e-6, atol=1e-4)
    assert parts.num_frames == whole.num_frames == 9000
    assert parts.log_likelihood == pytest.approx(whole.log_likelihood, rel=1e-6)


def test_em_raises_the_likelihood_and_finds_the_mixture():
    centres = torch.tensor([[[0.0, 1.0], [5.0, 3.0]]])
    truth = BackgroundModel(DiagGmm(torch.tensor([[0.6, 0.4]]), centres, torch.tensor([[[0.7, 0.4], [1.3, 0.9]]])))
    frames, model, likelihoods = drawn(truth, 5000), BackgroundModel.standard(2), []
    for size in component_schedule(2, 20):
        stats = model.accumulate(frames)
        likelihoods.append((model.num_components, stats.average))
        model = model.updated(stats, size)
    final = [likelihood for _, likelihood in likelihoods[-19:]]
    assert all(later > earlier - 1e-6 for earlier, later in pairwise(final))
    assert model.accumulate(frames).average == pytest.approx(truth.accumulate(frames).average, abs=0.01)
    nearest = torch.cdist(truth.gmm.means[0], model.gmm.means[0]).min(1).values
    assert nearest.max() < 0.2


def test_first_iteration_gives_mean_and_variance_of_all_frames():
    frames = 3.0 * torch.randn(500, 4, generator=generator(1)) + 2.0
    start = BackgroundModel.standard(4)
    model = start.updated(start.accumulate(frames), 1)
    torch.testing.assert_close(model.gmm.means[0, 0], frames.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.gmm.variances[0, 0], frames.var(0, unbiased=False), rtol=1e-4, atol=1e-4)


def test_background_model_may_have_more_components_than_other_mixtures():
    model = mixture(600, 2)
    assert model.accumulate(drawn(model, 50)).occupancies.sum() == pytest.approx(50.0, abs=1e-3)


def test_components_are_doubled_up_to_the_wanted_number():
    assert component_schedule(6, 2) == [1, 2, 2, 4, 4, 6, 6, 6]
    assert component_schedule(1, 1) == [1, 1]


def test_training_without_frames_is_refused():
    model = mixture()
    with pytest.raises(ValueError, match="no frames to estimate a background model"):
        model.updated(GmmStatistics.zeros(model.gmm), 2)
