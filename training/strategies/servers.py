"""Methods with a parameter server: asynchronous SGD and elastic averaging."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from configurable.lazy import torch
from training.strategies.base import LearnerContext, counter, perform
from training.strategies.requests import AllReduce, Compute, Elastic, Program, Pull, Pulled, Push, Pushed
from training.strategies.strategy import NOBODY_WAITS, Facts, Method, StrategyConfig, Traits

_DEAD = "only its own work is lost; if a server process dies, all learners wait until it has restarted"


class AsgdConfig(StrategyConfig):
    """Asynchronous SGD with a parameter server."""

    kind: Literal["asgd"] = "asgd"
    traits: ClassVar[Traits] = Traits(one_learner=True, server=True, own_updates=False)
    servers: int = Field(default=1, ge=1)
    """Number of processes that the server is divided into, each with its own link."""


class EasgdConfig(StrategyConfig):
    """Elastic averaging SGD."""

    kind: Literal["easgd"] = "easgd"
    traits: ClassVar[Traits] = Traits(one_learner=True, server=True)
    tau: int = Field(default=4, ge=1)
    """Steps between two synchronizations with the center."""
    beta: float = Field(default=0.9, gt=0, le=1)
    """Elasticity over all learners: alpha of each is beta / N."""
    servers: int = Field(default=1, ge=1)
    """Number of processes that hold the center, each with its own link."""


def asgd(context: LearnerContext, cfg: AsgdConfig) -> Program:
    """Asynchronous SGD with a parameter server, sharded over processes (DistBelief: Dean et al. 2012).

        pull W;  g = grad(W);  push g: the server makes the step with its own optimizer

    Staleness counts the updates by others between pull and push, by version numbers; a slow learner's gradients are the
    stalest. The servers together carry the traffic of all learners, which is the bottleneck. A dead server costs the
    steps since it last saved.
    """
    replica, size = context.replica, context.num_bytes
    while True:
        pulled: Pulled = yield from perform(Pull(size))
        with torch.no_grad():
            replica.weights.copy_(pulled.vector)
        work = yield Compute()
        if work is None:
            break
        if work.weight:
            pushed: Pushed = yield from perform(Push(replica.grads, pulled.version, size))
            context.stale(pushed.staleness)
    yield from _take_the_servers(context)


def _take_the_servers(context: LearnerContext) -> Program:
    """Take the server's weights as the model, once all learners are done."""
    yield from perform(AllReduce(torch.zeros(0), 1.0, 0.0, channel="end"))
    pulled: Pulled = yield from perform(Pull(context.num_bytes))
    with torch.no_grad():
        context.replica.weights.copy_(pulled.vector)


def easgd(context: LearnerContext, cfg: EasgdConfig) -> Program:
    """Elastic averaging SGD (Zhang et al. 2015): learners and a center attract each other every tau steps.

        d = α (x_i - x̃);  x_i -= d;  x̃ += d;  and in between x_i -= lr · grad(x_i)

    α = beta / N. The trained model is the center x̃. A single learner has a center, too, which follows its own past.

    Staleness counts the steps since the last synchronization. The servers together carry the traffic of all learners. A
    dead server costs the synchronizations since it last saved.
    """
    replica, alpha = context.replica, cfg.beta / context.size
    resumed, apart = "steps_apart" in context.state, counter(context, "steps_apart")
    if context.joined and not resumed:
        pulled: Pulled = yield from perform(Pull(context.num_bytes))
        with torch.no_grad():
            replica.weights.copy_(pulled.vector)
    while (work := (yield Compute())) is not None:
        if work.weight:
            replica.update()
            context.stale(float(apart))
        apart += 1
        if apart >= cfg.tau:
            yield from _meet(context, alpha)
            apart.zero_()
    yield from _meet(context, alpha)
    yield from _take_the_servers(context)


def _meet(context: LearnerContext, alpha: float) -> Program:
    drawn = yield from perform(Elastic(context.replica.weights.clone(), alpha, context.num_bytes))
    with torch.no_grad():
        context.replica.weights.sub_(drawn)


ASGD = Method(
    "asgd",
    AsgdConfig,
    Facts(
        "gradients and weights, with the server",
        lambda n, size, _: size,
        "about N - 1",
        NOBODY_WAITS,
        _DEAD,
        sent_text="M up, M down",
    ),
    program=asgd,
)
EASGD = Method(
    "easgd",
    EasgdConfig,
    Facts(
        "weights, with the center on the server",
        lambda n, size, cfg: size / cfg.tau,
        "at most tau - 1",
        NOBODY_WAITS,
        _DEAD,
        sent_text="M up, M down, every τ steps",
    ),
    program=easgd,
)
