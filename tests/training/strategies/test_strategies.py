"""Every strategy's program: the common contract, newcomers, and facts of the registry."""

import re

import pytest
import torch
from regression import Regression, final_weights, simulate

from training.simulation import Cluster, MembershipChange, Simulation, Timing
from training.strategies.base import LearnerContext, StrategyError
from training.strategies.blocks import BmufConfig, MaConfig
from training.strategies.gossip import GossipConfig
from training.strategies.registry import METHODS, STRATEGIES, STRATEGY_CONFIGS, find_method, method_of
from training.strategies.requests import Compute

NAMES = sorted(METHODS)
BLOCKS = [name for name in NAMES if "tau" in METHODS[name].config.model_fields]


# --- what every program promises


@pytest.mark.parametrize("name", NAMES)
def test_all_learners_end_with_the_same_weights(name):
    weights = final_weights(name, slow={1: 1.7}, jitter=0.2)
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_gives_bitwise_equal_weights(name):
    result, other = (simulate(name, slow={0: 2.0}, jitter=0.3, seed=5) for _ in range(2))
    assert torch.equal(result.weights, other.weights)
    assert (result.seconds, result.steps, result.bytes_per_step) == (other.seconds, other.steps, other.bytes_per_step)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batches", [1, 23, 25])
def test_every_batch_is_trained_on_once_with_uneven_learners(name, batches):
    problem = Regression(batches=batches, epochs=2)
    outcome = simulate(name, learners=3, problem=problem, slow={2: 3.3})
    assert sorted(problem.seen) == [(epoch, number) for epoch in range(2) for number in range(batches)]
    assert sum(outcome.steps) == 2 * batches


@pytest.mark.parametrize("name", NAMES)
def test_single_learner_is_plain_sgd(name):
    problem = Regression(epochs=2)
    weights = simulate(name, learners=1, problem=problem).weights
    if name == "easgd":  # drawn to its own past, on purpose
        assert not torch.allclose(weights, problem.alone())
        return
    torch.testing.assert_close(weights, problem.alone(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_learns(name):
    problem = Regression(batches=64, epochs=2, lr=0.3)
    before = problem.evaluate(problem.replica().weights)["loss"]
    assert simulate(name, problem=problem).figures["loss"] < 0.5 * before


@pytest.mark.parametrize("name", NAMES)
def test_remaining_learners_do_the_work_of_a_lost_one(name):
    problem = Regression(batches=40)
    cluster = {"losses": (MembershipChange(rank=2, at_s=0.35),), "timeout_s": 0.5}
    outcome = simulate(name, problem=problem, **cluster)
    assert sum(outcome.steps) == 40
    assert set(problem.seen) == {(0, number) for number in range(40)}
    assert outcome.repeated == 1
    assert outcome.steps[2] == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("link_gbit", [10.0, 1e-5])
def test_newcomers_join(name, link_gbit):
    problem = Regression(batches=80, momentum=0.9)
    cluster = {
        "joins": (MembershipChange(rank=3, at_s=0.55), MembershipChange(rank=0, at_s=0.7)),
        "link_gbit": link_gbit,
    }
    config = METHODS[name].config(tau=4) if name in BLOCKS and not METHODS[name].free else None
    outcome = simulate(name, problem=problem, config=config, **cluster)
    assert sorted(problem.seen) == [(0, number) for number in range(80)]
    assert 0 < outcome.steps[3] <= outcome.steps[1]
    assert 0 < outcome.steps[0] <= outcome.steps[1]
    assert outcome.spread < 1e-6


@pytest.mark.parametrize("name", ["scpsgd", "onebit"])
@pytest.mark.parametrize("link_gbit", [10.0, 1e-5])
def test_newcomers_of_synchronous_strategies_start_with_equal_weights(name, link_gbit):
    joins = (MembershipChange(rank=3, at_s=0.55),)
    cluster = Cluster(learners=4, joins=joins, link_gbit=link_gbit, jitter=0.2)
    problem = Regression(batches=80, momentum=0.9)
    outcome = Simulation(cluster, name, problem, observe=40).run()
    assert max(observation.consensus for observation in outcome.observations) < 1e-6


def test_newcomer_of_bmuf_receives_model_momentum_and_block():
    cluster = Cluster(learners=4, joins=(MembershipChange(rank=3, at_s=0.55),))
    simulation = Simulation(cluster, "bmuf", Regression(batches=78), BmufConfig(tau=4, eta=0.5))
    simulation.run()
    for name in ("model", "start", "momentum"):
        for other in simulation.learners[1:]:
            assert torch.equal(other.context.state[name], simulation.learners[0].context.state[name])


@pytest.mark.parametrize("takes", ["weights", "weights+optimizer"])
def test_gossip_newcomer_takes_optimizer_state_if_configured(takes):
    cluster = Cluster(learners=4, joins=(MembershipChange(rank=3, at_s=0.55),))
    simulation = Simulation(cluster, "adpsgd", Regression(batches=80, momentum=0.9), GossipConfig(newcomer=takes))
    newcomer, began = simulation.learners[3].replica, []
    enter = simulation.enter

    def watch(newcomers, giver):
        assert torch.equal(newcomer.weights, giver.replica.weights)
        began.append([torch.equal(*pair) for pair in zip(velocity(newcomer), velocity(giver.replica), strict=False)])
        enter(newcomers, giver)

    simulation.enter = watch
    simulation.run()
    assert began == [[True] if takes == "weights+optimizer" else []]


def velocity(replica):
    return [entries["momentum_buffer"] for entries in replica._optimizer.state.values()]


def test_a_newcomer_of_h_adpsgd_brings_its_node():
    joins = (MembershipChange(rank=3, at_s=0.55),)
    problem = Regression(batches=80)
    outcome = simulate("h-adpsgd", learners=6, problem=problem, per_machine=2, joins=joins)
    assert outcome.steps[2] == outcome.steps[3] > 0
    assert outcome.steps[2] < outcome.steps[0]
    assert outcome.spread < 1e-6
    everywhere = tuple(MembershipChange(rank=rank, at_s=1.0) for rank in (0, 2, 4))
    with pytest.raises(StrategyError, match="every node has a newcomer"):
        simulate("h-adpsgd", learners=6, per_machine=2, joins=everywhere)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*BLOCKS, "h-adpsgd")])
def test_bytes_sent_match_the_strategy_facts(name):
    size, learners = 1e6, 8
    config = METHODS[name].config()
    simulation = Simulation(Cluster(learners=learners), name, Timing(batches=60 * learners, num_bytes=size), config)
    expected = METHODS[name].facts.sent(learners, size, config)
    assert simulation.run().bytes_per_step == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_sent_after_blocks_match_the_strategy_facts(name):
    config = METHODS[name].config(tau=10)
    simulation = Simulation(Cluster(learners=8), name, Timing(batches=400 * 8, num_bytes=1e6), config)
    expected = METHODS[name].facts.sent(8, 1e6, config)
    assert simulation.run().bytes_per_step == pytest.approx(expected, rel=0.12)


def test_every_strategy_has_a_configuration():
    assert set(STRATEGY_CONFIGS) == {"single", *STRATEGIES}


@pytest.mark.parametrize("name", NAMES)
def test_replicas_are_equal_where_the_program_averages_gradients_as_they_are_computed(name):
    """The engine must know it before the program starts: from the checkpoints that it writes."""
    method, contexts = METHODS[name], [LearnerContext(Regression().replica(), rank=rank, size=2) for rank in range(2)]
    request = next(method.program(contexts[0], method.config()))
    reduces = isinstance(request, Compute) and request.reduce != "own"
    assert method.equal == reduces
    assert method.state_per_rank or method.equal
    assert method.traits.exchange == (isinstance(request, Compute) and request.average)
    assert method.traits.buckets == (reduces and request.codec is None and not method.traits.one_learner)
    assert method_of(name) is method


@pytest.mark.parametrize("name", METHODS)
def test_what_one_chooses_by_stands_in_the_facts_alone(name):
    said = METHODS[name].program.__doc__
    assert not re.search(r"Synchronizes|Sends|Staleness \d|[Aa]ll wait", said)


def test_single_and_pipeline_use_the_program_of_scpsgd():
    assert method_of("single") is method_of("pipeline") is METHODS["scpsgd"]


def test_unknown_strategy_is_refused_with_a_list_of_known_ones():
    with pytest.raises(StrategyError, match="'adsgd' is not a strategy: choose one of scpsgd, .*adpsgd"):
        find_method("adsgd")


def test_constants_of_another_strategy_are_refused():
    with pytest.raises(StrategyError, match="bmuf is configured by a BmufConfig, not MaConfig"):
        Simulation(Cluster(), "bmuf", Timing(8), MaConfig())
