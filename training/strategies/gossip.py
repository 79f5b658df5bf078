"""Asynchronous decentralized SGD: nobody waits, everybody averages with neighbours while the gradient is computed."""

import torch
from torch import Tensor

from training.exchange.base import Exchange
from training.strategies.base import (
    AllReduce,
    Compute,
    Idle,
    Program,
    Reduced,
    Seat,
    Start,
    average_all,
    perform,
    reduce,
    weight_of,
)
from training.strategies.synchronous import apply
from training.strategy_config import GossipConfig

_EMPTY = torch.zeros(0)


def adpsgd(seat: Seat, cfg: GossipConfig) -> Program:
    """Asynchronous decentralized parallel SGD (AD-PSGD, arXiv:1710.06952, 1904.04956).

        g = grad(W_i), while W_i <- (W_i + W_j) / 2 with a neighbour j;  W_i -= lr · g

    The averaging adds half the difference of two snapshots to the live weights, which loses no gradient step and
    conserves the sum over learners. Neighbours: the fixed ring, alternating left and right, or a shared-seed random
    ring for every exchange, which is advised beyond 16 learners (arXiv:2112.01433). At the end all take the mean.

    Synchronizes weights with one neighbour. Sends the model twice a step (asking, and answering), whatever N is, while
    the gradient is computed. Staleness: the steps from a snapshot to the one that adds what it brought, at least 1. A
    slow learner trains less and holds up nobody; a dead one costs its neighbours one time-out.
    """
    yield from h_adpsgd(seat, cfg)


def h_adpsgd(seat: Seat, cfg: GossipConfig) -> Program:
    """Hierarchical AD-PSGD (arXiv:1907.05701): a node's learners are one super-learner, super-learners run AD-PSGD.

        g = mean over the node of grad(W_node);  W_node <- (W_node + W_other) / 2 meanwhile;  W_node -= lr · g

    L learners in nodes of N converge as L/N learners do. With one node this is `scpsgd`; with nodes of one, `adpsgd`.
    Here, the first learner of a node exchanges for it and hands on what the exchange has brought; the training engine's
    learners each exchange their share of the weights, and gather the shares. What a machine's link carries is the same.

    Synchronizes gradients within a node, weights between nodes. Sends the model twice a step and node over the network;
    within the node, a learner sends 2(N-1)/N of it for the gradients and half as much for the averages. Staleness as
    `adpsgd`. A slow learner slows its node only; a dead one takes its node with it.
    """
    replica, exchange, step = seat.replica, seat.exchange, 0
    if exchange is not None:
        exchange.start(replica.weights, step)
    while True:
        work = yield Compute()
        mean = yield from reduce(seat, replica.grads, weight_of(work), "node")
        if mean.weight == 0 and work is None:
            break
        yield from _average(seat)
        if mean.weight:
            apply(seat, mean.vector)
        step += 1
        if exchange is not None:
            exchange.give(replica.weights, step)
            exchange.tick(step)
    yield from _end(seat, step)


def _average(seat: Seat) -> Program:
    """Add what the node's exchange has brought to the weights of all its learners."""
    weights, exchange = seat.replica.weights, seat.exchange
    if seat.nodes == 1:
        return
    if seat.node_size == 1:
        if exchange is not None and exchange.ready():
            _take(seat, exchange)
        return
    delta, leads = torch.zeros_like(weights), seat.node_rank == 0
    if exchange is not None and exchange.ready():
        delta = exchange.take().clone()
        _release(seat, exchange)
    # the engine gathers shares of it, which is half of an all-reduce
    op = AllReduce(delta, float(leads), seat.num_bytes / 2, "node", "averaging")
    brought: Reduced = yield from perform(op)
    with torch.no_grad():
        weights.add_(brought.vector)


def _take(seat: Seat, exchange: Exchange) -> None:
    with torch.no_grad():
        delta: Tensor = exchange.take()
        seat.replica.weights.add_(delta)
    _release(seat, exchange)


def _release(seat: Seat, exchange: Exchange) -> None:
    seat.stale(exchange.stats().staleness)
    exchange.release()


def _end(seat: Seat, step: int) -> Program:
    """Let every exchange in flight end on both sides, then take the mean of all learners."""
    if seat.nodes == 1:
        return
    yield from _linger(seat, "over", step)  # from here on, nobody begins an exchange any more
    exchange = seat.exchange
    while exchange is not None and _in_flight(exchange):
        yield Idle()
        _settle(seat, exchange, step)
    yield from _linger(seat, "settled", step)
    if exchange is not None:
        _settle(seat, exchange, step)
    if seat.node_size > 1:  # the node's other learners have not seen what the last exchanges brought
        op = AllReduce(seat.replica.weights.clone(), float(seat.node_rank == 0), seat.num_bytes, "node")
        mean: Reduced = yield from perform(op)
        with torch.no_grad():
            seat.replica.weights.copy_(mean.vector)
    yield from average_all(seat)


def _linger(seat: Seat, channel: str, step: int) -> Program:
    """Wait for everybody, and go on averaging meanwhile."""
    exchange = seat.exchange
    ticket = yield Start(AllReduce(_EMPTY, 1.0, 0.0, channel=channel))
    while not ticket.done:
        yield Idle()
        if exchange is not None:
            _settle(seat, exchange, step)


def _settle(seat: Seat, exchange: Exchange, step: int) -> None:
    while exchange.ready():
        _take(seat, exchange)
        exchange.give(seat.replica.weights, step)


def _in_flight(exchange: Exchange) -> bool:
    stats = exchange.stats()
    return exchange.ready() or stats.initiated > stats.finished + stats.failed
