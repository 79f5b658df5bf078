"""Base of the augmentations of waveforms and features; both kinds keep padding silent and never read it.

Random numbers are drawn before they are used: `draw` needs only lengths and runs on the CPU, in the batch's loader;
`apply` uses them on the batch's device. Calling an augmentation does both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configurable.lazy import torch
from speech.features.augment.draws import Drawn
from speech.features.cmvn import frame_mask

if TYPE_CHECKING:
    from torch import Tensor


class WaveAugmentation(ABC):
    """Changes waveforms."""

    @abstractmethod
    def draw(self, lengths: Tensor, seeds: Sequence[int]) -> Drawn:
        """Draw for a batch.

        Args:
            lengths: `[B]`, samples of each utterance, on the CPU.
            seeds: one for each utterance.

        Returns:
            What `apply` needs; among it `lengths` `[B]` afterwards, if they change.
        """

    @abstractmethod
    def apply(self, waves: Tensor, lengths: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """Change a batch with the numbers drawn for it.

        Args:
            waves: `[B, N]` in [-1, 1], zero beyond each utterance; not modified.
            lengths: `[B]`, samples of each utterance.
            drawn: for these utterances; not modified.

        Returns:
            Waves `[B, N']`, zero beyond each utterance, and their lengths `[B]`.
        """

    def __call__(self, waves: Tensor, lengths: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Draw for a batch and change it."""
        return self.apply(waves, lengths, self.draw(lengths.cpu(), seeds))

    def moved(self, labels: Tensor, drawn: Drawn) -> Tensor:
        """Move labels of frames in time, as `apply` moves the frames.

        Args:
            labels: `[T]`, of one utterance.
            drawn: for this utterance alone.

        Returns:
            `[T']`.
        """
        return labels

    def lengths(self, lengths: Tensor, seeds: Sequence[int]) -> Tensor:
        """What a call makes of the lengths `[B]`, without the waves: for the planning of batches."""
        return lengths


class FeatureAugmentation(ABC):
    """Changes normalized features, not their number of frames."""

    @abstractmethod
    def draw(self, seeds: Sequence[int]) -> Drawn:
        """Draw for a batch, with one seed for each utterance.

        Numbers of frames may be known on a device only: what depends on them, `apply` makes of uniform draws there. In
        float64 all devices make the same of them.
        """

    @abstractmethod
    def apply(self, feats: Tensor, lengths: Tensor, drawn: Drawn) -> Tensor:
        """Change a batch with the numbers drawn for it.

        Args:
            feats: `[B, T, F]`; not modified.
            lengths: `[B]`, frames of each utterance.
            drawn: for these utterances; not modified.

        Returns:
            `[B, T, F]`, padding unchanged.
        """

    def __call__(self, feats: Tensor, lengths: Tensor, seeds: Sequence[int]) -> Tensor:
        """Draw for a batch and change it."""
        return self.apply(feats, lengths, self.draw(seeds))

    def moved(self, labels: Tensor, drawn: Drawn, per_frame: float) -> Tensor:
        """Move labels in time, as `apply` moves the frames.

        Args:
            labels: `[N]`, of one utterance.
            drawn: for this utterance alone.
            per_frame: labels to a frame of features.

        Returns:
            `[N]`.
        """
        return labels


def silence_padding(waves: Tensor, lengths: Tensor) -> Tensor:
    """A copy of `waves` `[B, N]` that is zero beyond each length."""
    return waves.masked_fill(~frame_mask(lengths, waves.shape[1], waves.device), 0.0)


def power(waves: Tensor, lengths: Tensor) -> Tensor:
    """Mean square of each utterance of waves with silent padding: `[B, 1]`."""
    norms: Tensor = torch.linalg.vector_norm(waves, dim=1, keepdim=True)
    powers: Tensor = norms.square() / lengths.to(waves.device).clamp(min=1).unsqueeze(1)
    return powers


def between(ends: tuple[float, float], draws: Tensor) -> Tensor:
    """Uniform draws in [0, 1) moved to between two ends."""
    return ends[0] + (ends[1] - ends[0]) * draws


def fft_size(least: int) -> int:
    """A length that transforms fast: the next power of two, or three or five quarters of one below it."""
    size = 1 << max(0, least - 1).bit_length()
    return min(n for n in (size, size * 3 // 4, size * 5 // 8) if n >= least or n == size) if size >= 8 else size
