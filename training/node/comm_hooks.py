"""Communication hooks: how gradients travel within a node, with the signature of DistributedDataParallel's hooks.

A hook takes a bucket of gradients and returns a future of their mean over the ranks. The same hooks run in
`DistributedDataParallel.register_comm_hook` and in this engine's `training.node.process_group.GradientReducer`:
`codec_hook` of this module, for the codecs of strategies, and PyTorch's own `bf16_compress_hook` and `powerSGD_hook`. A
hook that carries something from step to step (the compression error so far) keeps it in its state, which is part of
checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from training.strategies.onebit import numbered
from training.strategies.requests import Codec

if TYPE_CHECKING:
    from training.config import TrainConfig

POWERSGD_RANK = 2
"""Rank of the approximation: columns per matrix. Two are orthogonalized with an epsilon, which zero gradients need."""
POWERSGD_START = 100
"""Steps with uncompressed gradients before the first compressed one: directions change fast early in training."""
EPSILON = 1e-8


Hook = Callable[[GradBucket], Future[Tensor]]
"""Starts the exchange of a bucket; its result is the mean over the ranks."""


class Memory(Protocol):
    """State that a hook carries from step to step, separately at each rank."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Copy the state by name, on the CPU."""

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state_tensors` returned at this rank; an empty dictionary resets the state."""

    def forget(self) -> None:
        """Drop all errors: they belong to other weights, or are not finite."""


@dataclass(frozen=True)
class CommHook:
    """A hook and its state.

    Attributes:
        run: `run(state, bucket)` starts the exchange of a bucket and returns a future of the mean.
        state: First argument of `run`; None for hooks without one.
    """

    run: Callable[[Any, GradBucket], Future[Tensor]]
    state: Memory | None = None

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the exchange of a bucket."""
        return self.run(self.state, bucket)

    def state_tensors(self) -> dict[str, Tensor]:
        """Copy the hook's state by name, on the CPU; empty for a hook without state."""
        return self.state.state_tensors() if self.state else {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the hook's state; an empty dictionary resets it."""
        if self.state:
            self.state.load_tensors(tensors)

    def forget(self) -> None:
        """Drop the hook's errors, as after a step that was skipped because its gradients were not finite."""
        if self.state:
            self.state.forget()


class GradientBucket:
    """Gradients that travel together, with the methods of `torch.distributed.GradBucket`.

    Args:
        number: Position in the order of sending, from 0.
        last: Whether it is the last bucket of a step.
        grads: A view of the flat gradients; the result belongs there, too.
        parameters: The parameters of these gradients, in the same order.
    """

    def __init__(self, number: int, last: bool, grads: Tensor, parameters: Sequence[Tensor]) -> None:
        self._number, self._last, self._grads, self._parameters = number, last, grads, parameters

    def index(self) -> int:
        """Position among a step's buckets."""
        return self._number

    def is_last(self) -> bool:
        """Whether this is the last bucket of the step."""
        return self._last

    def buffer(self) -> Tensor:
        """All gradients [values]."""
        return self._grads

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace all gradients [values]."""
        self._grads.copy_(buffer)

    def gradients(self) -> list[Tensor]:
        """Views of the gradients, one per parameter."""
        pieces = self._grads.split_with_sizes([parameter.numel() for parameter in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        """The parameters of these gradients."""
        return list(self._parameters)


def run_hook(hook: Hook, bucket: GradientBucket) -> Tensor:
    """Exchange a bucket and wait for the mean over the ranks [values]."""
    return hook(cast(GradBucket, bucket)).wait()


def codec_hook(codec: Codec, bucket: GradBucket) -> Future[Tensor]:
    """Exchange gradients that a strategy's codec compresses, such as `OneBit` to one bit per value.

    Every rank sends its message to all others with all_gather and decodes all messages. The error of its own message
    (gradient minus decoded message) stays at the rank and is added to its next gradient, so the sum is conserved: at
    every rank, everything decoded so far plus the current error is the sum of its gradients. This includes a rank
    without a batch, which encodes its error alone.

    Gradients must be finite; call `Codec.forget` after a step in which they are not.

    Args:
        codec: This rank's codec; all ranks use the same configuration.
        bucket: Gradients, from DistributedDataParallel or from `training.node.process_group.GradientReducer`.

    Returns:
        The mean over the ranks of the decoded gradients [values].
    """
    group = dist.group.WORLD
    warm = codec.warm
    if bucket.is_last():
        codec.next_step()
    if warm:
        return default_hooks.allreduce_hook(cast(dist.ProcessGroup, group), bucket)
    encoder, grads = codec.bucket(bucket), bucket.buffer()
    message = encoder.encode(grads)
    mine = torch.cat([part.contiguous().view(torch.uint8).flatten() for part in message])
    every = torch.empty(dist.get_world_size(group), mine.numel(), dtype=torch.uint8, device=grads.device)
    work = dist.all_gather_into_tensor(every.view(-1), mine, group=group, async_op=True)

    def decode(done: Future[list[Tensor]]) -> Tensor:
        done.value()  # raises if the exchange failed
        return encoder.mean([_parts(data, message) for data in every], [1.0] * len(every))

    future: Future[Tensor] = work.get_future().then(decode)
    return future


def _parts(data: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Split a message's bytes into tensors of the given shapes and types."""
    pieces = data.split_with_sizes([part.numel() * part.element_size() for part in like])
    # cloned for alignment: view(dtype) needs an offset that is a multiple of the type's size
    return tuple(piece.clone().view(part.dtype).view(part.shape) for piece, part in zip(pieces, like, strict=True))


class PowerSgdState(powerSGD_hook.PowerSGDState):
    """State of PyTorch's PowerSGD hook (Vogels et al. 2019, arXiv:1905.13727) that checkpoints can save.

    Args:
        device: Device of the gradients.
        rank: Columns per approximated matrix.
        start: Steps with uncompressed gradients before the first compressed one, at least 2.
    """

    def __init__(self, device: torch.device, rank: int = POWERSGD_RANK, start: int = POWERSGD_START) -> None:
        self.device = device
        super().__init__(None, rank, start, orthogonalization_epsilon=EPSILON)

    def state_tensors(self) -> dict[str, Tensor]:
        """Copy to the CPU: `step`, and for each bucket `error.<n>`, `p.<n>` and `q.<n>`."""
        state = {"step": torch.tensor(self.iter)}
        for name, tensors in self._memories():
            state |= {f"{name}.{number}": tensor.detach().clone().cpu() for number, tensor in tensors.items()}
        return state

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state_tensors` returned; an empty dictionary resets the state."""
        self.iter = int(tensors.get("step", 0))
        for name, memory in self._memories():
            memory.clear()
            memory |= {number: tensor.to(self.device) for number, tensor in numbered(tensors, name).items()}

    def forget(self) -> None:
        """Drop errors and matrices; these start again from random values, the same at all ranks."""
        for _, memory in self._memories():
            memory.clear()

    def _memories(self) -> list[tuple[str, dict[int, Tensor]]]:
        return [("error", self.error_dict), ("p", self.p_memory_dict), ("q", self.q_memory_dict)]


def build_hook(cfg: "TrainConfig", device: torch.device) -> CommHook | None:
    """Build the configured hook; None if gradients are sent uncompressed.

    Args:
        cfg: Training configuration.
        device: Device of the gradients.

    Raises:
        ValueError: If PyTorch's PowerSGD cannot run on the device.
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
