"""Methods whose learners keep step: all-reduce, synchronous gossip, the all-reduce that overlaps with a gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.strategies.base import (
    AllReduce,
    Compute,
    Mix,
    Program,
    Reduced,
    Seat,
    Start,
    Ticket,
    Wait,
    average_all,
    perform,
    reduce,
    weight_of,
)
from training.strategies.config import SdpsgdConfig, StrategyConfig


def scpsgd(seat: Seat, cfg: StrategyConfig) -> Program:
    """Synchronous centralized parallel SGD: one all-reduce of the gradients a step.

        g_i = grad(W; batch_i);  W -= lr · mean_i(g_i)

    (arXiv:1904.04956 averages the weights after a local step instead, which is the same for plain SGD; gradients keep
    every optimizer's state equal.) The mean weighs batches by their size, so N learners equal one with the whole batch.

    Synchronizes gradients. Sends 2(N-1)/N of the model a step (ring all-reduce). Staleness 0. All wait for the slowest;
    a dead learner stops all until it is known to be dead, then the others go on.
    """
    replica = seat.replica
    while True:
        work = yield Compute()
        mean = yield from reduce(seat, replica.grads, weight_of(work))
        if mean.weight == 0:
            return
        apply(seat, mean.vector)
        seat.stale(0)


def apply(seat: Seat, grads: Tensor) -> None:
    """An optimizer step with given gradients."""
    with torch.no_grad():
        if grads is not seat.replica.grads:
            seat.replica.grads.copy_(grads)
    seat.replica.update()


def sdpsgd(seat: Seat, cfg: SdpsgdConfig) -> Program:
    """Synchronous decentralized parallel SGD: mean with both neighbours at every step, who wait for each other.

        W_i = Σ_j T_ij W_j;  W_i -= lr · grad(W_i; batch_i)

    T holds 1/3 for oneself and either neighbour on the ring (arXiv:1904.04956). The gradient is taken after the mean,
    so that the complete graph is `scpsgd` with plain SGD, exactly; the mean is not hidden behind it.

    Synchronizes weights with two neighbours. Sends the model twice a step, whatever N is. Staleness 0. A slow learner
    holds up its neighbours, these theirs, and in the end everybody; a dead one likewise until the ring closes.
    """
    replica = seat.replica
    while True:
        if seat.size > 1:
            mixed: Tensor = yield from perform(Mix(replica.weights.clone(), cfg.graph, seat.num_bytes))
            with torch.no_grad():
                replica.weights.copy_(mixed)
        if (yield Compute()) is None:
            break
        replica.update()
        seat.stale(0)
    if seat.size > 1:
        yield from perform(Mix(replica.weights.clone(), cfg.graph, seat.num_bytes, last=True))
    yield from average_all(seat)


@dataclass
class _Underway:
    """An all-reduce that runs while the next gradient is computed."""

    ticket: Ticket
    step: int


def d1d(seat: Seat, cfg: StrategyConfig) -> Program:
    """Synchronous SGD whose all-reduce overlaps with the next gradient ("delay by one"; HYBRID in arXiv:1904.04956).

        W_{k+1} = W_k - lr · mean_i(g_i(W_{k-1})), while g_i(W_k) is computed     (arXiv:2110.11199)

    A learner that trains alone has nothing to overlap with, and is plain SGD.

    Synchronizes gradients. Sends 2(N-1)/N of the model a step, hidden as far as a gradient takes as long. Staleness 1,
    always. All wait for the slowest, as in `scpsgd`.
    """
    if seat.size == 1:
        yield from scpsgd(seat, cfg)
        return
    replica, step, underway = seat.replica, 0, None
    while True:
        work = yield Compute()
        step += 1
        fresh = replica.grads.clone()
        if underway is not None:
            mean: Reduced = yield Wait(underway.ticket)
            if mean.weight == 0:
                return
            seat.stale(step - underway.step)
            apply(seat, mean.vector)
        op = AllReduce(fresh, weight_of(work), seat.num_bytes)
        underway = _Underway((yield Start(op)), step)
