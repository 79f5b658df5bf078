"""A small problem for simulations: a two-layer network learns a random function."""

import torch
from torch import nn

from training.config import OPTIMIZERS
from training.learner.flat import FlatParameters
from training.simulation import Cluster, Simulation
from training.simulation.model import ModelReplica, one_by_one
from training.simulation.problem import Activations


class Regression:
    """`batches` batches of `rows` rows an epoch."""

    def __init__(self, batches=24, epochs=1, rows=4, lr=0.1, **optimizer):
        self.batches, self.epochs, self.lr = batches, epochs, lr
        kind = optimizer.get("kind", "sgd")
        values = {"weight_decay": 0.0, "clip_norm": 0.0, "lr": lr} | ({"momentum": 0.0} if kind == "sgd" else {})
        self.optimizer = OPTIMIZERS[kind](**values | optimizer)
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(batches, rows, 6, generator=generator)
        self.y = torch.tanh(self.x @ torch.randn(6, 2, generator=generator))
        self.scratch_model = self.build()
        self.scratch = FlatParameters(self.scratch_model)
        self.seen = []

    def build(self):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def replica(self):
        return ModelReplica(self.build(), self.optimizer)

    def loss(self, number):
        return (self.scratch_model(self.x[number]) - self.y[number]).square().mean()

    def gradients(self, jobs):
        self.seen += [(job.lease.epoch, job.lease.number) for job in jobs]
        weights = [job.replica.weights if job.weights is None else job.weights for job in jobs]
        losses = [lambda job=job: self.loss(job.lease.number) for job in jobs]
        one_by_one(self.scratch, weights, losses, [job.replica.grads for job in jobs])
        return [float(self.x.shape[1])] * len(jobs)

    def rate(self, progress):
        return self.lr

    @torch.no_grad()
    def evaluate(self, weights):
        self.scratch.load(weights)
        return {"loss": float((self.scratch_model(self.x) - self.y).square().mean())}

    def activations(self, stages):
        return Activations(1e4)

    def alone(self):
        """Plain SGD of one learner, without a simulation."""
        replica = self.replica()
        replica.set_rate(self.lr)
        for _ in range(self.epochs):
            for number in range(self.batches):
                one_by_one(self.scratch, [replica.weights], [lambda n=number: self.loss(n)], [replica.grads])
                replica.update()
        return replica.weights.clone()


def simulate(name, learners=4, problem=None, config=None, seed=0, **cluster):
    return Simulation(Cluster(learners=learners, **cluster), name, problem or Regression(), config, seed=seed).run()


def final_weights(name, learners=4, problem=None, config=None, **cluster):
    """The weights of every learner at the end."""
    simulation = Simulation(Cluster(learners=learners, **cluster), name, problem or Regression(), config)
    simulation.run()
    return [learner.replica.weights for learner in simulation.learners]
