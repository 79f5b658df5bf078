"""Exchanges of learners whose steps began at the same moment overlapped all around: each learner ended at the mean of
its neighbours, itself excluded, and the differences grew at any learning rate.

`test_exchange_stability` tests the same with real exchanges.
"""

import pytest

from training.exchange.daemon import Stagger


def pauses(apart, step_s, count=200, start=0.0):
    return [apart.pause_s(start + step_s * (number + 1)) for number in range(count)]


def test_exchanges_start_at_random_in_the_first_half_step():
    drawn = pauses(Stagger(1, 0, 0.0), 0.5)
    assert 0.0 <= min(drawn) < 0.02
    assert 0.23 < max(drawn) <= 0.25 + 1e-9
    assert sum(drawn) / len(drawn) == pytest.approx(0.125, abs=0.015)


def test_random_pauses_depend_on_seed_and_learner_only():
    first, again, other, seeded = (
        pauses(Stagger(seed, node, 0.0), 0.5) for seed, node in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert first == again
    assert all(own != theirs for own, theirs in zip(first, other, strict=True))
    assert first != seeded


def test_pauses_shrink_for_long_exchanges_and_are_bounded():
    apart = Stagger(1, 0, 0.0)
    apart.took_s = 0.2
    assert max(pauses(apart, 0.5)) == pytest.approx(0.05, abs=0.01)
    apart.took_s = 0.25
    assert max(pauses(apart, 0.5, start=100.0)[1:]) < 1e-9
    apart.took_s = 0.0
    assert 0.9 < max(pauses(apart, 60.0, start=1000.0)) <= 1.0
