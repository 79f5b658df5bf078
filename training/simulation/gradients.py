"""Expands a program's `Compute` into requests to the virtual network, which average gradients and weights.

What a learner does with its exchange at a step stands once (`Exchange.offer`, `Exchange.taken`). Around it, engine and
simulator differ for three reasons. Requests, because these stand for what no program asks for: `Gather` and `Idle` are
the simulator's own. Cost: the engine sends gradients bucket by bucket during the backward pass, and each learner of a
node exchanges its share of the weights; here, gradients are all-reduced when they are complete, and the first learner
of a node exchanges for it, with the same traffic on a machine's link. The end: the engine's learners go on exchanging
until the coordinator ends the training with the mean of their checkpoints; a simulation ends by itself, so that its
learners have to wait until no exchange is in flight.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.exchange.base import Exchange
from training.strategies.base import LearnerContext, average_all, perform, reduce, weight_of
from training.strategies.requests import AllReduce, Codec, Compute, Op, Program, Reduced, Request, Start, Work

_EMPTY = torch.zeros(0)


@dataclass(frozen=True)
class Gather(Op):
    """All-gather of the learners' payloads, which the engine's codecs do while gradients are still being computed.

    Outcome: the result of `combine`.

    Attributes:
        payload: Tensors of this learner.
        combine: Computes the outcome from all payloads, in rank order. Learners of one process may share the outcome,
            which is the same for all: it must not be changed.
        num_bytes: Size of the payload on the wire.
    """

    payload: tuple[Tensor, ...]
    combine: Callable[[list[tuple[Tensor, ...]]], Any]
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Idle:
    """Wait for this learner's next event: a finished ticket, or a result of its exchange."""


VirtualProgram = Generator[Request | Idle, Any, None]
"""What the simulator runs of a learner: its program, and the averaging that the engine does for it."""


def spelled_out(context: LearnerContext, program: Program) -> VirtualProgram:
    """Rewrite a program so that each `Compute` requests the learner's own gradient only, followed by explicit requests.

    At the end of a method that averages weights, all learners take their mean.

    Args:
        context: The learner's context.
        program: The method's program for it.
    """
    step, averages, answer = 0, False, None
    while True:
        try:
            request = program.send(answer)
        except StopIteration:
            break
        if not isinstance(request, Compute):
            answer = yield request
            continue
        if context.exchange is not None:
            _offer(context, context.exchange, step, request.average)
        averages, step = averages or request.average, step + 1
        answer = yield request
        if request.reduce != "own":
            answer = yield from _reduced(context, answer, request)
        if request.average and answer is not None:
            yield from _averaged(context)
    if averages:
        yield from _end(context, step - 1)


def _offer(context: LearnerContext, exchange: Exchange, step: int, average: bool) -> None:
    """Offer the weights after a step to the exchange, or start it with them."""
    if step:
        exchange.offer(context.replica.weights, step, average=average)
    else:
        exchange.start(context.replica.weights, step)


def _reduced(context: LearnerContext, work: Work | None, request: Compute) -> Generator[Request, Any, Work | None]:
    """Average gradients; returns the sum of the weights, or None if no learner has any work left."""
    assert request.reduce != "own"
    grads, codec = context.replica.grads, request.codec
    if codec is None or codec.warm:
        mean = yield from reduce(context, grads, weight_of(work), request.reduce)
    else:
        mean = yield from _gathered(context, codec, weight_of(work))
    if codec is not None:
        codec.next_step()
    if not mean.weight:
        return None if work is None else Work(0.0)
    if mean.vector is not grads:
        with torch.no_grad():
            grads.copy_(mean.vector)
    return Work(mean.weight)


class _WholeBuffer:
    """A `Bucket` of all gradients of a replica."""

    def __init__(self, grads: Tensor) -> None:
        self._grads = grads

    def index(self) -> int:
        """Position among a step's buckets; this is the only one."""
        return 0

    def is_last(self) -> bool:
        """Whether this is the last bucket of the step."""
        return True

    def buffer(self) -> Tensor:
        """All gradients [values]."""
        return self._grads

    def parameters(self) -> list[Tensor]:
        """A single tensor that stands for all parameters."""
        return [self._grads]


def _gathered(context: LearnerContext, codec: Codec, weight: float) -> Generator[Request, Any, Reduced]:
    """Weighted mean of all decoded messages, and the sum of the weights."""
    encoder = codec.bucket(_WholeBuffer(context.replica.grads))
    message = encoder.encode(context.replica.grads) if weight else encoder.blank()

    def combine(payloads: list[tuple[Tensor, ...]]) -> Reduced:
        weights = [float(payload[-1]) for payload in payloads]
        return Reduced(encoder.mean([payload[:-1] for payload in payloads], weights), sum(weights))

    op = Gather((*message, torch.tensor(weight)), combine, codec.wire_bytes(context.num_bytes))
    mean: Reduced = yield from perform(op)
    return mean


def _averaged(context: LearnerContext) -> Program:
    """Add the result of the node's exchange to the weights of all its learners."""
    weights, exchange = context.replica.weights, context.exchange
    if context.nodes == 1:
        return
    if context.node_size == 1:
        if exchange is not None and exchange.ready():
            _add(context, exchange, weights)
        return
    delta, leads = torch.zeros_like(weights), context.node_rank == 0
    if exchange is not None and exchange.ready():
        _add(context, exchange, delta)
    # the engine all-gathers shares of the delta, which costs half as much as an all-reduce
    op = AllReduce(delta, float(leads), context.num_bytes / 2, "node", "averaging")
    brought: Reduced = yield from perform(op)
    with torch.no_grad():
        weights.add_(brought.vector)


def _add(context: LearnerContext, exchange: Exchange, target: Tensor) -> None:
    with torch.no_grad(), exchange.taken() as delta:
        target.add_(delta)
        context.stale(exchange.stats().staleness)


def _end(context: LearnerContext, step: int) -> VirtualProgram:
    """Finish all exchanges in flight on both sides, then take the mean of all learners."""
    if context.nodes == 1:
        return
    yield from _linger(context, "over", step)  # no further exchange starts after this
    exchange = context.exchange
    while exchange is not None and _in_flight(exchange):
        yield Idle()
        _settle(context, exchange, step)
    yield from _linger(context, "settled", step)
    if exchange is not None:
        _settle(context, exchange, step)
    if context.node_size > 1:  # the node's other learners do not have the results of the last exchanges
        op = AllReduce(context.replica.weights.clone(), float(context.node_rank == 0), context.num_bytes, "node")
        mean: Reduced = yield from perform(op)
        with torch.no_grad():
            context.replica.weights.copy_(mean.vector)
    yield from average_all(context)


def _linger(context: LearnerContext, channel: str, step: int) -> VirtualProgram:
    """Wait for all learners, and apply the results of exchanges meanwhile."""
    exchange = context.exchange
    ticket = yield Start(AllReduce(_EMPTY, 1.0, 0.0, channel=channel))
    while not ticket.done:
        yield Idle()
        if exchange is not None:
            _settle(context, exchange, step)


def _settle(context: LearnerContext, exchange: Exchange, step: int) -> None:
    while exchange.ready():
        _add(context, exchange, context.replica.weights)
        exchange.give(context.replica.weights, step)


def _in_flight(exchange: Exchange) -> bool:
    stats = exchange.stats()
    return exchange.ready() or stats.initiated > stats.finished + stats.failed
