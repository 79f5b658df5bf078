"""A division by speaker gave nearly everything to validation if the speaker who said most came first in the draw."""

import numpy as np
import pytest

from tasks.dataset.splits import Groups, name_order, split_groups

SIZES = np.array([10, 1000, 10, 10])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shares", [{"valid": 0.05}, {"valid": 0.05, "test": 0.1}])
def test_who_said_most_is_trained_on(seed, shares):
    order = name_order([f"speaker{number}" for number in range(len(SIZES))], seed)
    sets = split_groups(Groups(SIZES, order), shares, seed)
    assert sets[1] == 0
    assert set(sets.tolist()) == set(range(len(shares) + 1))


def test_half_of_the_utterances_may_still_be_drawn():
    drawn = set()
    for seed in range(12):
        order = name_order(["speaker0", "speaker1", "speaker2"], seed)
        drawn.add(int(split_groups(Groups(np.array([20, 10, 10]), order), {"valid": 0.05}, seed)[0]))
    assert drawn == {0, 1}
