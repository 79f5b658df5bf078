"""A program that paused averaging (`Compute.average=False`) paused it in the simulator only.

The engine went on starting exchanges, and never added a result to a gradient that was not averaged within the node.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from training.config import TrainConfig
from training.exchange.base import Exchange, ExchangeStats
from training.learner.compute import Learner, Losses
from training.learner.flat import FlatParameters
from training.learner.optim import build_optimizer
from training.node.learner_replica import LearnerReplica
from training.node.node_exchange import NodeExchange
from training.node.process_group import NodeGroup
from training.node.program_stepper import ProgramStepper
from training.simulation.gradients import spelled_out
from training.strategies.base import LearnerContext
from training.strategies.gossip import ADPSGD
from training.strategies.requests import Compute, Work

AVERAGES = (True, True, False, False, True, True)


class RecordingExchange(Exchange):
    """An exchange without neighbours, which records its calls; every tick brings a delta."""

    endpoint = ""

    def __init__(self, size):
        self.calls, self.waiting, self.delta = [], 0, torch.full((size,), 0.25)

    def start(self, weights, step):
        self.calls.append(("start", step))

    def tick(self, step):
        self.calls.append(("tick", step))
        self.waiting = 1

    def ready(self):
        return self.waiting > 0

    def take(self):
        self.calls.append("take")
        return self.delta

    def release(self):
        self.waiting = 0

    def give(self, weights, step):
        self.calls.append(("give", step))
        return True

    def set_view(self, view):
        pass

    def fetch(self, timeout_s):
        return None

    def stats(self):
        return ExchangeStats()

    def alive(self):
        return True

    def close(self):
        pass


@pytest.fixture
def learner():
    cfg = TrainConfig.model_validate({"strategy": "adpsgd"})

    class Toy(Learner):
        def __init__(self):
            self.cfg, self.device, self.model = cfg, torch.device("cpu"), torch.nn.Linear(3, 2)
            self.flat = FlatParameters(self.model)
            self.optimizer = build_optimizer(cfg.optimizer, self.model)

    return Toy()


def program_of(reduce):
    def program(context, cfg):
        for average in AVERAGES:
            yield Compute(reduce=reduce, average=average)
            context.replica.update()

    return program


def simulated_calls(learner, program):
    replica = LearnerReplica(learner)
    exchange = RecordingExchange(replica.weights.numel())
    context = LearnerContext(replica, nodes=2, exchange=exchange)
    running = spelled_out(context, program(context, None))
    next(running)
    for _ in AVERAGES[1:]:
        learner.flat.grads.zero_()
        assert isinstance(running.send(Work(4)), Compute)
    return exchange.calls


def engine_calls(learner, program, folder):
    exchange = RecordingExchange(learner.flat.weights.numel())
    ring = NodeExchange(0, NodeGroup(0, 1, folder, torch.device("cpu")), learner.flat, exchange)
    stepper = ProgramStepper(SimpleNamespace(train=learner.cfg), learner, ring)
    stepper.method = replace(ADPSGD, program=program)
    stepper.start(0)
    for step in range(1, len(AVERAGES)):
        learner.flat.grads.zero_()
        stepper.step(Losses(1.0, 4, 4), False, 0.1)
        stepper.after(step)
    return exchange.calls


@pytest.mark.parametrize("reduce", ["own", "node"])
def test_averaging_pauses_alike_in_engine_and_simulator(learner, reduce, tmp_path):
    wanted = [("start", 0)]
    for step, average in enumerate(AVERAGES[1:], 1):
        wanted += ["take"] * (("tick", step - 1) in wanted)
        wanted += [("give", step), *[("tick", step)] * average]
    assert simulated_calls(learner, program_of(reduce)) == wanted
    assert engine_calls(learner, program_of(reduce), tmp_path) == wanted


def test_neighbours_results_wait_until_averaging_goes_on(learner, tmp_path):
    exchange = RecordingExchange(learner.flat.weights.numel())
    ring = NodeExchange(0, NodeGroup(0, 1, tmp_path, torch.device("cpu")), learner.flat, exchange)
    exchange.waiting, before = 1, learner.flat.weights.clone()
    ring.idle(3, average=False)
    assert torch.equal(learner.flat.weights, before)
    ring.idle(3)
    assert torch.equal(learner.flat.weights, before + 0.25)
