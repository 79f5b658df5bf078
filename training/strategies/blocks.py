"""Methods whose learners train independently for a block of steps and synchronize between blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from configurable.lazy import torch
from training.strategies.base import LearnerContext, counter, identity, kept, reduce, weight_of
from training.strategies.requests import Compute, Program
from training.strategies.strategy import (
    ALL_STOP,
    BLOCK_WAITS,
    Facts,
    Method,
    StrategyConfig,
    Traits,
    WarmConfig,
    ring_bytes,
)
from training.strategies.synchronous import apply

if TYPE_CHECKING:
    from torch import Tensor


class MaConfig(StrategyConfig):
    """Model averaging."""

    kind: Literal["ma"] = "ma"
    traits: ClassVar[Traits] = Traits(one_node=True)
    tau: int = Field(default=16, ge=1)
    """Steps of a block."""


class BmufConfig(WarmConfig):
    """Blockwise model-update filtering."""

    kind: Literal["bmuf"] = "bmuf"
    traits: ClassVar[Traits] = Traits(one_node=True)
    tau: int = Field(default=16, ge=1)
    """Steps of a block."""
    eta: float | None = Field(default=None, ge=0, lt=1)
    """Block momentum; empty means 1 - 1/N for N learners."""
    zeta: float = Field(default=1.0, gt=0)
    """Block learning rate."""
    block_start: Literal["nesterov", "classical"] = "nesterov"
    """Start of a block: the look-ahead point (nesterov), or the model (classical)."""
    momentum: Literal["auto", "keep", "reset"] = "auto"
    """What happens to the optimizer's momentum at the end of a block. If it is kept, it adds to the momentum over
    blocks and short blocks diverge (docs/strategies.md); `auto` resets it unless `eta` is 0."""


def ma(context: LearnerContext, cfg: MaConfig) -> Program:
    """Model averaging: train a block of tau steps, average the weights, repeat.

        W_i: tau steps of SGD from W;  W = mean_i(W_i)

    The mean weights learners by the work that they did in the block, so that with tau = 1 and plain SGD this is
    `scpsgd`. Each learner keeps its optimizer's state across blocks; it is not averaged.
    """
    block = LocalBlock(context, cfg.tau)
    while True:
        yield from block.train()
        mean = yield from reduce(context, context.replica.weights, float(block.weight))
        block.begin()
        if mean.weight:
            _set(context.replica.weights, mean.vector)
        elif block.over:
            return


class LocalBlock:
    """A block of independent training steps.

    Attributes:
        steps: Steps in this block so far; 0-dimensional, part of the context's state.
        weight: Weight of the work in this block so far.
        over: Whether there is no more work.
    """

    def __init__(self, context: LearnerContext, tau: int) -> None:
        self._context, self._tau = context, tau
        self.steps, self.weight = counter(context, "block_steps"), counter(context, "block_weight")
        self.over = False

    def begin(self) -> None:
        """Start the next block."""
        self.steps.zero_()
        self.weight.zero_()

    def train(self) -> Program:
        """Train to the end of the block."""
        while self.steps < self._tau:
            work = yield Compute()
            if work is None:
                self.over = True
                return
            if work.weight:
                self._context.replica.update()
                self._context.stale(0)
            self.weight += work.weight
            self.steps += 1


def _set(target: Tensor, value: Tensor) -> None:
    if value is not target:
        with torch.no_grad():
            target.copy_(value)


def bmuf(context: LearnerContext, cfg: BmufConfig) -> Program:
    """Blockwise model-update filtering: model averaging with a momentum over blocks (arXiv:1703.05880, 1904.10584).

        G = mean_i(W_i) - S;  Δ <- η Δ + ζ G;  W <- W + Δ
        the next block starts at S = W (classical), or at S = W + η Δ (nesterov)

    S is the start of the block, W the model. They are separate: with the look-ahead point S as the model, η Δ would be
    added twice at every block, and W would move (1 + η) times too far. The trained model is W; within a block,
    `LearnerContext.finish` returns what W would be if the block ended now. With η = 0 and ζ = 1 this is `ma`. The
    default of η is 1 - 1/N. If there is momentum over blocks, the optimizer's momentum is reset at every block: both
    together diverge at learning rates at which either alone is stable (`benchmarks/bmuf_stability.py`). The rest of its
    state is kept. Synchronous steps come first (`WarmConfig`), so that the first block starts from usable weights.
    """
    weights = context.replica.weights
    yield from _warm_up(context, cfg.warm_up(context.epoch_steps))
    filtered, block = _Filter(context, cfg), LocalBlock(context, cfg.tau)
    context.finish = lambda mean: filtered.after(mean)[1] if block.steps else filtered.model.clone()
    while True:
        yield from block.train()
        mean = yield from reduce(context, weights, float(block.weight))
        if mean.weight:
            filtered.end_block(mean.vector)
            _set(weights, filtered.start)
            if filtered.resets:
                context.replica.drop_momentum()
        block.begin()
        if not mean.weight and block.over:
            break
    _set(weights, filtered.model)
    context.finish = identity


class _Filter:
    """BMUF's state between blocks.

    Attributes:
        model: W.
        start: S, the start of the block.
        momentum: Δ.
        resets: Whether the optimizer's own momentum is reset at the end of a block.
    """

    def __init__(self, context: LearnerContext, cfg: BmufConfig) -> None:
        weights = context.replica.weights
        self._zeta, self._nesterov = cfg.zeta, cfg.block_start == "nesterov"
        self._eta = 1.0 - 1.0 / context.size if cfg.eta is None else cfg.eta
        self.resets = cfg.momentum == "reset" or (cfg.momentum == "auto" and self._eta > 0)
        self.model, self.start = kept(context, "model", weights.clone()), kept(context, "start", weights.clone())
        self.momentum = kept(context, "momentum", torch.zeros_like(weights))

    def after(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Δ and W after a block whose replicas have a given mean."""
        momentum = self._eta * self.momentum + self._zeta * (mean - self.start)
        return momentum, self.model + momentum

    def end_block(self, mean: Tensor) -> None:
        """Update the model with the filtered result of a block."""
        with torch.no_grad():
            momentum, model = self.after(mean)
            self.momentum.copy_(momentum)
            self.model.copy_(model)
            self.start.copy_(model + self._eta * momentum if self._nesterov else model)


def _warm_up(context: LearnerContext, steps: int) -> Program:
    """Make some steps of synchronous SGD."""
    done = counter(context, "warm_steps")
    while done < steps:
        work = yield Compute()
        mean = yield from reduce(context, context.replica.grads, weight_of(work))
        if mean.weight:
            apply(context, mean.vector)
            context.stale(0)
        elif work is None:
            return
        done += 1


_FACTS = Facts(
    "weights, with all learners, after each block",
    lambda n, size, cfg: ring_bytes(n, size) / cfg.tau,
    "0",
    BLOCK_WAITS,
    ALL_STOP,
    sent_text="2(N−1)/N · M / τ",
)
MA = Method("ma", MaConfig, _FACTS, program=ma, join_point="after update")
BMUF = Method("bmuf", BmufConfig, _FACTS, program=bmuf, join_point="after update")
