"""Programs of strategies in real processes: weights as in the simulator, and a resume without any difference."""

import math
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks

from training.learner.flat import FlatParameters
from training.node.learner_replica import LearnerReplica, SharedWeights

PROGRAM = textwrap.dedent(
    """
    import os, sys
    from dataclasses import replace
    from pathlib import Path
    from types import SimpleNamespace
    import torch
    from regression import Regression
    from training.learner.compute import Learner, Losses
    from training.simulation.leases import BatchLease
    from training.config import TrainConfig
    from training.learner.flat import FlatParameters
    from training.node.process_group import NodeGroup
    from training.learner.optim import build_optimizer
    from training.node.node_exchange import NodeExchange
    from training.simulation import Cluster, Simulation
    from training.strategies.registry import METHODS
    from training.node.worker import build_stepper

    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    group = NodeGroup(rank, size, folder / "meet", torch.device("cpu"))

    class ByRank(Regression):
        "Learner r trains batch k * size + r at its step k, as the ranks here do, in whatever order they ask."

        def gradients(self, jobs):
            batches = [BatchLease(job.step * size + job.rank, job.lease.epoch) for job in jobs]
            return super().gradients([replace(job, lease=lease) for job, lease in zip(jobs, batches, strict=True)])

    problem = ByRank(batches=24, momentum=0.5)

    class Toy(Learner):
        "A learner without speech: clipping and the optimizer's step are the real ones."

        def __init__(self, cfg):
            self.cfg, self.device, self.model = cfg, torch.device("cpu"), problem.build()
            self.flat = FlatParameters(self.model)
            self.optimizer = build_optimizer(cfg.optimizer, self.model)

        def gradient(self, number):
            x, y = problem.x[number], problem.y[number]
            self.flat.zero_grad()
            loss = (self.model(x) - y).square().mean() * len(x)
            loss.backward()
            return Losses(float(loss), len(x), len(x))

    EPOCH = problem.batches / size

    def stepper(strategy, **constants):
        chosen, optimizer = {"kind": strategy} | constants, problem.optimizer.model_dump()
        cfg = TrainConfig.model_validate({"strategy": chosen, "learners_per_node": size, "optimizer": optimizer})
        learner = Toy(cfg)
        ring = NodeExchange(0, group, learner.flat, None)
        return build_stepper(SimpleNamespace(train=cfg), ring, learner, epoch_steps=EPOCH)

    def train(one, numbers):
        results = []
        for number in numbers:
            one.step(one.learner.gradient(number * size + rank), False, problem.lr)
            results += one.results() if one.turns == 1 else []
        return results or one.results()

    def weights_of(model):
        return torch.cat([tensor.flatten() for tensor in model.values()])

    CASES = [
        # every method of a single node, as the registry has it
        *((name, {"tau": 3} if "tau" in method.config.model_fields else {})
          for name, method in METHODS.items() if method.traits.one_node),
        ("sdpsgd", {"graph": "complete"}), ("bmuf", {"tau": 3, "block_start": "classical", "warm_steps": 2}),
        ("bmuf", {"tau": 2, "warm_epochs": 0.5}),
        # these overlap with the backward pass
        ("onebit", {"block": 16, "warm_steps": 2}), ("onebit", {"block": 16, "warm_epochs": 0.5}),
    ]
    for strategy, constants in CASES:
        one = stepper(strategy, **constants)
        config = METHODS[strategy].config.model_validate(constants)
        outcome = Simulation(Cluster(learners=size), strategy, problem, config).run()
        one.start(0)
        results = train(one, range(8))
        assert all(result.good and len(result.parts) == size for result in results)
        if strategy == "d1d":
            assert [result.parts[rank].staleness for result in results[1:]] == [1.0] * 7
        one.conclude()
        model = one.model()
        if rank == 0:
            said = lambda text: f"{strategy} {constants}: {text}"
            torch.testing.assert_close(weights_of(model), outcome.weights, rtol=1e-5, atol=1e-6, msg=said)
        # stopped after any step, and gone on with by another process
        for cut in (1, 4, 5):
            before, after = stepper(strategy, **constants), stepper(strategy, **constants)
            before.start(0)
            train(before, range(cut))
            after.restore(before.keep())
            after.start(cut)
            train(after, range(cut, 8))
            after.conclude()
            assert torch.equal(after.learner.flat.weights, one.learner.flat.weights), (strategy, constants, cut)
            before.conclude()  # what it had begun must end before others begin

    # a warm-up of an epoch is synchronous SGD, and the next step is not
    for strategy, constants in (("bmuf", {"tau": 1, "eta": 0.5}), ("onebit", {"block": 16})):
        one, plain = stepper(strategy, warm_epochs=1, **constants), stepper("scpsgd")
        for other in (one, plain):
            other.start(0)
            train(other, range(int(EPOCH)))
        torch.testing.assert_close(one.learner.flat.weights, plain.learner.flat.weights, rtol=1e-5, atol=1e-6)
        for other in (one, plain):
            train(other, [0])
        assert not torch.allclose(one.learner.flat.weights, plain.learner.flat.weights, atol=1e-4), strategy
        # a training that begins anew in the same process is warmed up anew
        fresh = stepper(strategy, warm_epochs=1, **constants)
        one.forget()
        one.learner.model.load_state_dict(fresh.learner.model.state_dict())
        one.learner.optimizer.state.clear()
        for other in (one, fresh):
            other.start(0)
            train(other, range(int(EPOCH)))
        assert torch.equal(one.learner.flat.weights, fresh.learner.flat.weights), strategy

    # a gradient that is no number changes nobody's weights, in no strategy
    for strategy, constants in CASES:
        one = stepper(strategy, **constants)
        one.start(0)
        losses = one.learner.gradient(rank)
        if rank == 1:
            losses.loss = float("nan")
        one.step(losses, False, problem.lr)
        assert not one.results()[0].good
        train(one, [1])
        one.conclude()
        assert torch.isfinite(one.learner.flat.weights).all(), strategy
    group.close()
    print("fine", flush=True)
    os._exit(0)
    """
)


@pytest.mark.slow
def test_stopped_and_resumed_real_learners_match_simulated_ones(tmp_path):
    run_ranks(PROGRAM, 3, tmp_path)


# --- hogwild's memory


def flat_model(value):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, FlatParameters(model)


@pytest.fixture
def shared_weights(tmp_path):
    return [SharedWeights(tmp_path / "weights", 8, slot, 2) for slot in range(2)]


def test_first_learner_of_a_session_initializes_the_shared_weights(shared_weights):
    (network, mine), (other, theirs) = flat_model(1.0), flat_model(2.0)
    mine.move(shared_weights[0].enter("a", mine.weights))
    theirs.move(shared_weights[1].enter("a", theirs.weights))
    assert theirs.weights.tolist() == [1.0] * 8
    with torch.no_grad():
        other.weight.add_(0.5)  # an update by one is an update for all
    assert network.weight.tolist() == [[1.5] * 3] * 2
    shared_weights[1].count()
    shared_weights[0].count()
    assert shared_weights[0].updates() == shared_weights[1].updates() == 2


@pytest.mark.parametrize("norm", [1.0, math.nan])
def test_finite_update_counts_for_all_learners_with_shared_weights(shared_weights, norm):
    made, good = [], math.isfinite(norm)
    learner = SimpleNamespace(
        flat=SimpleNamespace(weights=torch.zeros(8)), scale_gradient=lambda scale: norm * scale, update=made.append
    )
    first, other, alone = (LearnerReplica(learner, shared) for shared in (*shared_weights, None))
    for replica in (first, other, alone):
        replica.lr = 0.5
        replica.update()
    assert (first.updates, other.updates, alone.updates) == (2 * good, 2 * good, good)
    assert made == 3 * good * [0.5]


def test_new_session_sets_the_weights_and_a_newcomer_takes_them(shared_weights):
    shared_weights[0].enter("a", torch.ones(8))
    shared_weights[0].count()
    assert shared_weights[1].enter("b", torch.full((8,), 3.0)).tolist() == [3.0] * 8
    assert shared_weights[1].updates() == 0
    assert shared_weights[0].enter("", torch.zeros(8)).tolist() == [3.0] * 8


def test_model_moved_to_shared_memory_keeps_gradients_and_optimizer(shared_weights):
    model, flat = flat_model(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    flat.move(shared_weights[0].enter("a", flat.weights))
    model(torch.ones(1, 3)).sum().backward()
    assert flat.grads.tolist() == [1.0] * 8
    optimizer.step()
    assert np.allclose(flat.weights.numpy(), 0.0)
    flat.load(torch.arange(8.0))
    assert model.bias.tolist() == [6.0, 7.0]
