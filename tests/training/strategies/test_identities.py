"""Identities between strategies, and their programs against the formulas written out."""

import pytest
import torch
from regression import Regression, final_weights, simulate

from training.simulation import Cluster, MembershipChange, Simulation, Timing
from training.strategies.blocks import BmufConfig, MaConfig
from training.strategies.gossip import GossipConfig
from training.strategies.onebit import OneBitConfig
from training.strategies.pairs import PairsConfig
from training.strategies.registry import METHODS, find_method
from training.strategies.requests import Mix
from training.strategies.servers import EasgdConfig
from training.strategies.synchronous import ScpsgdConfig, SdpsgdConfig

# --- identities


def close(result, other, atol=1e-5):
    torch.testing.assert_close(result.weights, other.weights, rtol=0, atol=atol)


def test_synchronous_sgd_is_one_learner_with_the_whole_batch():
    parts, whole = Regression(batches=24, rows=4), Regression(batches=6, rows=4)
    whole.x, whole.y = parts.x.view(6, 16, 6), parts.y.view(6, 16, 2)
    close(simulate("scpsgd", problem=parts), simulate("scpsgd", learners=1, problem=whole))


@pytest.mark.parametrize("kind", ["nesterov", "classical"])
def test_bmuf_without_momentum_is_model_averaging(kind):
    config = BmufConfig(tau=3, eta=0.0, zeta=1.0, block_start=kind)
    close(simulate("bmuf", config=config), simulate("ma", config=MaConfig(tau=3)))


class Parabola(Regression):
    """A single weight, and the loss w² / 2."""

    def build(self):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        return model

    def loss(self, number):
        return 0.5 * self.scratch_model.weight.square().sum()

    def evaluate(self, weights):
        return {"loss": 0.5 * float(weights.square().sum())}


@pytest.mark.parametrize(("name", "momentum", "limit"), [("d1d", 0.0, 1.0), ("d1d", 0.9, 0.1), ("scpsgd", 0.9, 3.8)])
def test_momentum_lowers_the_stable_learning_rate_of_delayed_gradients(name, momentum, limit):
    """Roots of z² - (1 + m) z + m + lr lie on the unit circle at lr = 1 - m; without delay the limit is 2 (1 + m)."""
    below, above = (
        simulate(name, learners=2, problem=Parabola(batches=800, lr=factor * limit, momentum=momentum)).figures["loss"]
        for factor in (0.8, 1.25)
    )
    assert below < 1e-3
    assert not above < 10  # or NaN


def test_model_averaging_after_every_step_is_synchronous_sgd():
    close(simulate("ma", config=MaConfig(tau=1)), simulate("scpsgd"))


def test_synchronous_gossip_on_the_complete_graph_is_synchronous_sgd():
    close(simulate("sdpsgd", config=SdpsgdConfig(graph="complete")), simulate("scpsgd"))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_h_adpsgd_of_one_node_is_synchronous_sgd(momentum):
    hierarchical = simulate("h-adpsgd", problem=Regression(momentum=momentum), per_machine=4)
    plain = simulate("scpsgd", problem=Regression(momentum=momentum), per_machine=4)
    assert torch.equal(hierarchical.weights, plain.weights)


@pytest.mark.parametrize("neighbours", ["ring", "random-ring"])
def test_h_adpsgd_of_nodes_of_one_is_adpsgd(neighbours):
    both = ("h-adpsgd", "adpsgd")
    grouped, single = (simulate(name, config=METHODS[name].config(neighbours=neighbours)) for name in both)
    assert torch.equal(grouped.weights, single.weights)


@pytest.mark.parametrize("cluster", [{}, {"slow": {1: 10.0}}, {"jitter": 0.5}, {"link_gbit": 1e-6}])
def test_staleness_of_d1d_is_always_one(cluster):
    outcome = simulate("d1d", **cluster)
    assert (outcome.staleness.mean, outcome.staleness.most) == (1, 1)


@pytest.mark.parametrize(("link_gbit", "most"), [(10.0, 1), (1e-5, 6)])
def test_staleness_of_adpsgd_includes_the_step_that_adds_the_average(link_gbit, most):
    """On a fast link an exchange ends before the next step, for both sides; on a slow one it takes several."""
    staleness = simulate("adpsgd", problem=Regression(batches=80), link_gbit=link_gbit).staleness
    assert staleness.most == most
    assert 1 <= staleness.mean <= most


def test_d1d_applies_each_gradient_one_step_late():
    problem = Regression(batches=8)
    got, reference = simulate("d1d", learners=2, problem=problem).weights, problem.replica()
    reference.set_rate(problem.lr)
    late = None
    for step in range(4):
        grads = []
        for number in (2 * step, 2 * step + 1):
            problem.scratch.load(reference.weights)
            problem.scratch.zero_grad()
            problem.loss(number).backward()
            grads.append(problem.scratch.grads.clone())
        if late is not None:
            reference.grads.copy_(late)
            reference.update()
        late = (grads[0] + grads[1]) / 2
    reference.grads.copy_(late)
    reference.update()
    torch.testing.assert_close(got, reference.weights, rtol=0, atol=1e-6)


def test_nesterov_model_differs_from_its_look_ahead_point():
    """Every block moves by exactly (1, 1, ...) whatever it starts from, so W is known: sum of Δ, not of (1 + η) Δ."""

    class Drift(Regression):
        def gradients(self, jobs):
            for job in jobs:
                job.replica.grads.fill_(-1.0)
            return [1.0] * len(jobs)

    eta, problem = 0.5, Drift(batches=12, lr=1.0)
    start = problem.replica().weights.clone()
    moved = {}
    for kind in ("classical", "nesterov"):
        config = BmufConfig(tau=2, eta=eta, block_start=kind)
        moved[kind] = simulate("bmuf", learners=2, problem=problem, config=config).weights - start
    delta = total = 0.0
    for _ in range(3):  # 12 batches are three blocks of two steps for either of two learners
        delta = eta * delta + 2.0
        total += delta
    for kind, got in moved.items():
        # an empty last block adds its momentum only if the program made one up
        torch.testing.assert_close(got, torch.full_like(got, total), msg=kind)


def test_the_nesterov_look_ahead_is_where_the_next_block_starts():
    classical, nesterov = (
        simulate("bmuf", config=BmufConfig(tau=2, eta=0.5, block_start=kind)).weights
        for kind in ("classical", "nesterov")
    )
    assert not torch.allclose(classical, nesterov, atol=1e-4)


def test_bmufs_warm_up_is_synchronous_sgd():
    close(simulate("bmuf", config=BmufConfig(warm_steps=100)), simulate("scpsgd"), atol=0)


@pytest.mark.parametrize(
    ("name", "constants"), [("bmuf", {"tau": 1, "eta": 0.5}), ("onebit", {"block": 16})], ids=["bmuf", "onebit"]
)
@pytest.mark.parametrize("batches", [24, 25])
def test_a_warm_up_of_an_epoch_is_synchronous_sgd_for_exactly_that_long(name, constants, batches):
    """A look after every batch: the same losses until the step that ends the epoch, other ones from the next step on.

    Of 25 batches, four learners' seventh step has the last one, and three of the next epoch.
    """
    looks = []
    for strategy, more in (("scpsgd", {}), (name, constants | {"warm_epochs": 1})):
        config = METHODS[strategy].config(**more)
        problem = Regression(batches=batches, epochs=2, momentum=0.9)
        outcome = Simulation(Cluster(learners=4), strategy, problem, config, observe=batches).run()
        looks.append([observation.figures["loss"] for observation in outcome.observations])
    same = [own == other for own, other in zip(*looks, strict=True)]
    # looks come before the update of their step, whose weights the next step's first look sees
    last = 4 * -(-batches // 4) + 4
    assert all(same[:last])
    assert not any(same[last + 4 :])


@pytest.mark.parametrize(("steps", "epochs", "expected"), [(0, 0, 0), (5, 0, 5), (0, 1, 13), (0, 0.1, 2), (40, 2, 40)])
def test_longer_of_two_warm_ups_counts_rounded_up_to_steps(steps, epochs, expected):
    config = OneBitConfig(warm_steps=steps, warm_epochs=epochs)
    assert config.warm_up(12.5) == expected
    assert OneBitConfig(warm_epochs=0.1).warm_up(30) == 3


def test_a_warm_up_in_epochs_without_an_epochs_length_is_refused():
    with pytest.raises(ValueError, match="use warm_steps"):
        BmufConfig(warm_epochs=1).warm_up(0)
    assert BmufConfig(warm_steps=7).warm_up(0) == 7


def test_newcomers_and_losses_do_not_change_a_warm_up():
    """A learner that joins during the warm-up, or after a loss, warms up to the same step as the others."""
    cluster = {
        "joins": (MembershipChange(rank=3, at_s=0.55),),
        "losses": (MembershipChange(rank=1, at_s=0.35),),
        "timeout_s": 0.2,
    }
    for config in (BmufConfig(warm_epochs=1, tau=2), OneBitConfig(warm_epochs=1)):
        name = "bmuf" if isinstance(config, BmufConfig) else "onebit"
        weights = final_weights(name, problem=Regression(batches=80, momentum=0.9), config=config, **cluster)
        del weights[1]  # of the lost learner
        for other in weights[1:]:
            torch.testing.assert_close(other, weights[0], rtol=0, atol=1e-6)


def test_staleness_of_asgd_counts_updates_by_others():
    outcome = simulate("asgd", learners=4, problem=Timing(batches=400, num_bytes=1e3))
    assert outcome.staleness.mean == pytest.approx(3, abs=0.1)


def test_staleness_of_hogwild_counts_updates_by_others():
    outcome = simulate("hogwild", learners=4, problem=Timing(batches=400), jitter=0.1)
    assert outcome.staleness.mean == pytest.approx(3, abs=0.1)


def test_easgd_follows_its_formula():
    """A learner that meets the center after every step and once more at the end, against the formula written out."""
    problem, alpha = Regression(batches=4), 0.5
    got = simulate("easgd", learners=1, problem=problem, config=EasgdConfig(tau=1, beta=alpha)).weights
    x = problem.replica().weights.clone()
    center = x.clone()
    for number in [0, 1, 2, 3, None]:
        if number is not None:
            problem.scratch.load(x)
            problem.scratch.zero_grad()
            problem.loss(number).backward()
            x = x - problem.lr * problem.scratch.grads
        drawn = alpha * (x - center)
        x, center = x - drawn, center + drawn
    torch.testing.assert_close(got, center, rtol=0, atol=1e-6)


@pytest.mark.parametrize("neighbours", ["ring", "random-ring"])
def test_gossip_conserves_the_sum_of_all_gradient_steps(neighbours):
    """With gradients that do not depend on the weights, the mean of all learners is known exactly."""

    class Drift(Regression):
        def gradients(self, jobs):
            for job in jobs:
                job.replica.grads.fill_(-1.0 - job.lease.number)
            return [1.0] * len(jobs)

    problem = Drift(batches=60, lr=0.01)
    config = GossipConfig(neighbours=neighbours)
    cluster = {"slow": {2: 5.0}, "jitter": 0.3, "link_gbit": 1e-5}
    outcome = simulate("adpsgd", learners=5, problem=problem, config=config, **cluster)
    moved = outcome.weights - problem.replica().weights
    expected = 0.01 * sum(1.0 + number for number in range(60)) / 5
    torch.testing.assert_close(moved, torch.full_like(moved, expected), rtol=1e-4, atol=1e-4)


def test_strategies_without_options_have_valid_defaults():
    assert ScpsgdConfig() == find_method("scpsgd").config()
    assert OneBitConfig().block % 8 == 0


def test_pairs_of_two_learners_are_model_averaging():
    close(simulate("pairs", learners=2, config=PairsConfig(tau=3)), simulate("ma", learners=2, config=MaConfig(tau=3)))


@pytest.mark.parametrize("learners", [3, 4, 7, 8])
def test_every_round_pairs_all_learners_at_random_and_one_of_an_odd_number_stays_alone(learners):
    ranks, seen = range(10, 10 + learners), set()
    for number in range(12):
        op = Mix(torch.zeros(1), "pairs", number=number)
        groups = {rank: op.group(rank, ranks) for rank in ranks}
        assert all(rank in group and groups[other] == group for rank, group in groups.items() for other in group)
        assert sorted(len(group) for group in groups.values()) == [1] * (learners % 2) + [2] * (learners // 2 * 2)
        seen |= {tuple(group) for group in groups.values() if len(group) == 2}
    assert len(seen) > learners // 2


@pytest.mark.parametrize("graph", ["ring", "complete", "pairs"])
def test_learners_that_are_rounds_ahead_end_with_the_last_vector_of_a_slow_one(graph):
    name, config = ("pairs", PairsConfig(tau=2)) if graph == "pairs" else ("sdpsgd", SdpsgdConfig(graph=graph))
    outcome = simulate(name, learners=8, problem=Regression(batches=120), config=config, slow={0: 10.0}, jitter=0.3)
    assert sum(outcome.steps) == 120


@pytest.mark.parametrize("rank", range(5))
def test_neighbours_on_the_ring_and_on_the_complete_graph(rank):
    ring, complete = (Mix(torch.zeros(1), graph).group(rank, range(5)) for graph in ("ring", "complete"))
    assert ring == sorted({(rank - 1) % 5, rank, (rank + 1) % 5})
    assert complete == [0, 1, 2, 3, 4]
