"""Methods whose learners keep step: all-reduce, synchronous gossip, the all-reduce that overlaps with a gradient."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from training.strategies.base import LearnerContext, average_all, counter, kept, perform, weight_of
from training.strategies.config import SdpsgdConfig, StrategyConfig
from training.strategies.requests import AllReduce, Compute, Mix, Program, Reduced, Start, Ticket, Wait


def scpsgd(context: LearnerContext, cfg: StrategyConfig) -> Program:
    """Synchronous centralized parallel SGD: one all-reduce of the gradients a step.

        g_i = grad(W; batch_i);  W -= lr · mean_i(g_i)

    (arXiv:1904.04956 averages the weights after a local step instead, which is the same for plain SGD; gradients keep
    every optimizer's state equal.) The mean weighs batches by their size, so N learners equal one with the whole batch.

    Synchronizes gradients. Sends 2(N-1)/N of the model a step (ring all-reduce). Staleness 0. All wait for the slowest;
    a dead learner stops all until it is known to be dead, then the others go on.
    """
    while (work := (yield Compute(reduce="all"))) is not None:
        if work.weight:
            context.replica.update()
            context.stale(0)


def apply(context: LearnerContext, grads: Tensor) -> None:
    """An optimizer step with given gradients."""
    with torch.no_grad():
        if grads is not context.replica.grads:
            context.replica.grads.copy_(grads)
    context.replica.update()


def sdpsgd(context: LearnerContext, cfg: SdpsgdConfig) -> Program:
    """Synchronous decentralized parallel SGD: mean with both neighbours at every step, who wait for each other.

        W_i = Σ_j T_ij W_j;  W_i -= lr · grad(W_i; batch_i)

    T holds 1/3 for oneself and either neighbour on the ring (arXiv:1904.04956). The gradient is taken after the mean,
    so that the complete graph is `scpsgd` with plain SGD, exactly; the mean is not hidden behind it.

    Synchronizes weights with two neighbours. Sends the model twice a step, for any N. Staleness 0. A slow learner
    delays its neighbours, these theirs, and in the end all; a dead one likewise until the ring closes.
    """
    replica, mixed = context.replica, counter(context, "mixed")
    while True:
        if context.size > 1 and not mixed:
            mean: Tensor = yield from perform(Mix(replica.weights.clone(), cfg.graph, context.num_bytes))
            with torch.no_grad():
                replica.weights.copy_(mean)
            mixed.fill_(1)
        work = yield Compute()
        if work is None:
            break
        if work.weight:
            replica.update()
            context.stale(0)
        mixed.zero_()
    if context.size > 1:
        yield from perform(Mix(replica.weights.clone(), cfg.graph, context.num_bytes, last=True))
    yield from average_all(context)


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


def d1d(context: LearnerContext, cfg: StrategyConfig) -> Program:
    """Synchronous SGD whose all-reduce overlaps with the next gradient ("delay by one"; HYBRID in arXiv:1904.04956).

        W_{k+1} = W_k - lr · mean_i(g_i(W_{k-1})), while g_i(W_k) is computed     (arXiv:2110.11199)

    A learner that trains alone has nothing to overlap with, and is plain SGD. For a checkpoint, `LearnerContext.settle`
    waits for the mean gradient under way, which is part of the state; without it, training goes on one gradient short.

    Synchronizes gradients. Sends 2(N-1)/N of the model a step, hidden as far as a gradient takes as long. Staleness 1,
    always. All wait for the slowest; a dead learner stops all until it is known to be dead, as in `scpsgd`.
    """
    if context.size == 1:
        yield from scpsgd(context, cfg)
        return
    replica, step, underway = context.replica, 0, _resumed(context)
    while True:
        work = yield Compute()
        step += 1
        fresh = replica.grads.clone()
        if underway is not None:
            mean: Reduced = yield Wait(underway.ticket)
            context.state.clear()  # it is in the weights now
            if mean.weight:
                context.stale(step - underway.step)
                apply(context, mean.vector)
            elif underway.over:
                return
        op = AllReduce(fresh, weight_of(work), context.num_bytes)
        underway = _Underway((yield Start(op)), step, work is None)
        context.settle = partial(_keep, context, underway.ticket)


def _keep(context: LearnerContext, ticket: Ticket) -> Program:
    """The mean gradient under way becomes part of the state."""
    mean: Reduced = yield Wait(ticket)
    context.state["late"] = mean.vector.clone()
    context.state["late_weight"] = torch.tensor(mean.weight, dtype=torch.float64)


def _resumed(context: LearnerContext) -> _Underway | None:
    """The mean gradient that was under way when the state was kept."""
    if "late" not in context.state:
        return None
    vector = kept(context, "late", torch.zeros_like(context.replica.grads))
    mean = Reduced(vector, float(counter(context, "late_weight")))
    ticket = Ticket(AllReduce(vector), done=True, outcome=mean)
    context.settle = partial(_keep, context, ticket)
    return _Underway(ticket)
