"""What a learner of `asgd` sends to the parameter server and keeps of its answers; the server is a recording fake."""

from types import SimpleNamespace

import pytest
import torch
from regression import Regression

from training.config import TrainConfig
from training.learner.compute import Learner, Losses
from training.learner.flat import FlatParameters
from training.learner.optim import build_optimizer
from training.node.node_exchange import NodeExchange
from training.node.process_group import NodeGroup
from training.node.program_stepper import ProgramStepper

SIZE = sum(parameter.numel() for parameter in Regression().build().parameters())


class RecordingServer:
    """Applies every gradient with the given rate, and counts updates in two shares."""

    def __init__(self):
        self.weights, self.versions, self.begun, self.pushed = torch.zeros(SIZE), [0, 0], [], []

    def init(self, session, weights, optimizer):
        self.begun.append((session, weights.clone(), dict(optimizer)))
        self.weights = weights.clone()
        return True

    def pull(self):
        return self.weights.clone(), list(self.versions)

    def push(self, grads, versions, lr):
        self.pushed.append((grads.clone(), list(versions), lr))
        self.weights -= lr * grads
        self.versions = [version + 1 for version in self.versions]
        return self.versions, 3.0

    def state(self):
        return {"momentum": torch.full((SIZE,), 7.0)}


@pytest.fixture
def make(tmp_path):
    """Makes a learner's stepper and its server."""
    problem = Regression()
    options = {**problem.optimizer.model_dump(), "clip_norm": 0.25}
    cfg = TrainConfig.model_validate({"strategy": "asgd", "learners_per_node": 1, "optimizer": options})

    class Toy(Learner):
        def __init__(self):
            self.cfg, self.device, self.model = cfg, torch.device("cpu"), problem.build()
            self.flat = FlatParameters(self.model)
            self.optimizer = build_optimizer(cfg.optimizer, self.model)

    def stepper():
        server, group, learner = RecordingServer(), NodeGroup(0, 1, tmp_path, torch.device("cpu")), Toy()
        ring = NodeExchange(0, group, learner.flat, None)
        return ProgramStepper(SimpleNamespace(train=cfg), learner, ring, server, epoch_steps=24.0), server

    return stepper


def step(stepper, gradient, tokens=4, loss=2.0, lr=0.1):
    stepper.learner.flat.grads.copy_(gradient)
    stepper.step(Losses(loss, tokens, tokens), False, lr)
    return stepper.results()[0]


def test_session_starts_with_the_learners_weights(make):
    stepper, server = make()
    stepper.begin("first")
    [(session, weights, optimizer)] = server.begun
    assert (session, optimizer) == ("first", {})
    assert torch.equal(weights, stepper.learner.flat.weights)


def test_clipped_mean_gradient_is_pushed_with_its_versions(make):
    stepper, server = make()
    stepper.begin("s")
    stepper.start(0)
    gradient = torch.arange(1.0, SIZE + 1)
    first = step(stepper, gradient)
    [(grads, versions, lr)] = server.pushed
    assert (versions, lr) == ([0, 0], 0.1)
    torch.testing.assert_close(grads, 0.25 * gradient / gradient.norm())
    assert first.parts[0].staleness == 3.0
    step(stepper, gradient, lr=0.05)
    assert (server.pushed[1][1], server.pushed[1][2]) == ([1, 1], 0.05)
    assert torch.equal(stepper.learner.flat.weights, server.weights)


def test_nan_gradient_is_not_pushed(make):
    stepper, server = make()
    stepper.begin("s")
    stepper.start(0)
    assert not step(stepper, torch.ones(SIZE), loss=float("nan")).good
    assert server.pushed == []
    assert step(stepper, torch.ones(SIZE)).good
    assert len(server.pushed) == 1


def test_checkpoint_restores_the_servers_weights_and_state(make):
    stepper, server = make()
    stepper.begin("s")
    stepper.start(0)
    step(stepper, torch.ones(SIZE))
    kept = stepper.keep()
    assert torch.equal(kept.state["server.center"], server.weights)
    other, next_server = make()
    other.restore(kept)
    other.begin("t")
    other.begin("u")
    (session, weights, optimizer), (_, later, nothing) = next_server.begun
    assert session == "t"
    assert torch.equal(weights, server.weights)
    assert optimizer.keys() == {"momentum"}
    assert torch.equal(optimizer["momentum"], torch.full((SIZE,), 7.0))
    assert torch.equal(later, other.learner.flat.weights)
    assert nothing == {}


def test_a_newcomer_takes_the_servers_weights(make):
    stepper, server = make()
    server.weights = torch.full((SIZE,), 0.5)
    assert stepper.fetch()
    assert torch.equal(stepper.learner.flat.weights, server.weights)
    server.weights = torch.full((SIZE,), float("nan"))
    assert not stepper.fetch()
