"""Methods that train on their own for a block of steps and synchronize between blocks."""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from training.strategies.base import Compute, Program, Request, Seat, reduce, weight_of
from training.strategies.config import BmufConfig, MaConfig
from training.strategies.synchronous import apply


def ma(seat: Seat, cfg: MaConfig) -> Program:
    """Model averaging: train a block of tau steps, average the weights, repeat.

        W_i: tau steps of SGD from W;  W = mean_i(W_i)

    The mean weighs learners by the work that they did in the block, so that with tau = 1 and plain SGD this is
    `scpsgd`. Each learner keeps its optimizer's state over the end of a block; it is not averaged.

    Synchronizes weights. Sends 2(N-1)/N of the model every tau steps. Staleness 0; within a block, replicas drift
    apart. All wait for the slowest at the end of a block; a dead learner stops all until it is known to be dead.
    """
    while True:
        weight = yield from _block(seat, cfg.tau)
        mean = yield from reduce(seat, seat.replica.weights, weight)
        if mean.weight == 0:
            return
        _set(seat.replica.weights, mean.vector)


def _block(seat: Seat, steps: int) -> Generator[Request, Any, float]:
    """Train on; how much work that was."""
    weight = 0.0
    for _ in range(steps):
        work = yield Compute()
        if work is None:
            break
        seat.replica.update()
        seat.stale(0)
        weight += work.weight
    return weight


@torch.no_grad()
def _set(target: Tensor, value: Tensor) -> None:
    if value is not target:
        target.copy_(value)


def bmuf(seat: Seat, cfg: BmufConfig) -> Program:
    """Blockwise model-update filtering: model averaging with a momentum over blocks (arXiv:1703.05880, 1904.10584).

        G = mean_i(W_i) - S;  Δ <- η Δ + ζ G;  W <- W + Δ
        the next block starts at S = W (classical), or at S = W + η Δ (nesterov)

    S is where the block started, W the model. They are kept apart: taking the look-ahead point S for the model would
    add η Δ anew at every block and move (1 + η) times too far. The trained model is W. With η = 0 and ζ = 1 this is
    `ma`. η is 1 - 1/N unless given. Optimizer state lives on over the end of a block. `warm_steps` synchronous steps
    come first, so that blocks begin from weights that are worth averaging.

    Synchronizes weights. Sends 2(N-1)/N of the model every tau steps. Staleness 0. All wait for the slowest at the end
    of a block; a dead learner stops all until it is known to be dead.
    """
    replica = seat.replica
    yield from _warm_up(seat, cfg.warm_steps)
    eta = 1.0 - 1.0 / seat.size if cfg.eta is None else cfg.eta
    model, start = replica.weights.clone(), replica.weights.clone()
    momentum = torch.zeros_like(model)
    while True:
        weight = yield from _block(seat, cfg.tau)
        mean = yield from reduce(seat, replica.weights, weight)
        if mean.weight == 0:
            break
        momentum.mul_(eta).add_(mean.vector - start, alpha=cfg.zeta)
        model.add_(momentum)
        start.copy_(model)
        if cfg.kind == "nesterov":
            start.add_(momentum, alpha=eta)
        _set(replica.weights, start)
    _set(replica.weights, model)


def _warm_up(seat: Seat, steps: int) -> Program:
    """Steps of synchronous SGD."""
    for _ in range(steps):
        work = yield Compute()
        mean = yield from reduce(seat, seat.replica.grads, weight_of(work))
        if mean.weight == 0:
            return
        apply(seat, mean.vector)
        seat.stale(0)
