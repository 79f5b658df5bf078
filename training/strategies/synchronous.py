"""Synchronous methods: all-reduce, synchronous gossip, and an all-reduce that overlaps with the next gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from configurable.lazy import torch
from training.strategies.base import LearnerContext, average_all, counter, kept, perform, weight_of
from training.strategies.requests import AllReduce, Compute, Mix, Program, Reduced, Start, Ticket, Wait
from training.strategies.strategy import ALL_STOP, ALL_WAIT, Facts, Method, StrategyConfig, Traits, ring_bytes

if TYPE_CHECKING:
    from torch import Tensor


class SingleConfig(StrategyConfig):
    """One learner alone."""

    kind: Literal["single"] = "single"
    traits: ClassVar[Traits] = Traits(one_node=True, one_learner=True)


class ScpsgdConfig(StrategyConfig):
    """Synchronous centralized SGD: gradients are all-reduced."""

    kind: Literal["scpsgd"] = "scpsgd"
    traits: ClassVar[Traits] = Traits(one_node=True, buckets=True)


class SdpsgdConfig(StrategyConfig):
    """Synchronous decentralized SGD."""

    kind: Literal["sdpsgd"] = "sdpsgd"
    traits: ClassVar[Traits] = Traits(one_node=True, decentralized=True)
    graph: Literal["ring", "complete"] = "ring"
    """Learners that each one averages with at every step: both neighbours, or all."""


class D1dConfig(StrategyConfig):
    """Synchronous SGD whose all-reduce overlaps with the next gradient."""

    kind: Literal["d1d"] = "d1d"
    traits: ClassVar[Traits] = Traits(one_node=True)


def scpsgd(context: LearnerContext, cfg: StrategyConfig) -> Program:
    """Synchronous centralized parallel SGD: one all-reduce of the gradients per step.

        g_i = grad(W; batch_i);  W -= lr · mean_i(g_i)

    (arXiv:1904.04956 averages the weights after a local step instead, which is the same for plain SGD; averaged
    gradients keep the optimizers' states equal, too.) The mean weights batches by their size, so N learners are
    equivalent to one with the whole batch.
    """
    while (work := (yield Compute(reduce="all"))) is not None:
        if work.weight:
            context.replica.update()
            context.stale(0)


def apply(context: LearnerContext, grads: Tensor) -> None:
    """Make an optimizer step with given gradients."""
    with torch.no_grad():
        if grads is not context.replica.grads:
            context.replica.grads.copy_(grads)
    context.replica.update()


def sdpsgd(context: LearnerContext, cfg: SdpsgdConfig) -> Program:
    """Synchronous decentralized parallel SGD: every step averages weights with both neighbours.

        W_i = Σ_j T_ij W_j;  W_i -= lr · grad(W_i; batch_i)

    T is 1/3 for a learner and each of its neighbours on the ring (arXiv:1904.04956). The gradient is computed after the
    averaging, so the complete graph with plain SGD is exactly `scpsgd`; the averaging does not overlap with it.
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
        ticket: Its ticket; already done if the outcome comes from a checkpoint.
        step: Step of its gradients; 0, the step before the first, if they come from a checkpoint.
        over: Whether this learner had no more work for it.
    """

    ticket: Ticket
    step: int = 0
    over: bool = False


def d1d(context: LearnerContext, cfg: StrategyConfig) -> Program:
    """Synchronous SGD whose all-reduce overlaps with the next gradient ("delay by one"; HYBRID in arXiv:1904.04956).

        W_{k+1} = W_k - lr · mean_i(g_i(W_{k-1})), while g_i(W_k) is computed     (arXiv:2110.11199)

    With a single learner this is plain SGD. For a checkpoint, `LearnerContext.settle` waits for the pending mean
    gradient, which is part of the state; without it, a resumed training would miss one gradient.
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
            context.state.clear()  # the pending gradient is applied now
            if mean.weight:
                context.stale(step - underway.step)
                apply(context, mean.vector)
            elif underway.over:
                return
        op = AllReduce(fresh, weight_of(work), context.num_bytes)
        underway = _Underway((yield Start(op)), step, work is None)
        context.settle = partial(_keep, context, underway.ticket)


def _keep(context: LearnerContext, ticket: Ticket) -> Program:
    """Wait for the pending mean gradient, and add it to the state."""
    mean: Reduced = yield Wait(ticket)
    context.state["late"] = mean.vector.clone()
    context.state["late_weight"] = torch.tensor(mean.weight, dtype=torch.float64)


def _resumed(context: LearnerContext) -> _Underway | None:
    """The mean gradient that was pending when the state was saved."""
    if "late" not in context.state:
        return None
    vector = kept(context, "late", torch.zeros_like(context.replica.grads))
    mean = Reduced(vector, float(counter(context, "late_weight")))
    ticket = Ticket(AllReduce(vector), done=True, outcome=mean)
    context.settle = partial(_keep, context, ticket)
    return _Underway(ticket)


def _mixed_bytes(learners: int, size: float, cfg: SdpsgdConfig) -> float:
    return min(2, learners - 1) * size if cfg.graph == "ring" else ring_bytes(learners, size)


SCPSGD = Method(
    "scpsgd",
    ScpsgdConfig,
    Facts(
        "gradients, with all learners",
        lambda n, size, _: ring_bytes(n, size),
        "0",
        ALL_WAIT,
        ALL_STOP,
        sent_text="2(N−1)/N · M",
        advice=lambda _: "the all-reduce costs next to nothing here, and synchronous SGD has no staleness",
    ),
    program=scpsgd,
    equal=True,
    state_per_rank=False,
    join_point="after update",
)
SDPSGD = Method(
    "sdpsgd",
    SdpsgdConfig,
    Facts(
        "weights, with two neighbours",
        _mixed_bytes,
        "0",
        "delays its neighbours and, through them, eventually all learners",
        ALL_STOP,
        sent_text="2 M (complete graph: 2(N−1)/N · M)",
    ),
    program=sdpsgd,
    join_point="during compute",
)
D1D = Method(
    "d1d",
    D1dConfig,
    Facts(
        "gradients, with all learners",
        lambda n, size, _: ring_bytes(n, size),
        "1",
        ALL_WAIT,
        ALL_STOP,
        sent_text="2(N−1)/N · M, overlapped with the gradient",
        advice=lambda _: (
            "learners are evenly fast and the all-reduce hides behind the gradient: all weights stay equal"
        ),
    ),
    program=d1d,
    join_point="before update",
)
