"""How gradients travel within a node: communication hooks with the signature of DistributedDataParallel's.

A hook gets a bucket of gradients and gives a future of their mean over the ranks. The same hooks run in
`DistributedDataParallel.register_comm_hook` and in this engine's `training.group.GradientReducer`: `codec_hook` of
this module, for the codecs of strategies, and PyTorch's own `bf16_compress_hook` and `powerSGD_hook`. A hook that
remembers something from step to step (what compression has left out so far) keeps it in its state, which goes into
checkpoints.
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
from training.strategies.onebit import numbered
from training.strategies.requests import Codec

POWERSGD_RANK = 2
"""Columns that stand for a matrix. Two are orthogonalized with an epsilon, which gradients of zero need."""
POWERSGD_START = 100
"""Steps with full gradients before the first compressed one: directions change fast in the beginning."""
EPSILON = 1e-8


Hook = Callable[[GradBucket], Future[Tensor]]
"""Begins the exchange of a bucket; its result is the mean over the ranks."""


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

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin the exchange of a bucket."""
        return self.run(self.state, bucket)

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


def run_hook(hook: Hook, bucket: Bucket) -> Tensor:
    """Exchange a bucket, and wait: the mean over the ranks [values]."""
    return hook(cast(GradBucket, bucket)).wait()


def codec_hook(codec: Codec, bucket: GradBucket) -> Future[Tensor]:
    """Exchange gradients as a strategy's codec says; as one bit a value with `OneBit`, for one.

    Every rank sends its message to all others by all_gather, and decodes what all have sent. What its own message
    leaves out stays here and is added to its next gradient, so the sum is conserved: at every rank, what was decoded so
    far plus what was left out is the sum of its gradients. That holds for a rank without a batch, too, which sends what
    it can of what it has left out.

    Gradients must be finite; after a step in which they are not, `Codec.forget`.

    Args:
        codec: Of this rank; the same configuration at all.
        bucket: Gradients; as one gets them from DistributedDataParallel or from `training.group.GradientReducer`.

    Returns:
        The mean over the ranks of the decoded gradients [values].
    """
    group = dist.group.WORLD
    warm = codec.warm
    if bucket.is_last():
        codec.next_step()
    if warm:
        return default_hooks.allreduce_hook(cast(dist.ProcessGroup, group), bucket)
    one, grads = codec.bucket(bucket), bucket.buffer()
    message = one.encode(grads)
    mine = torch.cat([part.contiguous().view(torch.uint8).flatten() for part in message])
    every = torch.empty(dist.get_world_size(group), mine.numel(), dtype=torch.uint8, device=grads.device)
    work = dist.all_gather_into_tensor(every.view(-1), mine, group=group, async_op=True)

    def decode(done: Future[list[Tensor]]) -> Tensor:
        done.value()  # an exchange that has failed raises here
        return one.mean([_parts(data, message) for data in every], [1.0] * len(every))

    future: Future[Tensor] = work.get_future().then(decode)
    return future


def _parts(data: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A message from its bytes, as tensors of these shapes and types."""
    pieces = data.split_with_sizes([part.numel() * part.element_size() for part in like])
    # wider types have to lie at a multiple of their size, which a rank's bytes need not: hence the copy
    return tuple(piece.clone().view(part.dtype).view(part.shape) for piece, part in zip(pieces, like, strict=True))


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
            found |= {f"{name}.{number}": tensor.detach().clone().cpu() for number, tensor in tensors.items()}
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """See `Memory.load_tensors`."""
        self.iter = int(tensors.get("step", 0))
        for name, memory in self._memories():
            memory.clear()
            memory |= {number: tensor.to(self.device) for number, tensor in numbered(tensors, name).items()}

    def forget(self) -> None:
        """See `Memory.forget`; the matrices start from random ones again, the same at all ranks."""
        for _, memory in self._memories():
            memory.clear()

    def _memories(self) -> list[tuple[str, dict[int, Tensor]]]:
        return [("error", self.error_dict), ("p", self.p_memory_dict), ("q", self.q_memory_dict)]


def build_hook(cfg: TrainConfig, device: torch.device) -> CommHook | None:
    """The hook that a configuration asks for; None if gradients travel as they are.

    Args:
        cfg: Of the training.
        device: Where gradients are.

    Raises:
        ValueError: If PyTorch's PowerSGD cannot run there.
    """
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
