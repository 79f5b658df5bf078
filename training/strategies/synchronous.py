"""Methods whose learners keep step: all-reduce, synchronous gossip, the all-reduce that overlaps with a gradient."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from training.strategies.base import Seat, average_all, counter, kept, perform, weight_of
from training.strategies.requests import AllReduce, Compute, Mix, Program, Reduced, Start, Ticket, Wait
from training.strategy_config import SdpsgdConfig, StrategyConfig


def scpsgd(seat: Seat, cfg: StrategyConfig) -> Program:
    """Synchronous centralized parallel SGD: one all-reduce of the gradients a step.

        g_i = grad(W; batch_i);  W -= lr · mean_i(g_i)

    (arXiv:1904.04956 averages the weights after a local step instead, which is the same for plain SGD; gradients keep
    every optimizer's state equal.) The mean weighs batches by their size, so N learners equal one with the whole batch.

    Synchronizes gradients. Sends 2(N-1)/N of the model a step (ring all-reduce). Staleness 0. All wait for the slowest;
    a dead learner stops all until it is known to be dead, then the others go on.
    """
    while (work := (yield Compute(reduce="all"))) is not None:
        if work.weight:
            seat.replica.update()
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

    Synchronizes weights with two neighbours. Sends the model twice a step, for any N. Staleness 0. A slow learner
    delays its neighbours, these theirs, and in the end all; a dead one likewise until the ring closes.
    """
    replica, mixed = seat.replica, counter(seat, "mixed")
    while True:
        if seat.size > 1 and not mixed:
            mean: Tensor = yield from perform(Mix(replica.weights.clone(), cfg.graph, seat.num_bytes))
            with torch.no_grad():
                replica.weights.copy_(mean)
            mixed.fill_(1)
        work = yield Compute()
        if work is None:
            break
        if work.weight:
            replica.update()
            seat.stale(0)
        mixed.zero_()
    if seat.size > 1:
        yield from perform(Mix(replica.weights.clone(), cfg.graph, seat.num_bytes, last=True))
    yield from average_all(seat)


@dataclass
class _Underway:
    """An all-reduce that runs while the next gradient is computed.

    Attributes:
        ticket: Its own; done already if a checkpoint has brought its outcome.
        step: Whose gradients it is about; those of a checkpoint are of the step before the first.
        over: Whether this learner had no more work for it.
    """

    ticket: Ticket
    step: int = 0
    over: bool = False


def d1d(seat: Seat, cfg: StrategyConfig) -> Program:
    """Synchronous SGD whose all-reduce overlaps with the next gradient ("delay by one"; HYBRID in arXiv:1904.04956).

        W_{k+1} = W_k - lr · mean_i(g_i(W_{k-1})), while g_i(W_k) is computed     (arXiv:2110.11199)

    A learner that trains alone has nothing to overlap with, and is plain SGD. For a checkpoint, `Seat.settle` waits for
    the mean gradient under way, which is part of the state; without it, training goes on one gradient short.

    Synchronizes gradients. Sends 2(N-1)/N of the model a step, hidden as far as a gradient takes as long. Staleness 1,
    always. All wait for the slowest; a dead learner stops all until it is known to be dead, as in `scpsgd`.
    """
    if seat.size == 1:
        yield from scpsgd(seat, cfg)
        return
    replica, step, underway = seat.replica, 0, _resumed(seat)
    while True:
        work = yield Compute()
        step += 1
        fresh = replica.grads.clone()
        if underway is not None:
            mean: Reduced = yield Wait(underway.ticket)
            seat.state.clear()  # it is in the weights now
            if mean.weight:
                seat.stale(step - underway.step)
                apply(seat, mean.vector)
            elif underway.over:
                return
        op = AllReduce(fresh, weight_of(work), seat.num_bytes)
        underway = _Underway((yield Start(op)), step, work is None)
        seat.settle = partial(_keep, seat, underway.ticket)


def _keep(seat: Seat, ticket: Ticket) -> Program:
    """The mean gradient under way becomes part of the state."""
    mean: Reduced = yield Wait(ticket)
    seat.state["late"] = mean.vector.clone()
    seat.state["late_weight"] = torch.tensor(mean.weight, dtype=torch.float64)


def _resumed(seat: Seat) -> _Underway | None:
    """The mean gradient that was under way when the state was kept."""
    if "late" not in seat.state:
        return None
    vector = kept(seat, "late", torch.zeros_like(seat.replica.grads))
    mean = Reduced(vector, float(counter(seat, "late_weight")))
    ticket = Ticket(AllReduce(vector), done=True, outcome=mean)
    seat.settle = partial(_keep, seat, ticket)
    return _Underway(ticket)
