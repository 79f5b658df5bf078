"""Synchronous SGD whose gradients travel as one bit a value."""

from collections.abc import Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.strategies.base import Compute, Gather, Program, Request, Seat, counter, kept, perform, reduce, weight_of
from training.strategies.synchronous import apply
from training.strategy_config import OneBitConfig

Gathered = Generator[Request, Any, tuple[Tensor, float]]

LEVEL_BYTES = 8
"""Two fp32 levels a block."""


class OneBitCodec:
    """Signs and two levels a block, with the error fed back (Seide et al. 2014).

        q = signs(g + e), decoded as the mean of the block's values of that sign;  e <- (g + e) - decode(q)

    Nothing is lost: what was decoded so far plus the error is the sum of all gradients.

    Args:
        size: Gradient values.
        block: Values that share two levels.
    """

    def __init__(self, size: int, block: int) -> None:
        self.size, self.block = size, block
        self.blocks = -(-size // block)
        self.error = torch.zeros(size)

    def _blocked(self, values: Tensor) -> Tensor:
        return F.pad(values, (0, self.blocks * self.block - self.size)).view(self.blocks, self.block)

    @torch.no_grad()
    def encode(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Packed signs [blocks, block / 8] of uint8 and levels [blocks, 2] (below, at or above zero); keeps the error.

        Args:
            grads: [size]; must be finite.
        """
        if self.error.device != grads.device:
            self.error = self.error.to(grads.device)
        wanted = grads + self.error
        values, inside = self._blocked(wanted), self._blocked(torch.ones_like(wanted))
        high = (values >= 0) & (inside > 0)
        low = (values < 0) & (inside > 0)
        levels = torch.stack([_mean(values, low), _mean(values, high)], dim=1)
        bits = pack(high)
        self.error = wanted - self.decode(bits, levels)
        return bits, levels

    def decode(self, bits: Tensor, levels: Tensor) -> Tensor:
        """What was encoded [size], coarsely."""
        chosen = torch.where(unpack(bits), levels[:, 1:], levels[:, :1])
        return chosen.flatten()[: self.size]

    def mean(self, parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, float]:
        """The weighted mean [size] of encoded gradients, and the weights' sum.

        Args:
            parts: Bits, levels and weight of each; those of weight 0 are left out.
        """
        weights = [float(weight) for _, _, weight in parts]
        mean, total = torch.zeros_like(self.error), sum(weights)
        for (bits, levels, _), weight in zip(parts, weights, strict=True):
            if weight:
                mean.add_(self.decode(bits, levels), alpha=weight / total)
        return mean, total


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    return (values * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)


def pack(flags: Tensor) -> Tensor:
    """Booleans [..., 8 n] as bytes [..., n]."""
    shifts = torch.arange(8, device=flags.device)
    eights = flags.reshape(*flags.shape[:-1], -1, 8).to(torch.int32)
    return (eights << shifts).sum(dim=-1).to(torch.uint8)


def unpack(data: Tensor) -> Tensor:
    """Bytes [..., n] as booleans [..., 8 n]."""
    shifts = torch.arange(8, device=data.device)
    return (((data[..., None].to(torch.int32) >> shifts) & 1) > 0).flatten(-2)


def wire_bytes(num_bytes: float, block: int) -> float:
    """Bytes of fp32 gradients of `num_bytes` as packed bits and levels."""
    return num_bytes / 32 + num_bytes / 4 / block * LEVEL_BYTES


def onebit(seat: Seat, cfg: OneBitConfig) -> Program:
    """Synchronous SGD with 1-bit quantized gradients and error feedback (1-bit SGD: Seide et al. 2014).

        q_i = quantize(g_i + e_i);  e_i <- g_i + e_i - decode(q_i);  W -= lr · mean_i(decode(q_i))

    Everybody gets everybody's bits and decodes them, so that nothing is quantized twice. A learner that trains alone
    sends nothing, and quantizes nothing. A learner without work keeps its error for itself. The first steps send full
    gradients (`WarmConfig`).

    Synchronizes gradients. Sends (N-1)/32 of the model a step, and 8 bytes a block and peer. Staleness 0, but for the
    error, which comes later. All wait for the slowest; a dead learner stops all until it is known to be dead, and its
    error is lost.
    """
    replica, step = seat.replica, counter(seat, "steps")
    warm_steps = cfg.warm_up(seat.epoch_steps)
    codec = OneBitCodec(replica.grads.numel(), cfg.block)
    if seat.joined:
        seat.state.pop("error", None)  # a neighbour's, which feeds it back itself
    codec.error = kept(seat, "error", torch.zeros_like(replica.grads))
    while True:
        work = yield Compute()
        step += 1
        if seat.size == 1 or step <= warm_steps:
            mean = yield from reduce(seat, replica.grads, weight_of(work))
            grads, weight = mean.vector, mean.weight
        else:
            grads, weight = yield from _gathered(seat, codec, weight_of(work), cfg)
            seat.state["error"] = codec.error
        if weight:
            apply(seat, grads)
            seat.stale(0)
        elif work is None:
            return


def _gathered(seat: Seat, codec: OneBitCodec, weight: float, cfg: OneBitConfig) -> Gathered:
    """The weighted mean of everybody's decoded gradients, and the weights' sum."""
    if weight:
        bits, levels = codec.encode(seat.replica.grads)
    else:
        bits, levels = pack(torch.zeros(codec.blocks, codec.block)), torch.zeros(codec.blocks, 2)
    op = Gather((bits, levels, torch.tensor(weight)), codec.mean, wire_bytes(seat.num_bytes, cfg.block))
    mean: tuple[Tensor, float] = yield from perform(op)
    return mean
