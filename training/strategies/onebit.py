"""Synchronous SGD whose gradients are sent as one bit per value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from configurable.lazy import torch
from training.strategies.base import LearnerContext
from training.strategies.requests import Bucket, Compute, Program
from training.strategies.strategy import ALL_STOP, ALL_WAIT, Facts, Method, Traits, WarmConfig

if TYPE_CHECKING:
    from torch import Tensor

LEVEL_BYTES = 8
"""Two fp32 levels per block."""


class OneBitConfig(WarmConfig):
    """Synchronous SGD with 1-bit gradients."""

    kind: Literal["onebit"] = "onebit"
    traits: ClassVar[Traits] = Traits(one_node=True)
    block: int = Field(default=512, ge=8, multiple_of=8)
    """Gradient values that share two reconstruction levels."""


class OneBitCodec:
    """Encodes gradients as signs and two levels per block, with error feedback (Seide et al. 2014).

        q = signs(g + e), decoded as the mean of the block's values of that sign;  e <- (g + e) - decode(q)

    The sum is conserved: everything decoded so far plus the error is the sum of all gradients.

    Args:
        size: Number of gradient values.
        block: Values that share two levels.
    """

    def __init__(self, size: int, block: int) -> None:
        self.size, self.block = size, block
        self.blocks = -(-size // block)
        self.error = torch.zeros(size)

    def _blocked(self, values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, self.blocks * self.block - self.size)).view(self.blocks, self.block)

    def encode(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Encode gradients, and keep the error for the next call.

        Args:
            grads: [size]; must be finite.

        Returns:
            Packed signs [blocks, block / 8], uint8; and levels [blocks, 2] of the values below zero and of the others.
        """
        with torch.no_grad():
            return self._encode(grads)

    def _encode(self, grads: Tensor) -> tuple[Tensor, Tensor]:
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
        """Decode to approximate gradients [size]."""
        chosen = torch.where(unpack(bits), levels[:, 1:], levels[:, :1])
        return chosen.flatten()[: self.size]

    def blank(self) -> tuple[Tensor, Tensor]:
        """Bits and levels that decode to zero."""
        return pack(torch.zeros(self.blocks, self.block)), torch.zeros(self.blocks, 2)

    def mean(self, messages: Sequence[tuple[Tensor, ...]], weights: Sequence[float]) -> Tensor:
        """Weighted mean [size] of encoded gradients.

        Args:
            messages: Bits and levels of each learner.
            weights: Weight of each; messages of weight 0 are ignored.
        """
        mean, total = torch.zeros_like(self.error), sum(weights)
        for (bits, levels), weight in zip(messages, weights, strict=True):
            if weight:
                mean.add_(self.decode(bits, levels), alpha=weight / total)
        return mean


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    return (values * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)


def pack(flags: Tensor) -> Tensor:
    """Pack booleans [..., 8 n] into bytes [..., n]."""
    shifts = torch.arange(8, device=flags.device)
    eights = flags.reshape(*flags.shape[:-1], -1, 8).to(torch.int32)
    return (eights << shifts).sum(dim=-1).to(torch.uint8)


def unpack(data: Tensor) -> Tensor:
    """Unpack bytes [..., n] to booleans [..., 8 n]."""
    shifts = torch.arange(8, device=data.device)
    return (((data[..., None].to(torch.int32) >> shifts) & 1) > 0).flatten(-2)


def wire_bytes(num_bytes: float, block: int) -> float:
    """Encoded size, bits and levels, of fp32 gradients of `num_bytes` bytes."""
    return num_bytes / 32 + num_bytes / 4 / block * LEVEL_BYTES


class OneBit:
    """A `Codec` that sends gradients as one bit per value: an encoder with its error per bucket, and the warm-up.

    Errors belong to parameters. When buckets change, as DistributedDataParallel's do after its first step, each
    parameter's error moves to its new bucket.

    Args:
        cfg: Block size, and length of the warm-up.
        epoch_steps: Steps of an epoch, the same at all ranks; for a warm-up that is counted in epochs.

    Attributes:
        warm_steps: Steps with uncompressed gradients.
        step: Steps so far.
    """

    def __init__(self, cfg: OneBitConfig, epoch_steps: float = 0.0) -> None:
        self.cfg, self.warm_steps, self.step = cfg, cfg.warm_up(epoch_steps), 0
        self._codecs: dict[int, OneBitCodec] = {}
        self._layouts: dict[int, list[Tensor]] = {}
        self._restored: dict[int, Tensor] = {}
        self._moving: dict[Tensor, Tensor] = {}

    @property
    def warm(self) -> bool:
        """Whether gradients are still uncompressed in this step."""
        return self.step < self.warm_steps

    def next_step(self) -> None:
        """Called when all gradients of a step have been sent."""
        self.step += 1

    def wire_bytes(self, num_bytes: float) -> float:
        """Size of the message for fp32 gradients of `num_bytes` bytes."""
        return wire_bytes(num_bytes, self.cfg.block)

    def bucket(self, bucket: Bucket) -> OneBitCodec:
        """The codec of a bucket, with the error of the bucket's parameters.

        Raises:
            ValueError: If a checkpoint's errors are of another model.
        """
        index, parameters = bucket.index(), bucket.parameters()
        if index in self._codecs and not _same(self._layouts[index], parameters):
            self._dissolve()
        if index not in self._codecs:
            codec = OneBitCodec(bucket.buffer().numel(), self.cfg.block)
            codec.error = self._first_error(index, bucket)
            self._codecs[index], self._layouts[index] = codec, list(parameters)
        return self._codecs[index]

    def _first_error(self, index: int, bucket: Bucket) -> Tensor:
        grads = bucket.buffer()
        restored = self._restored.pop(index, None)
        if restored is not None:
            if restored.shape != grads.shape:
                raise ValueError(
                    f"a checkpoint's {restored.numel()} errors do not fit a bucket of {grads.numel()} gradients: it is "
                    "another model's; remove it, or train the model that it belongs to"
                )
            return restored.to(grads.device)
        pieces = [self._moving.pop(p, torch.zeros_like(p)).flatten() for p in bucket.parameters()]
        return torch.cat(pieces).detach()

    def _dissolve(self) -> None:
        for index, codec in self._codecs.items():
            parameters = self._layouts[index]
            pieces = codec.error.split_with_sizes([p.numel() for p in parameters])
            self._moving |= dict(zip(parameters, pieces, strict=True))
        self._codecs, self._layouts = {}, {}

    def state_tensors(self) -> dict[str, Tensor]:
        """Copy `step`, and `error.<bucket>` of each bucket, to the CPU."""
        errors = self._restored | {index: codec.error for index, codec in self._codecs.items()}
        copies = {f"error.{index}": error.detach().clone().cpu() for index, error in errors.items()}
        return {"step": torch.tensor(self.step), **copies}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned at this rank; empty resets the state."""
        self.forget()
        self.step = int(tensors.get("step", 0))
        self._restored = numbered(tensors, "error")

    def forget(self) -> None:
        """Drop all errors; the step count is kept."""
        self._codecs, self._layouts, self._restored, self._moving = {}, {}, {}, {}


def _same(parameters: list[Tensor], other: list[Tensor]) -> bool:
    return len(parameters) == len(other) and all(a is b for a, b in zip(parameters, other, strict=True))


def numbered(tensors: Mapping[str, Tensor], name: str) -> dict[int, Tensor]:
    """Copies of the tensors named `<name>.<number>`, by number."""
    split = ((key.rpartition("."), tensor) for key, tensor in tensors.items())
    return {int(number): tensor.clone() for (before, _, number), tensor in split if before == name}


def onebit(context: LearnerContext, cfg: OneBitConfig) -> Program:
    """Synchronous SGD with 1-bit quantized gradients and error feedback (1-bit SGD: Seide et al. 2014).

        q_i = quantize(g_i + e_i);  e_i <- g_i + e_i - decode(q_i);  W -= lr · mean_i(decode(q_i))

    All learners receive and decode the bits of all others, so nothing is quantized twice. A single learner does not
    quantize. A learner without work keeps its error. The first steps send uncompressed gradients (`WarmConfig`).

    The error is applied a step late at the earliest, and that of a dead learner is lost.
    """
    codec = OneBit(cfg, context.epoch_steps)
    if context.joined:  # the errors are copies of a neighbour's, which feeds them back itself
        context.state = {name: tensor for name, tensor in context.state.items() if not name.startswith("error")}
    codec.load_tensors(context.state)
    context.settle = partial(_keep, context, codec)
    while (work := (yield Compute(reduce="all", codec=codec if context.size > 1 else None))) is not None:
        if work.weight:
            context.replica.update()
            context.stale(0)


def _keep(context: LearnerContext, codec: OneBit) -> Program:
    """Copy errors and step count into the state."""
    context.state = codec.state_tensors()
    yield from ()


ONEBIT = Method(
    "onebit",
    OneBitConfig,
    Facts(
        "1-bit gradients, with all learners",
        lambda n, size, cfg: (n - 1) * wire_bytes(size, cfg.block),
        "0",
        ALL_WAIT,
        ALL_STOP,
        sent_text="(N−1) · (M/32 + 8 bytes per block)",
    ),
    program=onebit,
    equal=True,
    join_point="after update",
)
