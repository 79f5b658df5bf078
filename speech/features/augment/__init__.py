"""Augmentation: speed, reverberation, noise, gain and pauses on waveforms; time warping and masks on features.

Each is an entry of `AUGMENTATIONS` with a configuration of its own; `AugmentConfig` says which are applied. What
happens to an utterance depends on its seed only (see `draws`), not on batch, device or number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor

from speech.features.augment.bank import Bank, BankError
from speech.features.augment.base import FeatureAugmentation, WaveAugmentation, silence_padding
from speech.features.augment.config import (
    AugmentConfig,
    GainConfig,
    MaskConfig,
    NoiseConfig,
    PauseConfig,
    ReverbConfig,
    SpeedConfig,
    TimeWarpConfig,
)
from speech.features.augment.draws import Draws, seeds_of, utterance_seeds
from speech.features.augment.levels import Gain, Speed
from speech.features.augment.masks import Masks, TimeWarp
from speech.features.augment.noise import Noise
from speech.features.augment.pauses import Pauses
from speech.features.augment.reverb import Reverb

__all__ = [
    "AUGMENTATIONS",
    "AugmentConfig",
    "Augmentation",
    "Bank",
    "BankError",
    "Draws",
    "FeatureAugmentation",
    "GainConfig",
    "MaskConfig",
    "NoiseConfig",
    "PauseConfig",
    "ReverbConfig",
    "SpecAugment",
    "SpeedConfig",
    "TimeWarpConfig",
    "WaveAugment",
    "WaveAugmentation",
    "perturb_waves",
    "utterance_seeds",
]


class Augmentation(NamedTuple):
    """An entry of the registry."""

    build: type[WaveAugmentation] | type[FeatureAugmentation]
    """Made from a configuration and a sample rate."""
    config: type[BaseModel]
    """Its configuration."""


AUGMENTATIONS: dict[str, Augmentation] = {
    "speed": Augmentation(Speed, SpeedConfig),
    "reverb": Augmentation(Reverb, ReverbConfig),
    "noise": Augmentation(Noise, NoiseConfig),
    "gain": Augmentation(Gain, GainConfig),
    "pauses": Augmentation(Pauses, PauseConfig),
    "time_warp": Augmentation(TimeWarp, TimeWarpConfig),
    "masks": Augmentation(Masks, MaskConfig),
}
"""Augmentations by name, in the order in which they are applied."""


def _built(config: AugmentConfig, sample_rate: int, base: type) -> list[Any]:
    """The configured augmentations of one kind."""
    wanted = [(AUGMENTATIONS[name].build, part) for name, part in config.parts().items()]
    return [build(part, sample_rate) for build, part in wanted if issubclass(build, base)]  # type: ignore[call-arg]


class WaveAugment:
    """The configured augmentations of waveforms, one after the other.

    Args:
        config: the augmentation.
        sample_rate: of the waveforms, in Hz.

    Raises:
        BankError: files of noises or impulse responses are missing.

    Example:
        >>> augment = WaveAugment(AugmentConfig(speed_factors=(0.8,)), 16000)
        >>> waves, lengths = augment(torch.zeros(1, 16000), torch.tensor([16000]), utterance_seeds(1, 0, ["a"]))
        >>> lengths
        tensor([20000])
    """

    def __init__(self, config: AugmentConfig, sample_rate: int) -> None:
        self.steps: list[WaveAugmentation] = _built(config, sample_rate, WaveAugmentation)

    @torch.no_grad()
    def __call__(self, waves: Tensor, lengths: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Change a batch.

        Args:
            waves: `[B, N]` in [-1, 1]; what lies beyond an utterance's length is never looked at.
            lengths: `[B]`, samples of each utterance.
            draws: a seed for each utterance, or a generator on the CPU.

        Returns:
            Waves `[B, N']`, zero beyond each utterance, and their lengths `[B]`; the inputs if nothing is configured.

        Raises:
            ValueError: these are no waveforms (stored features, perhaps), or there is another number of seeds.
        """
        if not self.steps or len(waves) == 0:
            return waves, lengths
        if waves.dim() != 2:
            raise ValueError(f"speed, reverb, noise, gain and pauses need waves [B, N], not {tuple(waves.shape)}")
        seeds = seeds_of(draws, len(waves))
        waves = silence_padding(waves, lengths)
        for step in self.steps:
            waves, lengths = step(waves, lengths, seeds)
        return waves, lengths

    def lengths(self, lengths: Tensor, draws: Sequence[int]) -> Tensor:
        """What a call makes of the lengths `[B]`, without the waves: for the planning of batches."""
        for step in self.steps:
            lengths = step.lengths(lengths, draws)
        return lengths


class SpecAugment:
    """The configured augmentations of normalized features: time warping and masks (arXiv 1904.08779)."""

    def __init__(self, config: AugmentConfig) -> None:
        self.config = config
        self.steps: list[FeatureAugmentation] = _built(config, 0, FeatureAugmentation)

    @torch.no_grad()
    def __call__(self, feats: Tensor, lengths: Tensor, draws: Draws) -> Tensor:
        """Change a batch.

        Args:
            feats: `[B, T, F]`, normalized.
            lengths: `[B]`, frames of each utterance.
            draws: a seed for each utterance, or a generator on the CPU.

        Returns:
            A changed copy, padding unchanged; `feats` itself if nothing is configured.
        """
        if not self.steps:
            return feats
        seeds = seeds_of(draws, len(feats))
        for step in self.steps:
            feats = step(feats, lengths, seeds)
        return feats


@lru_cache(maxsize=8)
def _wave_augment(config: AugmentConfig, sample_rate: int) -> WaveAugment:
    return WaveAugment(config, sample_rate)


def perturb_waves(
    waves: Tensor, lengths: Tensor, sample_rate: int, config: AugmentConfig, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Apply `WaveAugment`, which is made once for each configuration; see there."""
    return _wave_augment(config, sample_rate)(waves, lengths, draws)
