"""The choice of neighbours, and how fast averaging with them brings learners together."""

import numpy as np
import pytest

from benchmarks.peers.gloo import colours, partners
from training.coordinator.membership import Member, View
from training.exchange.neighbours import by_distance, neighbour, ring_order


def view(count):
    return View(1, tuple(Member(node, str(node)) for node in range(count)))


def test_the_fixed_ring_alternates_right_and_left():
    assert [neighbour("ring", view(5), 0, number, 7) for number in range(4)] == [1, 4, 1, 4]
    assert [neighbour("ring", view(5), 4, number, 7) for number in range(4)] == [0, 3, 0, 3]


def test_ring_closes_around_a_lost_node():
    assert [neighbour("ring", view(5).without(1), 0, number, 7) for number in range(2)] == [2, 4]


@pytest.mark.parametrize("kind", ["ring", "random-ring", "exponential", "auto"])
def test_nodes_never_ask_themselves_or_unknown_nodes(kind):
    for count in range(1, 10):
        for node, number in np.ndindex(count, 6):
            asked = neighbour(kind, view(count), node, number, 3)
            assert (asked is None) == (count == 1)
            assert asked != node
    assert neighbour(kind, view(3), 9, 0, 3) is None


def test_random_ring_is_the_same_for_all_and_changes_each_exchange():
    rings = [ring_order("random-ring", view(16), number, 5) for number in range(50)]
    assert len(set(rings)) == 50
    assert rings == [ring_order("random-ring", view(16), number, 5) for number in range(50)]
    assert rings != [ring_order("random-ring", view(16), number, 6) for number in range(50)]
    for number, ring in enumerate(rings):
        assert sorted(ring) == list(range(16))
        asked = [neighbour("random-ring", view(16), node, number, 5) for node in range(16)]
        assert sorted(asked) == list(range(16))  # each is asked once


def test_exponential_graph_doubles_the_distance_each_exchange():
    assert [neighbour("exponential", view(9), 0, number, 5) for number in range(6)] == [1, 2, 4, 8, 1, 2]
    assert [neighbour("exponential", view(8), 7, number, 5) for number in range(4)] == [0, 1, 3, 0]
    for number in range(4):
        assert sorted(neighbour("exponential", view(9), node, number, 5) for node in range(9)) == list(range(9))


@pytest.mark.parametrize(("count", "kind"), [(7, "ring"), (8, "random-ring")])
def test_auto_selects_a_random_ring_from_eight_nodes_on(count, kind):
    for node, number in np.ndindex(count, 4):
        assert neighbour("auto", view(count), node, number, 5) == neighbour(kind, view(count), node, number, 5)


def test_newcomers_ask_the_nearest_neighbour_first():
    assert by_distance(view(6), 0) == (1, 5, 2, 4, 3)
    assert by_distance(view(3), 7) == (0, 2, 1)  # not a member yet


@pytest.mark.parametrize("count", range(1, 10))
def test_fixed_pairs_are_disjoint_and_cover_the_ring(count):
    groups = colours(count)
    for group in groups:
        met = [node for pair in group for node in pair]
        assert len(met) == len(set(met))
    edges = {frozenset(pair) for group in groups for pair in group}
    assert edges == {frozenset((n, (n + 1) % count)) for n in range(count) if count > 1}
    for node in range(count):
        for turn, partner in enumerate(partners(count, node)):
            assert partner is None or partners(count, partner)[turn] == node


def mixing(order):
    """Each averages with both ring neighbours, a third each."""
    count = len(order)
    matrix = np.zeros((count, count))
    for place, node in enumerate(order):
        for step in (-1, 0, 1):
            matrix[node, order[(place + step) % count]] += 1 / 3
    return matrix


def error(x):
    return float(np.linalg.norm(x - x.mean(0)))


@pytest.mark.parametrize("count", [8, 16, 32])
def test_consensus_distance_on_a_fixed_ring_shrinks_at_the_published_rate(count):
    """(1/3 + 2/3 cos(2 pi / L)) per step: arXiv:2112.01433, on the fixed ring."""
    rate = 1 / 3 + 2 / 3 * np.cos(2 * np.pi / count)
    x = np.random.default_rng(count).normal(size=(count, 20))
    errors = [error(x)]
    for number in range(300):
        x = mixing(ring_order("ring", view(count), number, 0)) @ x
        errors.append(error(x))
    steps = min(len(errors) - 1, int(np.log(1e-9) / np.log(rate)))
    ratios = np.array(errors[1 : steps + 1]) / np.array(errors[:steps])
    assert ratios.max() <= rate + 1e-6
    assert ratios[-1] == pytest.approx(rate, abs=1e-3)  # and no faster in the end: the bound is tight


@pytest.mark.parametrize("count", [8, 16, 32])
def test_consensus_distance_on_a_random_ring_shrinks_at_the_published_rate(count):
    """Expected error at most sqrt(L - 1) / sqrt(3)^k after k steps: arXiv:2112.01433, theorem on random mixing."""
    steps, trials, errors = 12, 40, []
    for trial in range(trials):
        product = np.eye(count)
        for number in range(steps):
            product = mixing(ring_order("random-ring", view(count), number, trial)) @ product
        errors.append(np.linalg.norm(product - 1 / count, 2))
    assert np.mean(errors) <= np.sqrt(count - 1) / np.sqrt(3) ** steps


def average_in_pairs(kind, count, rounds, seed):
    """Our own process: one after another, in random order, each averages in a pair with its neighbour."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 20))
    first = error(x)
    for number in range(rounds):
        for node in rng.permutation(count):
            peer = neighbour(kind, view(count), int(node), number, seed)
            x[[node, peer]] = (x[node] + x[peer]) / 2
    return error(x) / first


@pytest.mark.parametrize("count", [3, 8, 32, 48])
def test_pairwise_averaging_converges_on_both_rings_faster_on_random_ones(count):
    fixed, shuffled = (
        np.mean([average_in_pairs(kind, count, 12, seed) for seed in range(4)]) for kind in ("ring", "random-ring")
    )
    assert fixed < 1
    assert shuffled < 1
    if count >= 32:
        assert shuffled < fixed / 10
