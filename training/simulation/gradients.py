"""What comes with a gradient (`Compute`) in terms of the virtual network: averaged gradients, averaged weights.

The training engine sends gradients bucket by bucket during the backward pass, and each learner of a node exchanges its
share of the weights. Here, gradients are all-reduced when they are complete, and the first learner of a node exchanges
for it; what a machine's link carries is the same.
"""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from training.exchange.base import Exchange
from training.strategies.base import LearnerContext, average_all, perform, reduce, weight_of
from training.strategies.requests import AllReduce, Codec, Compute, Gather, Idle, Program, Reduced, Request, Start, Work

_EMPTY = torch.zeros(0)


def spelled_out(context: LearnerContext, program: Program) -> Program:
    """A program whose `Compute` asks for this learner's own gradient only; all else is requests of its own.

    At the end of a method that averages weights, all learners take their mean.

    Args:
        context: The learner's.
        program: What a method has it do.
    """
    steps, averages, answer = 0, False, None
    while True:
        try:
            request = program.send(answer)
        except StopIteration:
            break
        if not isinstance(request, Compute):
            answer = yield request
            continue
        if request.average:
            _offer(context, steps, first=not averages)
            averages, steps = True, steps + 1
        answer = yield request
        if request.reduce != "own":
            answer = yield from _reduced(context, answer, request)
        if request.average and answer is not None:
            yield from _averaged(context)
    if averages:
        yield from _end(context, steps - 1)


def _offer(context: LearnerContext, step: int, first: bool) -> None:
    """Give the weights after a number of steps to the exchange."""
    if context.exchange is None:
        return
    if first:
        context.exchange.start(context.replica.weights, step)
    else:
        context.exchange.give(context.replica.weights, step)
        context.exchange.tick(step)


def _reduced(context: LearnerContext, work: Work | None, request: Compute) -> Generator[Request, Any, Work | None]:
    """Average gradients; the sum of the weights, or None if no learner had any work left."""
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
    """All gradients of a replica in one bucket; see `Bucket`."""

    def __init__(self, grads: Tensor) -> None:
        self._grads = grads

    def index(self) -> int:
        """The first."""
        return 0

    def is_last(self) -> bool:
        """The last, too."""
        return True

    def buffer(self) -> Tensor:
        """All gradients [values]."""
        return self._grads

    def parameters(self) -> list[Tensor]:
        """All parameters in one."""
        return [self._grads]


def _gathered(context: LearnerContext, codec: Codec, weight: float) -> Generator[Request, Any, Reduced]:
    """The weighted mean of what all messages stand for, and the weights' sum."""
    one = codec.bucket(_WholeBuffer(context.replica.grads))
    message = one.encode(context.replica.grads) if weight else one.blank()

    def combine(payloads: list[tuple[Tensor, ...]]) -> Reduced:
        weights = [float(payload[-1]) for payload in payloads]
        return Reduced(one.mean([payload[:-1] for payload in payloads], weights), sum(weights))

    op = Gather((*message, torch.tensor(weight)), combine, codec.wire_bytes(context.num_bytes))
    mean: Reduced = yield from perform(op)
    return mean


def _averaged(context: LearnerContext) -> Program:
    """Add what the node's exchange has brought to the weights of all its learners."""
    weights, exchange = context.replica.weights, context.exchange
    if context.nodes == 1:
        return
    if context.node_size == 1:
        if exchange is not None and exchange.ready():
            _take(context, exchange)
        return
    delta, leads = torch.zeros_like(weights), context.node_rank == 0
    if exchange is not None and exchange.ready():
        delta = exchange.take().clone()
        _release(context, exchange)
    # the engine gathers shares of it, which is half of an all-reduce
    op = AllReduce(delta, float(leads), context.num_bytes / 2, "node", "averaging")
    brought: Reduced = yield from perform(op)
    with torch.no_grad():
        weights.add_(brought.vector)


def _take(context: LearnerContext, exchange: Exchange) -> None:
    with torch.no_grad():
        delta: Tensor = exchange.take()
        context.replica.weights.add_(delta)
    _release(context, exchange)


def _release(context: LearnerContext, exchange: Exchange) -> None:
    context.stale(exchange.stats().staleness)
    exchange.release()


def _end(context: LearnerContext, step: int) -> Program:
    """Let every exchange in flight end on both sides, then take the mean of all learners."""
    if context.nodes == 1:
        return
    yield from _linger(context, "over", step)  # from here on, no exchange begins any more
    exchange = context.exchange
    while exchange is not None and _in_flight(exchange):
        yield Idle()
        _settle(context, exchange, step)
    yield from _linger(context, "settled", step)
    if exchange is not None:
        _settle(context, exchange, step)
    if context.node_size > 1:  # the node's other learners have not seen what the last exchanges brought
        op = AllReduce(context.replica.weights.clone(), float(context.node_rank == 0), context.num_bytes, "node")
        mean: Reduced = yield from perform(op)
        with torch.no_grad():
            context.replica.weights.copy_(mean.vector)
    yield from average_all(context)


def _linger(context: LearnerContext, channel: str, step: int) -> Program:
    """Wait for all learners, and go on averaging meanwhile."""
    exchange = context.exchange
    ticket = yield Start(AllReduce(_EMPTY, 1.0, 0.0, channel=channel))
    while not ticket.done:
        yield Idle()
        if exchange is not None:
            _settle(context, exchange, step)


def _settle(context: LearnerContext, exchange: Exchange, step: int) -> None:
    while exchange.ready():
        _take(context, exchange)
        exchange.give(context.replica.weights, step)


def _in_flight(exchange: Exchange) -> bool:
    stats = exchange.stats()
    return exchange.ready() or stats.initiated > stats.finished + stats.failed
