"""Augmentation: speed, reverberation, noise, gain and pauses on waveforms; time warping and masks on features.

Each is an entry of `AUGMENTATIONS` with a configuration of its own; `AugmentConfig` says which are applied. What
happens to an utterance depends on its seed only (see `draws`), not on batch, device or number of workers. It can be
drawn ahead of its use (`draw`, `apply`), where the audio is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from configurable.lazy import torch
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
from speech.features.augment.draws import Drawn, Draws, seeds_of, utterance_seeds
from speech.features.augment.levels import Gain, Speed
from speech.features.augment.masks import Masks, TimeWarp
from speech.features.augment.noise import Noise
from speech.features.augment.pauses import Pauses
from speech.features.augment.reverb import Reverb

if TYPE_CHECKING:
    from torch import Tensor


__all__ = [
    "AUGMENTATIONS",
    "AugmentConfig",
    "Augmentation",
    "Bank",
    "BankError",
    "Drawn",
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


def _built(config: AugmentConfig, sample_rate: int, base: type) -> dict[str, Any]:
    """The configured augmentations of one kind, by name."""
    wanted = {name: (AUGMENTATIONS[name].build, part) for name, part in config.parts().items()}
    return {name: build(part, sample_rate) for name, (build, part) in wanted.items() if issubclass(build, base)}  # type: ignore[call-arg]


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
        self.steps: dict[str, WaveAugmentation] = _built(config, sample_rate, WaveAugmentation)

    def draw(self, lengths: Tensor, seeds: Sequence[int]) -> dict[str, Drawn]:
        """Draw for a batch, for each augmentation by name.

        Args:
            lengths: `[B]`, samples of each utterance, on the CPU; at least one utterance.
            seeds: one for each utterance.
        """
        drawn: dict[str, Drawn] = {}
        for name, step in self.steps.items():
            drawn[name] = step.draw(lengths, seeds)
            lengths = drawn[name].get("lengths", lengths)
        return drawn

    def apply(self, waves: Tensor, lengths: Tensor, drawn: Mapping[str, Drawn]) -> tuple[Tensor, Tensor]:
        """Change a batch with the numbers drawn for it.

        Args:
            waves: `[B, N]` in [-1, 1]; samples beyond an utterance's length are ignored.
            lengths: `[B]`, samples of each utterance.
            drawn: for these utterances.

        Returns:
            Waves `[B, N']`, zero beyond each utterance, and their lengths `[B]`; the inputs if nothing is configured.

        Raises:
            ValueError: these are no waveforms (stored features, perhaps).
        """
        if not self.steps or len(waves) == 0:
            return waves, lengths
        if waves.dim() != 2:
            raise ValueError(f"speed, reverb, noise, gain and pauses need waves [B, N], not {tuple(waves.shape)}")
        with torch.no_grad():
            waves = silence_padding(waves, lengths)
            for name, step in self.steps.items():
                waves, lengths = step.apply(waves, lengths, drawn[name])
        return waves, lengths

    def changed(self, lengths: Tensor, drawn: Mapping[str, Drawn]) -> Tensor:
        """The lengths `[B]` that `apply` returns, on the CPU, where they were drawn."""
        for name in self.steps:
            lengths = drawn[name].get("lengths", lengths)
        return lengths

    def __call__(self, waves: Tensor, lengths: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Draw for a batch and change it at once.

        Args:
            waves: as of `apply`.
            lengths: as of `apply`.
            draws: a seed for each utterance, or a generator on the CPU.

        Returns:
            What `apply` does.

        Raises:
            ValueError: these are no waveforms, or there is another number of seeds.
        """
        drawn = self.draw(lengths.cpu(), seeds_of(draws, len(waves))) if len(waves) else {}
        return self.apply(waves, lengths, drawn)

    def moved(self, labels: Tensor, drawn: Mapping[str, Drawn]) -> Tensor:
        """Labels of an utterance's frames `[T]`, moved in time with the numbers drawn for it: `[T']`."""
        for name, step in self.steps.items():
            labels = step.moved(labels, drawn[name])
        return labels

    def lengths(self, lengths: Tensor, draws: Sequence[int]) -> Tensor:
        """What a call makes of the lengths `[B]`, without the waves: for the planning of batches."""
        for step in self.steps.values():
            lengths = step.lengths(lengths, draws)
        return lengths


class SpecAugment:
    """The configured augmentations of normalized features: time warping and masks (arXiv 1904.08779)."""

    def __init__(self, config: AugmentConfig) -> None:
        self.config = config
        self.steps: dict[str, FeatureAugmentation] = _built(config, 0, FeatureAugmentation)

    def draw(self, seeds: Sequence[int]) -> dict[str, Drawn]:
        """Draw for a batch, with one seed for each utterance, for each augmentation by name."""
        return {name: step.draw(seeds) for name, step in self.steps.items()}

    def apply(self, feats: Tensor, lengths: Tensor, drawn: Mapping[str, Drawn]) -> Tensor:
        """Change a batch with the numbers drawn for it.

        Args:
            feats: `[B, T, F]`, normalized.
            lengths: `[B]`, frames of each utterance.
            drawn: for these utterances.

        Returns:
            A changed copy, padding unchanged; `feats` itself if nothing is configured.
        """
        with torch.no_grad():
            for name, step in self.steps.items():
                feats = step.apply(feats, lengths, drawn[name])
        return feats

    def moved(self, labels: Tensor, drawn: Mapping[str, Drawn], per_frame: float = 1.0) -> Tensor:
        """Labels of an utterance `[N]`, `per_frame` to a frame, moved in time with the numbers drawn for it: `[N]`."""
        for name, step in self.steps.items():
            labels = step.moved(labels, drawn[name], per_frame)
        return labels

    def __call__(self, feats: Tensor, lengths: Tensor, draws: Draws) -> Tensor:
        """Draw for a batch and change it at once; `draws` are a seed for each utterance, or a generator on the CPU."""
        return self.apply(feats, lengths, self.draw(seeds_of(draws, len(feats))) if self.steps else {})


@lru_cache(maxsize=8)
def _wave_augment(config: AugmentConfig, sample_rate: int) -> WaveAugment:
    return WaveAugment(config, sample_rate)


def perturb_waves(
    waves: Tensor, lengths: Tensor, sample_rate: int, config: AugmentConfig, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Apply `WaveAugment`, which is made once for each configuration; see there."""
    return _wave_augment(config, sample_rate)(waves, lengths, draws)
