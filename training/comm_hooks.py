"""How gradients travel within a node: communication hooks with the signature of DistributedDataParallel's.

A hook gets a bucket of gradients and gives a future of their mean over the ranks. The same hooks run in
`DistributedDataParallel.register_comm_hook` and in this engine's `training.group.GradientReducer`: `onebit_hook` of
this module, and PyTorch's own `bf16_compress_hook` and `powerSGD_hook`. A hook that remembers something from step to
step (what compression has left out so far) keeps it in its state, which goes into checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from training.config import TrainConfig
from training.strategies.onebit import LEVEL_BYTES, OneBitCodec
from training.strategy_config import OneBitConfig

POWERSGD_RANK = 2
"""Columns that stand for a matrix. Two are orthogonalized with an epsilon, which gradients of zero need."""
POWERSGD_START = 100
"""Steps with full gradients before the first compressed one: directions change fast in the beginning."""
EPSILON = 1e-8


class Memory(Protocol):
    """What a hook remembers from step to step; each rank its own."""

    def state_tensors(self) -> dict[str, Tensor]:
        """A copy by name, on the CPU."""

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave at this rank; without anything, begin anew."""

    def forget(self) -> None:
        """Drop all errors: they belong to other weights, or are no longer finite."""


@dataclass(frozen=True)
class CommHook:
    """A hook and its state.

    Attributes:
        run: `run(state, bucket)` begins the exchange of a bucket and gives a future of the mean.
        state: First argument of `run`; None for hooks without one.
    """

    run: Callable[[Any, GradBucket], Future[Tensor]]
    state: Memory | None = None

    def state_tensors(self) -> dict[str, Tensor]:
        """See `Memory.state_tensors`; empty without memory."""
        return self.state.state_tensors() if self.state else {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """See `Memory.load_tensors`."""
        if self.state:
            self.state.load_tensors(tensors)

    def forget(self) -> None:
        """See `Memory.forget`: for a step that was thrown away since its gradients were not finite."""
        if self.state:
            self.state.forget()


class Bucket:
    """Gradients that travel together, with the methods of `torch.distributed.GradBucket`.

    Args:
        number: Its place in the order of sending, from 0.
        last: Whether it is the last of a step.
        grads: A part of the flat gradients; stays the place where the result belongs.
        parameters: Whose gradients these are, in this order.
    """

    def __init__(self, number: int, last: bool, grads: Tensor, parameters: Sequence[Tensor]) -> None:
        self._number, self._last, self._grads, self._parameters = number, last, grads, parameters

    def index(self) -> int:
        """Its number among a step's buckets."""
        return self._number

    def is_last(self) -> bool:
        """Whether no other bucket of this step follows."""
        return self._last

    def buffer(self) -> Tensor:
        """All gradients [values]."""
        return self._grads

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace all gradients [values]."""
        self._grads.copy_(buffer)

    def gradients(self) -> list[Tensor]:
        """The gradients parameter by parameter, as views."""
        pieces = self._grads.split_with_sizes([parameter.numel() for parameter in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        """Whose gradients these are."""
        return list(self._parameters)


def run_hook(hook: CommHook, bucket: Bucket) -> Tensor:
    """Exchange a bucket, and wait: the mean over the ranks [values]."""
    return hook.run(hook.state, cast(GradBucket, bucket)).wait()


class OneBitState:
    """What `onebit_hook` keeps at one rank: a codec with its error for each bucket.

    Errors belong to parameters. When buckets are cut anew, as DistributedDataParallel does after its first step, each
    parameter's error moves to its new bucket.

    Args:
        cfg: Block size, and steps with full gradients.
        process_group: Whom gradients are exchanged with; None means everybody.
        epoch_steps: Steps of an epoch, the same at all ranks; for a warm-up that is counted in epochs.

    Attributes:
        warm_steps: Steps with full gradients.
        step: Steps so far.
        sent: Bytes of compressed gradients so far, to each peer.
    """

    def __init__(
        self, cfg: OneBitConfig, process_group: dist.ProcessGroup | None = None, epoch_steps: float = 0.0
    ) -> None:
        self.cfg, self.process_group = cfg, process_group
        self.warm_steps = cfg.warm_up(epoch_steps)
        self.step = self.sent = 0
        self._codecs: dict[int, OneBitCodec] = {}
        self._layouts: dict[int, list[Tensor]] = {}
        self._restored: dict[int, Tensor] = {}
        self._moving: dict[Tensor, Tensor] = {}

    def codec(self, bucket: GradBucket) -> OneBitCodec:
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

    def _first_error(self, index: int, bucket: GradBucket) -> Tensor:
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
        """See `Memory.state_tensors`: `step`, and `error.<bucket>` for each bucket."""
        errors = self._restored | {index: codec.error for index, codec in self._codecs.items()}
        return {"step": torch.tensor(self.step), **{f"error.{index}": _copy(error) for index, error in errors.items()}}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """See `Memory.load_tensors`."""
        self.forget()
        self.step = int(tensors.get("step", 0))
        self._restored = _numbered(tensors, "error")

    def forget(self) -> None:
        """See `Memory.forget`; the count of steps goes on."""
        self._codecs, self._layouts, self._restored, self._moving = {}, {}, {}, {}


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().cpu()


def _numbered(tensors: dict[str, Tensor], name: str) -> dict[int, Tensor]:
    """The tensors called `<name>.<number>`, by number."""
    found = ((key.rpartition("."), tensor) for key, tensor in tensors.items())
    return {int(number): tensor.clone() for (before, _, number), tensor in found if before == name}


def onebit_hook(state: OneBitState, bucket: GradBucket) -> Future[Tensor]:
    """Exchange gradients as one bit a value, with error feedback (1-bit SGD: Seide et al. 2014).

    Every rank sends its signs, packed eight a byte, and two fp32 levels a block to all others by all_gather, and
    decodes what all have sent; what its own bits do not say stays here and is added to its next gradient. The sum is
    conserved: at every rank, what was decoded so far plus the error is the sum of its gradients. That holds for a rank
    without a batch, too: it sends what it can of its error.

    Gradients must be finite; after a step in which they are not, `OneBitState.forget`.

    Args:
        state: Of this rank; the same configuration at all.
        bucket: Gradients; as one gets them from DistributedDataParallel or from `training.group.GradientReducer`.

    Returns:
        The mean over the ranks of the decoded gradients [values].
    """
    group = state.process_group or dist.group.WORLD
    warm = state.step < state.warm_steps
    state.step += bucket.is_last()
    if warm:
        return default_hooks.allreduce_hook(cast(dist.ProcessGroup, group), bucket)
    codec, grads = state.codec(bucket), bucket.buffer()
    mine = _to_bytes(*codec.encode(grads))
    every = torch.empty(dist.get_world_size(group), mine.numel(), dtype=torch.uint8, device=grads.device)
    work = dist.all_gather_into_tensor(every.view(-1), mine, group=group, async_op=True)
    state.sent += mine.numel()

    def decode(done: Future[list[Tensor]]) -> Tensor:
        done.value()  # an exchange that has failed raises here
        return codec.mean([(*_from_bytes(codec, data), torch.ones(())) for data in every])[0]

    future: Future[Tensor] = work.get_future().then(decode)
    return future


def _to_bytes(bits: Tensor, levels: Tensor) -> Tensor:
    return torch.cat((levels.view(torch.uint8).flatten(), bits.flatten()))


def _from_bytes(codec: OneBitCodec, data: Tensor) -> tuple[Tensor, Tensor]:
    levels, bits = data.split_with_sizes([codec.blocks * LEVEL_BYTES, data.numel() - codec.blocks * LEVEL_BYTES])
    # fp32 has to lie at a multiple of four bytes, which a rank's row need not: hence the copy
    return bits.view(codec.blocks, -1), levels.clone().view(torch.float32).view(codec.blocks, 2)


class PowerSgdState(powerSGD_hook.PowerSGDState):
    """PyTorch's state of its PowerSGD hook (Vogels et al. 2019, arXiv:1905.13727), which a checkpoint can keep.

    Args:
        device: Where gradients are.
        rank: Columns that stand for a matrix.
        start: Steps with full gradients before the first compressed one, at least 2.
    """

    def __init__(self, device: torch.device, rank: int = POWERSGD_RANK, start: int = POWERSGD_START) -> None:
        self.device = device
        super().__init__(None, rank, start, orthogonalization_epsilon=EPSILON)

    def state_tensors(self) -> dict[str, Tensor]:
        """See `Memory.state_tensors`: `step`, and for each bucket `error.<n>`, `p.<n>` and `q.<n>`."""
        found = {"step": torch.tensor(self.iter)}
        for name, tensors in self._memories():
            found |= {f"{name}.{number}": _copy(tensor) for number, tensor in tensors.items()}
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """See `Memory.load_tensors`."""
        self.iter = int(tensors.get("step", 0))
        for name, memory in self._memories():
            memory.clear()
            memory |= {number: tensor.to(self.device) for number, tensor in _numbered(tensors, name).items()}

    def forget(self) -> None:
        """See `Memory.forget`; the matrices start from random ones again, the same at all ranks."""
        for _, memory in self._memories():
            memory.clear()

    def _memories(self) -> list[tuple[str, dict[int, Tensor]]]:
        return [("error", self.error_dict), ("p", self.p_memory_dict), ("q", self.q_memory_dict)]


def build_hook(cfg: TrainConfig, device: torch.device, epoch_steps: float = 0.0) -> CommHook | None:
    """The hook that a configuration asks for; None if gradients travel as they are.

    Args:
        cfg: Of the training.
        device: Where gradients are.
        epoch_steps: Steps of a learner in an epoch.

    Raises:
        ValueError: If PyTorch's PowerSGD cannot run there.
    """
    if cfg.strategy == "onebit":
        return CommHook(onebit_hook, OneBitState(cfg.onebit, epoch_steps=epoch_steps))
    if cfg.comm_hook == "bf16":
        return CommHook(default_hooks.bf16_compress_hook)
    if cfg.comm_hook == "powersgd":
        if device.type == "cpu" and torch.cuda.is_available():
            raise ValueError(
                "comm_hook powersgd waits for the GPU of this machine, but train.device is a CPU: use device=cuda, or "
                "hide the GPU with CUDA_VISIBLE_DEVICES=, or use comm_hook=bf16"
            )
        return CommHook(powerSGD_hook.powerSGD_hook, PowerSgdState(device))
    return None
