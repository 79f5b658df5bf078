"""What an augmentation of waveforms or features is; both kinds keep padding silent and never look at it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from speech.features.cmvn import frame_mask


class WaveAugmentation(ABC):
    """Changes waveforms."""

    @abstractmethod
    def __call__(self, waves: Tensor, lengths: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Change a batch.

        Args:
            waves: `[B, N]` in [-1, 1], zero beyond each utterance; not modified.
            lengths: `[B]`, samples of each utterance.
            seeds: one for each utterance.

        Returns:
            Waves `[B, N']`, zero beyond each utterance, and their lengths `[B]`.
        """

    def lengths(self, lengths: Tensor, seeds: Sequence[int]) -> Tensor:
        """What a call makes of the lengths `[B]`, without the waves: for the planning of batches."""
        return lengths


class FeatureAugmentation(ABC):
    """Changes normalized features, not their number of frames."""

    @abstractmethod
    def __call__(self, feats: Tensor, lengths: Tensor, seeds: Sequence[int]) -> Tensor:
        """Change a batch.

        Args:
            feats: `[B, T, F]`; not modified.
            lengths: `[B]`, frames of each utterance.
            seeds: one for each utterance.

        Returns:
            `[B, T, F]`, padding unchanged.
        """


def silence_padding(waves: Tensor, lengths: Tensor) -> Tensor:
    """A copy of `waves` `[B, N]` that is zero beyond each length."""
    return waves.masked_fill(~frame_mask(lengths, waves.shape[1], waves.device), 0.0)


def power(waves: Tensor, lengths: Tensor) -> Tensor:
    """Mean square of each utterance of waves with silent padding: `[B, 1]`."""
    norms: Tensor = torch.linalg.vector_norm(waves, dim=1, keepdim=True)
    found: Tensor = norms.square() / lengths.to(waves.device).clamp(min=1).unsqueeze(1)
    return found


def between(ends: tuple[float, float], draws: Tensor) -> Tensor:
    """Uniform draws in [0, 1) moved to between two ends."""
    return ends[0] + (ends[1] - ends[0]) * draws


def fft_size(least: int) -> int:
    """A length that transforms fast: the next power of two, or three or five quarters of one below it."""
    size = 1 << max(0, least - 1).bit_length()
    return min(n for n in (size, size * 3 // 4, size * 5 // 8) if n >= least or n == size) if size >= 8 else size
