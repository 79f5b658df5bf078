"""Pads batches to few distinct lengths where each new one costs time: cuDNN's plans, compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from configurable.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_FRAMES = 64
"""cuDNN plans convolutions and attention for each new shape, which takes tens of milliseconds of host time.
At 100 frames per second, utterances of up to 30 s then have 47 lengths instead of 3,000, and padding grows by a third
of a second on average. After subsampling by 8, lengths are still multiples of 8, as tensor cores require. Compiled code
is for any length above one, but one frame and lengths of other remainders need code of their own."""
_SAMPLES = 8192
"""Half a second at 16 kHz: the same for the convolutions that resample."""


def frame_multiple(device: torch.device, compiled: bool = False) -> int:
    """Number of feature frames that batches are padded to a multiple of; 1 on a CPU, unless the model is compiled."""
    return _FRAMES if device.type == "cuda" or compiled else 1


def sample_multiple(device: torch.device) -> int:
    """Number of samples that waveforms are padded to a multiple of before they are resampled; 1 on a CPU."""
    return _SAMPLES if device.type == "cuda" else 1


def rounded_up(batch: Tensor, multiple: int) -> Tensor:
    """Pad features [B, T, F] or waveforms [B, T] with zeros, as they are padded already, to a multiple of T."""
    extra = -batch.shape[1] % multiple
    return torch.nn.functional.pad(batch, (*(0, 0) * (batch.ndim - 2), 0, extra)) if extra else batch


class CalledNetwork(Protocol):
    """A network as a task's loss calls it; the engine may have compiled it or run it in another precision.

    A `torch.nn.Module` that offers this is one.
    """

    def __call__(self, inputs: Tensor, frames: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [batch, output frames, ...] and their frames [batch] for inputs [batch, frames, ...] and theirs.

        Args:
            inputs: Features, words, ...
            frames: Length of each input.
            *others: What else the network reads, such as the tokens so far of an attention decoder [batch, ...].
        """

    def num_frames(self, lengths: Tensor) -> Tensor:
        """Output frames for each number of input frames [batch]; on the host if they are there."""


class PaddedNetwork:
    """A network for inputs of any length, which are padded to few distinct ones.

    Args:
        forward: Outputs and their frames for inputs [B, T, ...], theirs [B], and further tensors.
        num_frames: Output frames for each number of input frames.
        multiple: Inputs are padded to a multiple of this number of frames.
    """

    def __init__(
        self,
        forward: Callable[..., tuple[Tensor, Tensor]],
        num_frames: Callable[[Tensor], Tensor],
        multiple: int,
    ) -> None:
        self._forward, self._multiple = forward, multiple
        self.num_frames = num_frames

    def __call__(self, inputs: Tensor, frames: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [B, T', ...] and their frames [B]; further tensors are passed on as they are."""
        return self._forward(rounded_up(inputs, self._multiple), frames, *others)
