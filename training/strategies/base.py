"""A learner's program: what it asks of the other learners, and what it gets back.

A method is a generator. It yields requests and is resumed with their outcomes; it knows no sockets, processes or
clocks. The training engine performs the requests with real ones, the simulator on a virtual clock.

    def program(context, cfg):                       # synchronous SGD
        while (work := (yield Compute(reduce="all"))) is not None:
            if work.weight:
                context.replica.update()

A vector that was passed to `Start` must not be touched until its ticket is done.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from training.strategies.requests import AllReduce, Op, Program, Reduced, Request, Start, Wait, Work

if TYPE_CHECKING:
    from training.exchange.base import Exchange


class StrategyError(ValueError):
    """A method cannot do what is asked of it; the message says what to change."""


class Replica(Protocol):
    """One learner's weights and optimizer.

    Attributes:
        weights: Flat fp32 weights; writing to them changes the model.
        grads: Flat gradients of the trainable part, which comes first in `weights`.
        updates: Optimizer steps made on these weights, by all that share them.
        num_bytes: Size of the weights on the wire in fp32; a simulation without a model states another model's.
    """

    num_bytes: float

    @property
    def weights(self) -> Tensor:
        """See above."""

    @property
    def grads(self) -> Tensor:
        """See above."""

    @property
    def updates(self) -> int:
        """See above."""

    def update(self) -> None:
        """One optimizer step with `grads`, at the learning rate of the moment."""

    def drop_momentum(self) -> None:
        """Let the next update follow from its gradient alone."""


def _nothing(_: float) -> None:
    return


def identity(mean: Tensor) -> Tensor:
    """The model of most methods: the mean of the replicas, as it is."""
    return mean


def settled() -> Program:
    """What most methods have to do before a checkpoint: nothing."""
    yield from ()


@dataclass
class LearnerContext:
    """A learner's place among the others.

    A program that is suspended at a `Compute` can be stopped there and restarted later with a seat that has the same
    weights, optimizer and `state`: the result is the same as without the interruption.

    Attributes:
        replica: Its weights and optimizer.
        rank: Its number.
        size: Learners when training began.
        node_rank: Its number within its node; nodes other than h-adpsgd's have one learner.
        node_size: Learners of its node.
        nodes: Nodes when training began.
        epoch_steps: Steps of a learner in an epoch, where all are equally fast and none is lost; the same at all
            learners, and after a resume.
        exchange: By which the simulator averages for `Compute.average`; None where there is nothing to average with.
        stale: Is told the staleness of each applied gradient or average, in steps.
        joined: Whether it came when others were training already.
        finish: The model that training would yield if it ended now, from the mean of the replicas as they are now.
            Programs set it.
        settle: Makes a short program that waits for pending communication and puts its outcome into `state`. It runs
            at all learners before `state` is kept, while they are suspended at a `Compute`, and yields nothing but
            `Wait`. Programs set it.
        state: What of the program a checkpoint has to keep, by name; programs read it when they begin (empty: from the
            beginning) and keep it up to date. Counters are tensors of no dimension.
    """

    replica: Replica
    rank: int = 0
    size: int = 1
    node_rank: int = 0
    node_size: int = 1
    nodes: int = 1
    epoch_steps: float = 0.0
    exchange: "Exchange | None" = None
    stale: Callable[[float], None] = field(default=_nothing)
    joined: bool = False
    finish: Callable[[Tensor], Tensor] = field(default=identity)
    settle: Callable[[], Program] = field(default=settled)
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> float:
        """Of the weights on the wire, as fp32."""
        return self.replica.num_bytes


def kept(context: LearnerContext, name: str, fresh: Tensor) -> Tensor:
    """A tensor of the program's state: what a checkpoint has brought, or else `fresh`; on the device of `fresh`.

    Raises:
        StrategyError: The checkpoint's is of another shape.
    """
    old = context.state.get(name)
    if old is not None and old.numel() != fresh.numel():
        raise StrategyError(
            f"the checkpoint's {name!r} has {old.numel()} values, not {fresh.numel()}: it is of another model"
        )
    context.state[name] = fresh if old is None else old.to(fresh).view_as(fresh)
    return context.state[name]


def counter(context: LearnerContext, name: str) -> Tensor:
    """A number of the program's state, to be changed in place; 0 at the beginning."""
    return kept(context, name, torch.zeros((), dtype=torch.float64))


def perform(op: Op) -> Generator[Request, Any, Any]:
    """Begin a communication and wait for it: `outcome = yield from perform(op)`."""
    ticket = yield Start(op)
    return (yield Wait(ticket))


def weight_of(work: Work | None) -> float:
    """A learner without work takes part in collectives with a weight of 0."""
    return work.weight if work is not None else 0.0


def reduce(
    context: LearnerContext, vector: Tensor, weight: float, scope: Literal["all", "node"] = "all"
) -> Generator[Request, Any, Reduced]:
    """All-reduce a vector as large as the weights; alone, nothing is sent."""
    if (context.size if scope == "all" else context.node_size) == 1:
        return Reduced(vector, weight)
    reduced: Reduced = yield from perform(AllReduce(vector, weight, context.num_bytes, scope))
    return reduced


def average_all(context: LearnerContext) -> Program:
    """The end of a decentralized training: all learners take their mean (arXiv:2110.11199)."""
    if context.size == 1:
        return
    op = AllReduce(context.replica.weights.clone(), 1.0, context.num_bytes, channel="end")
    mean: Reduced = yield from perform(op)
    with torch.no_grad():
        context.replica.weights.copy_(mean.vector)
