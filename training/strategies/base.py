"""A learner's program: a generator of requests to the other learners.

A method of distributed training is a generator. It yields requests and is resumed with their outcomes, independent of
sockets, processes and clocks: the training engine executes the requests between processes, the simulator on a virtual
clock.

    def program(context, cfg):                       # synchronous SGD
        while (work := (yield Compute(reduce="all"))) is not None:
            if work.weight:
                context.replica.update()

A vector passed to `Start` must not be changed until its ticket is done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from configurable.lazy import torch
from training.strategies.requests import AllReduce, Op, Program, Reduced, Request, Start, Wait, Work

if TYPE_CHECKING:
    from torch import Tensor

    from training.exchange.base import Exchange


class StrategyError(ValueError):
    """A method does not support what is requested; the message says what to change."""


class Replica(Protocol):
    """One learner's weights and optimizer.

    Attributes:
        weights: Flat fp32 weights; writing to them changes the model.
        grads: Flat gradients of the trainable part, which comes first in `weights`.
        updates: Optimizer steps on these weights, by all learners that share them.
        num_bytes: Size of the weights on the wire in fp32; a simulation without a model gives the size of another one.
    """

    num_bytes: float

    @property
    def weights(self) -> Tensor:
        """Flat fp32 weights."""

    @property
    def grads(self) -> Tensor:
        """Flat gradients."""

    @property
    def updates(self) -> int:
        """Optimizer steps on these weights."""

    def update(self) -> None:
        """Make one optimizer step with `grads`, at the current learning rate."""

    def drop_momentum(self) -> None:
        """Reset the momentum: the next update depends on its gradient alone."""


def _nothing(_: float) -> None:
    return


def identity(mean: Tensor) -> Tensor:
    """Default of `LearnerContext.finish`: the model is the mean of the replicas."""
    return mean


def settled() -> Program:
    """Default of `LearnerContext.settle`: no communication is pending."""
    yield from ()


@dataclass
class LearnerContext:
    """What a program sees: its replica, its place among the learners, and its state.

    A program that is suspended at a `Compute` can be stopped there and restarted later with a context that has the same
    weights, optimizer and `state`: the result is the same as without the interruption.

    Attributes:
        replica: Its weights and optimizer.
        rank: Its rank among all learners.
        size: Number of learners at the start of training.
        node_rank: Its rank within its node; nodes have one learner except with h-adpsgd.
        node_size: Number of learners of its node.
        nodes: Number of nodes at the start of training.
        epoch_steps: Steps of a learner in an epoch if all are equally fast and none is lost; the same at all learners,
            and after a resume.
        exchange: Exchange that the simulator uses for `Compute.average`; None for a learner without one.
        stale: Called with the staleness of each applied gradient or average, in steps.
        joined: Whether the learner joined a running training.
        finish: Returns the model that training would give if it ended now, from the current mean of the replicas.
            Programs set it.
        settle: Returns a short program that waits for pending communication and stores its outcome in `state`. It runs
            at all learners before `state` is saved, while they are suspended at a `Compute`, and yields only `Wait`.
            Programs set it.
        state: Tensors of the program that a checkpoint saves, by name. Programs read it when they start (empty in a new
            training) and keep it up to date. Counters are 0-dimensional tensors.
    """

    replica: Replica
    rank: int = 0
    size: int = 1
    node_rank: int = 0
    node_size: int = 1
    nodes: int = 1
    epoch_steps: float = 0.0
    exchange: Exchange | None = None
    stale: Callable[[float], None] = field(default=_nothing)
    joined: bool = False
    finish: Callable[[Tensor], Tensor] = field(default=identity)
    settle: Callable[[], Program] = field(default=settled)
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> float:
        """Size of the weights on the wire in fp32."""
        return self.replica.num_bytes


def kept(context: LearnerContext, name: str, fresh: Tensor) -> Tensor:
    """A tensor of the program's state: the checkpoint's value, or `fresh` without one; on the device of `fresh`.

    Raises:
        StrategyError: If the checkpoint's tensor has another size.
    """
    old = context.state.get(name)
    if old is not None and old.numel() != fresh.numel():
        raise StrategyError(
            f"the checkpoint's {name!r} has {old.numel()} values, not {fresh.numel()}: it is of another model"
        )
    context.state[name] = fresh if old is None else old.to(fresh).view_as(fresh)
    return context.state[name]


def counter(context: LearnerContext, name: str) -> Tensor:
    """A number of the program's state, to be changed in place; 0 at the start."""
    return kept(context, name, torch.zeros((), dtype=torch.float64))


def perform(op: Op) -> Generator[Request, Any, Any]:
    """Start a communication and wait for it: `outcome = yield from perform(op)`."""
    ticket = yield Start(op)
    return (yield Wait(ticket))


def weight_of(work: Work | None) -> float:
    """Weight of a learner in collectives; 0 for one without work."""
    return work.weight if work is not None else 0.0


def reduce(
    context: LearnerContext, vector: Tensor, weight: float, scope: Literal["all", "node"] = "all"
) -> Generator[Request, Any, Reduced]:
    """All-reduce a vector as large as the weights; with a single learner, nothing is sent."""
    if (context.size if scope == "all" else context.node_size) == 1:
        return Reduced(vector, weight)
    reduced: Reduced = yield from perform(AllReduce(vector, weight, context.num_bytes, scope))
    return reduced


def average_all(context: LearnerContext) -> Program:
    """End a decentralized training: all learners set their weights to the mean (arXiv:2110.11199)."""
    if context.size == 1:
        return
    op = AllReduce(context.replica.weights.clone(), 1.0, context.num_bytes, channel="end")
    mean: Reduced = yield from perform(op)
    with torch.no_grad():
        context.replica.weights.copy_(mean.vector)
