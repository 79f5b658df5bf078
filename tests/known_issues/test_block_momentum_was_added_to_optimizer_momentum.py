"""BMUF with short blocks diverged at every usable rate: the optimizer's momentum was added to the block's."""

import pytest
import torch
from support import load_beside

from benchmarks.bmuf_stability import largest
from training.config import OPTIMIZERS
from training.learner.optim import build_optimizer, drop_momentum
from training.simulation import Cluster, Simulation
from training.strategies.blocks import BmufConfig


@pytest.fixture(scope="module")
def problem():
    regression = load_beside(__file__, "../training/regression.py").Regression
    return lambda momentum: regression(batches=64, epochs=6, lr=0.1, momentum=momentum)


def simulate(problem, config):
    return Simulation(Cluster(learners=8), "bmuf", problem, config).run()


def test_bmuf_with_short_blocks_converges(problem):
    untrained = problem(0.9).evaluate(problem(0.9).replica().weights)["loss"]
    assert simulate(problem(0.9), BmufConfig(tau=4, momentum="keep")).figures["loss"] > 2 * untrained
    assert simulate(problem(0.9), BmufConfig(tau=4)).figures["loss"] < 0.1 * untrained


def test_resetting_momentum_changes_nothing_with_one_momentum_only(problem):
    for momentum, eta in ((0.9, 0.0), (0.0, 0.5)):
        config = BmufConfig(tau=4, eta=eta)
        kept = simulate(problem(momentum), config.model_copy(update={"momentum": "keep"}))
        assert torch.equal(simulate(problem(momentum), config).weights, kept.weights)


def test_stable_rate_on_a_quadratic_is_a_hundred_times_larger():
    kept, reset = (largest(0.9375, 4, resets=resets, nesterov=True) for resets in (False, True))
    assert kept < 0.002
    assert reset > 0.2
    # no momentum over blocks: stable up to the limit of SGD with momentum, 2 (1 + m)
    assert largest(0.0, 64, resets=False, nesterov=True) == pytest.approx(3.8, rel=0.03)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_update_after_momentum_reset_follows_its_gradient(kind):
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = build_optimizer(OPTIMIZERS[kind](lr=0.1, weight_decay=0.0), model)
    for _ in range(5):
        model.weight.grad = torch.ones(1, 2)
        optimizer.step()
    drop_momentum(optimizer)
    before = model.weight.detach().clone()
    model.weight.grad = -torch.ones(1, 2)
    optimizer.step()
    assert (model.weight > before).all()
