"""The stability limit of asynchronous averaging: the benchmark's arithmetic, and a short run with the real exchange."""

import json

import pytest

from benchmarks import exchange_stability


def test_growth_factor_is_that_of_the_second_half():
    assert exchange_stability.factor([100.0, 50.0, 1.0, 2.0, 4.0]) == pytest.approx(2.0)
    assert exchange_stability.factor([1.0, 0.0, 0.0, 0.0]) == 1.0


def spectral_radius(eigenvalue, momentum, rate, steps=400):
    """What a step multiplies weights by in the long run."""
    weights, velocity, size = 1.0, 0.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + rate * weights
        weights = eigenvalue * weights - velocity
        size = max(abs(weights), abs(velocity))
        weights, velocity = weights / size, velocity / size
    return size


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("eigenvalue", [-1 / 3, 0.0, 0.5, 1.0])
def test_weights_are_stable_up_to_the_theoretical_learning_rate(eigenvalue, momentum):
    most = exchange_stability.bears(eigenvalue, momentum)
    assert spectral_radius(eigenvalue, momentum, 0.97 * most) < 1 < spectral_radius(eigenvalue, momentum, 1.03 * most)


def test_alternating_pairs_are_stable_up_to_the_theoretical_learning_rate():
    for momentum in (0.0, 0.9):
        most = exchange_stability.bears(0.0, momentum)
        below, above = (
            exchange_stability.computed(8, "ring", share * most, momentum, 8, 100) for share in (0.95, 1.05)
        )
        assert below < 1 < above


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_differences_decay_on_a_real_ring_at_a_stable_learning_rate(capsys):
    words = ["--json", "--learners", "4", "--neighbours", "ring", "--curvature", "0.3", "--steps", "60"]
    assert exchange_stability.main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["factor"] < 1
    assert row["most"] < 10
