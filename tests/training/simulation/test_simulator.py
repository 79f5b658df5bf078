"""The parts of the simulator: clock, links, rings, work, and what it refuses."""

import itertools
from dataclasses import replace

import pytest
from regression import Regression

from training.coordinator.membership import Member, View
from training.exchange.neighbours import neighbour
from training.simulation import Cluster, MembershipChange, Simulation, SimulationError, Timing
from training.simulation.clock import Clock
from training.simulation.exchange import VirtualNetwork
from training.simulation.gradients import Idle
from training.simulation.leases import LeasePool
from training.simulation.network import LinkModel
from training.strategies.base import StrategyError
from training.strategies.gossip import GossipConfig
from training.strategies.registry import METHODS
from training.strategies.requests import Compute


def test_events_are_ordered_by_time_then_by_creation():
    clock, seen = Clock(), []
    for time, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.at(time, lambda name=name: seen.append((clock.now, name)))
    while clock.step():
        pass
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_event_at_infinite_time_is_refused():
    with pytest.raises(ValueError, match="will never happen"):
        Clock().at(float("inf"), lambda: None)


def test_a_link_carries_one_message_at_a_time_in_either_direction():
    links = LinkModel(Cluster(learners=3, link_gbit=8, link_ms=1), Clock())
    assert links.send(0, 1, 1e9) == pytest.approx(1.001)
    assert links.send(0, 2, 1e9) == pytest.approx(2.001)  # behind the first on 0's uplink
    assert links.send(1, 0, 1e9) == pytest.approx(1.001)  # the other direction is free
    assert links.carried == {0: 2e9, 1: 1e9}


def test_cost_of_a_ring_all_reduce_follows_the_formula():
    cluster = Cluster(learners=8, per_machine=2, link_gbit=8, link_ms=1, local_gbit=80)
    links = LinkModel(cluster, Clock())
    assert links.all_reduce(list(range(8)), 1e9) == pytest.approx(14 * (1 / 8 + 1e-3))
    assert links.carried[0] == pytest.approx(14 / 8 * 1e9)
    assert links.all_reduce([0, 1], 1e9) == pytest.approx(2 * (0.5 / 10 + 1e-5))
    assert links.carried[0] == pytest.approx(14 / 8 * 1e9)


@pytest.mark.parametrize("kind", ["ring", "random-ring", "exponential", "auto"])
@pytest.mark.parametrize("nodes", [(0,), (0, 1), (0, 2, 3, 7), tuple(range(9))])
def test_neighbours_are_those_of_the_real_exchange(kind, nodes):
    clock = Clock()
    network = VirtualNetwork(clock, LinkModel(Cluster(learners=9), clock), {}, kind, 5, 1, 0.0, 1.0, lambda node: None)
    view = View(1, tuple(Member(node, "x") for node in nodes))
    for number in range(6):
        for node in range(9):
            assert network.neighbour(view, node, number) == neighbour(kind, view, node, number, 5)


def test_returned_batch_is_leased_again():
    pool = LeasePool(batches=2, epochs=1)
    first, second = pool.take(), pool.take()
    assert pool.take() is None
    pool.give_back(first)
    pool.finish(second)
    assert pool.take() == first
    pool.finish(first)
    assert pool.over
    assert pool.repeated == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slow": {4: 2.0}}, "there is no learner 4"),
        ({"learners": 6, "per_machine": 4}, "do not fill machines of 4"),
        (
            {"joins": tuple(MembershipChange(rank=rank, at_s=1) for rank in range(4))},
            "no learner is there at the start",
        ),
        ({"losses": (MembershipChange(rank=1, at_s=1), MembershipChange(rank=1, at_s=2))}, "names a learner twice"),
    ],
)
def test_impossible_clusters_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Cluster.model_validate(fields)


def test_deadlocked_programs_are_reported(monkeypatch):
    def stuck(context, cfg):
        yield Compute()
        yield Idle()

    changed = replace(METHODS["scpsgd"], program=stuck)
    monkeypatch.setattr("training.simulation.simulator.find_method", lambda name: changed)
    with pytest.raises(SimulationError, match="scpsgd is deadlocked at .*learner 0 is idle"):
        Simulation(Cluster(learners=2), "scpsgd", Timing(4)).run()


def test_training_that_loses_all_learners_is_reported():
    losses = tuple(MembershipChange(rank=rank, at_s=0.1) for rank in range(2))
    with pytest.raises(StrategyError, match="all learners died"):
        Simulation(Cluster(learners=2, losses=losses), "adpsgd", Timing(100)).run()


def test_lost_node_of_h_adpsgd_loses_all_its_learners():
    cluster = Cluster(learners=6, per_machine=2, losses=(MembershipChange(rank=3, at_s=1.05),), timeout_s=0.3)
    outcome = Simulation(cluster, "h-adpsgd", Timing(120)).run()
    assert outcome.steps[2] == outcome.steps[3] < outcome.steps[0]
    assert sum(outcome.steps) == 120


def test_a_slow_learner_takes_less_of_the_work():
    outcome = Simulation(Cluster(learners=4, slow={2: 4.0}), "adpsgd", Timing(130)).run()
    assert outcome.steps[2] == pytest.approx(10, abs=1)
    assert outcome.epoch_s == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("strategy", ["scpsgd", "d1d", "onebit"])
def test_a_changing_learning_rate_keeps_waiting_learners_equal(strategy):
    class Annealed(Regression):
        def rate(self, progress):
            return 0.2 / (1 + progress)

    problem = Annealed(batches=23, epochs=2)
    outcome = Simulation(Cluster(learners=4, slow={1: 3.0}, jitter=0.3), strategy, problem, observe=8).run()
    assert outcome.spread == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("strategy", ["scpsgd", "ma"])
def test_learning_rate_follows_the_remaining_work_after_a_loss(strategy):
    class RecordingProblem(Regression):
        asked = []

        def rate(self, progress):
            self.asked.append(progress)
            return 0.1

    problem = RecordingProblem(batches=120)
    losses = (MembershipChange(rank=1, at_s=0.45), MembershipChange(rank=2, at_s=0.45))
    Simulation(Cluster(learners=4, losses=losses, timeout_s=0.1), strategy, problem).run()
    steps = sorted({round(120 * progress) for progress in problem.asked})
    rounds = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert max(rounds) == 4
    assert rounds[-2] == 2  # two learners are left
    assert steps[-1] == 120


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["scpsgd", "d1d", "adpsgd", "bmuf", "asgd"])
def test_simulation_handles_a_thousand_learners(strategy):
    config = GossipConfig(neighbours="random-ring") if strategy == "adpsgd" else None
    cluster = Cluster(learners=1024, per_machine=8, slow={5: 10.0}, link_gbit=100)
    outcome = Simulation(cluster, strategy, Timing(batches=1024 * 12, num_bytes=165e6), config).run()
    assert sum(outcome.steps) == 1024 * 12
