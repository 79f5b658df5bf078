"""Local SGD with random pairs: learners train independently for a block of steps, then average with one other."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from configurable.lazy import torch
from training.strategies.base import LearnerContext, average_all, counter, perform
from training.strategies.blocks import LocalBlock
from training.strategies.requests import Mix, Program
from training.strategies.strategy import ALL_STOP, Facts, Method, StrategyConfig, Traits

if TYPE_CHECKING:
    from torch import Tensor


class PairsConfig(StrategyConfig):
    """Local SGD with random pairs."""

    kind: Literal["pairs"] = "pairs"
    traits: ClassVar[Traits] = Traits(one_node=True, decentralized=True)
    tau: int = Field(default=4, ge=1)
    """Steps of a block."""


def pairs(context: LearnerContext, cfg: PairsConfig) -> Program:
    """Local SGD with random pairs: train a block of tau steps, average weights with a random learner, repeat.

        W_i: tau steps of SGD from W_i;  W_i, W_j <- (W_i + W_j) / 2 for the pairs (i, j) of the round

    Every round draws other pairs, the same at all learners; of an odd number, one stays alone. This is the synchronous
    form of SwarmSGD (arXiv:1910.12308). Each learner keeps its optimizer's state; it is not averaged. At the end all
    take the mean.
    """
    weights, rounds, block = context.replica.weights, counter(context, "rounds"), LocalBlock(context, cfg.tau)
    while not block.over:
        yield from block.train()
        if context.size > 1:
            op = Mix(weights.clone(), "pairs", context.num_bytes, last=block.over, number=int(rounds))
            mean: Tensor = yield from perform(op)
            with torch.no_grad():
                weights.copy_(mean)
        rounds += 1
        block.begin()
    yield from average_all(context)


PAIRS = Method(
    "pairs",
    PairsConfig,
    Facts(
        "weights, with a random learner, after each block",
        lambda n, size, cfg: (n - n % 2) / n * size / cfg.tau,
        "0",
        "delays its partner of each round and, through it, eventually all learners",
        ALL_STOP,
        sent_text="M / τ",
    ),
    program=pairs,
    join_point="during compute",
)
