"""What systems need of the networks that they are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class CalledNetwork(Protocol):
    """A network as a task's loss calls it; the engine may have compiled it or run it in another precision."""

    def __call__(self, inputs: Tensor, frames: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [batch, output frames, ...] and their frames [batch] for inputs [batch, frames, ...] and theirs.

        Args:
            inputs: Features, words, ...
            frames: Length of each input.
            *others: What else the network reads, such as the tokens so far of an attention decoder [batch, ...].
        """

    def num_frames(self, lengths: Tensor) -> Tensor:
        """Output frames for each number of input frames [batch]; on the host if they are there."""
