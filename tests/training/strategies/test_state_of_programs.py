"""The checkpointed state of programs: one that is stopped between two gradients and restarted continues unchanged."""

import pytest
import torch
from regression import Regression
from safetensors.torch import load, save

from training.simulation.gradients import Gather, spelled_out
from training.simulation.model import one_by_one
from training.strategies.base import LearnerContext, StrategyError, kept
from training.strategies.registry import METHODS
from training.strategies.requests import (
    AllReduce,
    Compute,
    Elastic,
    Mix,
    Pull,
    Pulled,
    Push,
    Pushed,
    Reduced,
    Start,
    Ticket,
    Wait,
    Work,
)

LEARNERS = 3
ALONE = {name: method for name, method in METHODS.items() if not method.traits.exchange}
"""Methods whose learners have nothing that runs on between two requests."""


def settle(context):
    """Finish all pending work."""
    program, outcome = context.settle(), None
    try:
        while True:
            request = program.send(outcome)
            assert isinstance(request, Wait)
            assert request.ticket.done
            outcome = request.ticket.outcome
    except StopIteration:
        return


class LockstepLearners:
    """Learners in lockstep, whose communication is carried out at once."""

    def __init__(self, name, problem, **constants):
        self.method, self.problem = METHODS[name], problem
        self.config = self.method.config(**constants)
        self.center = problem.replica().weights.clone()
        self.epoch_steps = problem.batches / LEARNERS
        self.contexts = [
            LearnerContext(problem.replica(), rank=rank, size=LEARNERS, epoch_steps=self.epoch_steps)
            for rank in range(LEARNERS)
        ]
        for context in self.contexts:
            context.replica.set_rate(problem.lr)
        self.begin()

    def begin(self):
        self.programs = [spelled_out(context, self.method.program(context, self.config)) for context in self.contexts]
        self.asked = [[] for _ in self.contexts]
        self.held = [next(program) for program in self.programs]
        self.run_to_next_gradient()

    def restart(self):
        """As a checkpoint does: settle, keep the state, restart with the same weights and optimizers."""
        for context in self.contexts:
            settle(context)
        kept_bytes = [save(context.state) for context in self.contexts]
        for program in self.programs:
            program.close()
        self.contexts = [
            LearnerContext(
                context.replica, rank=context.rank, size=LEARNERS, epoch_steps=self.epoch_steps, state=load(state)
            )
            for context, state in zip(self.contexts, kept_bytes, strict=True)
        ]
        self.begin()

    def run_to_next_gradient(self):
        """Until all are at a Compute, or have ended."""
        while True:
            for rank, request in enumerate(self.held):
                if isinstance(request, Start):
                    ticket = Ticket(request.op)
                    self.asked[rank].append(ticket)
                    self.perform(rank, ticket)
                    self.resume(rank, ticket)
                elif isinstance(request, Wait) and request.ticket.done:
                    self.resume(rank, request.ticket.outcome)
            if all(request is None or isinstance(request, Compute) for request in self.held):
                return

    def resume(self, rank, value):
        try:
            self.held[rank] = self.programs[rank].send(value)
        except StopIteration:
            self.held[rank] = None

    def perform(self, rank, ticket):
        if isinstance(ticket.op, Elastic):
            ticket.outcome = ticket.op.alpha * (ticket.op.vector - self.center)
            self.center += ticket.outcome
        elif isinstance(ticket.op, Push):
            self.center -= 0.1 * ticket.op.grads
            ticket.outcome = Pushed(1, 0)
        elif isinstance(ticket.op, Pull):
            ticket.outcome = Pulled(self.center.clone(), 0)
        else:
            self.run_collectives(len(self.asked[rank]) - 1)
            return
        ticket.done = True

    def run_collectives(self, number):
        """The collectives of one number, when the last learner has come to it."""
        if any(len(tickets) <= number for tickets in self.asked):
            return
        tickets = [tickets[number] for tickets in self.asked]
        ops = [ticket.op for ticket in tickets]
        for rank, ticket in enumerate(tickets):
            if isinstance(ops[0], AllReduce):
                total = sum(op.weight for op in ops)
                vectors = (op.vector * (op.weight / total) for op in ops if op.weight)
                ticket.outcome = Reduced(sum(vectors, torch.zeros_like(ops[0].vector)), total)
            elif isinstance(ops[0], Gather):
                ticket.outcome = ops[0].combine([op.payload for op in ops])
            else:
                assert isinstance(ops[0], Mix)
                group = ops[rank].group(rank, range(LEARNERS))
                mixed = sum(ops[other].vector for other in group) / len(group)
                ticket.outcome = ops[rank].vector if ops[rank].last else mixed
        for ticket in tickets:
            ticket.done = True

    def step(self, number):
        """One gradient each; batches beyond the problem's are empty, None is the end."""
        for rank, context in enumerate(self.contexts):
            batch = None if number is None else number * LEARNERS + rank
            work = None
            if batch is not None and batch < self.problem.batches:
                loss = lambda batch=batch: self.problem.loss(batch)  # noqa: E731
                one_by_one(self.problem.scratch, [context.replica.weights], [loss], [context.replica.grads])
                work = Work(4.0)
            elif batch is not None:
                context.replica.grads.fill_(1e6)  # from an earlier batch, for example: it must not be used
                work = Work(0.0)
            self.resume(rank, work)
        self.run_to_next_gradient()

    def end(self):
        """End the work of all learners."""
        for _ in range(4):  # the last block or pipeline step may be one of learners without work
            if any(request is not None for request in self.held):
                self.step(None)
        assert all(request is None for request in self.held)

    @property
    def weights(self):
        return [context.replica.weights.clone() for context in self.contexts]


def train(name, steps=9, restarts=(), **constants):
    table = LockstepLearners(name, Regression(batches=LEARNERS * steps, momentum=0.9), **constants)
    for number in range(steps):
        table.step(number)
        if number + 1 in restarts:
            table.restart()
    before_the_end = table.weights
    table.end()
    return before_the_end + table.weights


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        *((name, {"tau": 4} if "tau" in method.config.model_fields else {}) for name, method in ALONE.items()),
        ("bmuf", {"tau": 4, "block_start": "classical", "eta": 0.5}),
        ("bmuf", {"tau": 4, "block_start": "nesterov", "eta": 0.5}),
        ("bmuf", {"tau": 2, "warm_steps": 3}),
        ("bmuf", {"tau": 2, "warm_epochs": 0.6}),
        ("easgd", {"tau": 3, "beta": 0.6}),
        ("onebit", {"block": 16, "warm_steps": 2}),
        ("onebit", {"block": 16, "warm_epochs": 0.6}),
    ],
)
def test_restarted_program_continues_unchanged(name, constants):
    straight = train(name, **constants)
    for weights, other in zip(train(name, restarts=(1, 2, 6, 7), **constants), straight, strict=True):
        assert torch.equal(weights, other)


@pytest.mark.parametrize("name", ALONE)
def test_empty_batches_make_no_update(name):
    """The last step has no batch for any learner: leftover gradients change no weights, and no learner ends early."""
    problem = Regression(batches=LEARNERS * 2, momentum=0.0)
    table = LockstepLearners(name, problem)
    for number in range(5):
        table.step(number)
        assert all(isinstance(request, Compute) for request in table.held)
    table.end()
    assert max(float(weights.abs().max()) for weights in table.weights) < 10


def test_bmufs_model_is_neither_the_mean_nor_the_look_ahead_point():
    table = LockstepLearners("bmuf", Regression(batches=30), tau=2, eta=0.5, block_start="nesterov")
    for number in range(2):
        table.step(number)
    model = table.contexts[0].state["model"].clone()
    mean = sum(table.weights) / LEARNERS
    assert torch.equal(table.contexts[0].finish(mean), model)
    assert not torch.allclose(mean, model)
    table.step(2)
    promised = table.contexts[0].finish(sum(table.weights) / LEARNERS)
    table.end()
    for weights in table.weights:
        torch.testing.assert_close(weights, promised)
    assert torch.equal(table.contexts[0].finish(mean), mean)


def test_d1d_lacks_one_gradient_if_it_does_not_settle():
    table = LockstepLearners("d1d", Regression(batches=9))
    table.step(0)
    assert not table.contexts[0].state
    settle(table.contexts[0])
    assert set(table.contexts[0].state) == {"late", "late_weight"}
    table.step(1)
    assert not table.contexts[0].state  # its gradient is in the weights


def test_the_state_of_another_model_is_refused():
    context = LearnerContext(Regression().replica(), state={"model": torch.zeros(3)})
    with pytest.raises(StrategyError, match="checkpoint's 'model' has 3 values, not 5"):
        kept(context, "model", torch.zeros(5))
