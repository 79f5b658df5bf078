"""The stability limit of asynchronous averaging: the benchmark's arithmetic, and a short run with the real exchange."""

import json

import pytest

from benchmarks import exchange_stability


def test_growth_is_that_of_the_second_half():
    assert exchange_stability.factor([100.0, 50.0, 1.0, 2.0, 4.0]) == pytest.approx(2.0)
    assert exchange_stability.factor([1.0, 0.0, 0.0, 0.0]) == 1.0


def radius(eigenvalue, momentum, rate, steps=400):
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
def test_weights_are_stable_up_to_the_rate_that_theory_allows(eigenvalue, momentum):
    most = exchange_stability.bears(eigenvalue, momentum)
    assert radius(eigenvalue, momentum, 0.97 * most) < 1 < radius(eigenvalue, momentum, 1.03 * most)


def test_pairs_that_average_in_turn_bear_what_theory_allows():
    for momentum in (0.0, 0.9):
        most = exchange_stability.bears(0.0, momentum)
        below, above = (
            exchange_stability.computed(8, "ring", share * most, momentum, 8, 100) for share in (0.95, 1.05)
        )
        assert below < 1 < above


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_differences_die_away_in_lockstep_at_a_learning_rate_that_the_ring_bears(capsys):
    words = ["--json", "--learners", "4", "--neighbours", "ring", "--curvature", "0.3", "--steps", "60"]
    assert exchange_stability.main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["factor"] < 1
    assert row["most"] < 10
