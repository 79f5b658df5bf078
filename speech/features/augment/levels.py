"""Speed and gain."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from speech.audio import resample
from speech.features.augment.base import WaveAugmentation, silence_padding
from speech.features.augment.config import GainConfig, SpeedConfig
from speech.features.augment.draws import uniforms


class Speed(WaveAugmentation):
    """Plays each utterance at one of some speeds, pitch following (Ko et al. 2015)."""

    def __init__(self, config: SpeedConfig, sample_rate: int) -> None:
        self.ratios = [Fraction(factor).limit_denominator(100) for factor in config.factors]

    def __call__(self, waves: Tensor, lengths: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `WaveAugmentation`; lengths change."""
        choice, new_lengths = self._choice(seeds), self.lengths(lengths, seeds)
        pieces: list[tuple[Tensor, Tensor]] = []
        for index in sorted(set(choice.tolist())):  # those of one speed are resampled together
            rows = (choice == index).nonzero().squeeze(1)
            up, down = self.ratios[index].denominator, self.ratios[index].numerator
            longest = int(lengths[rows.to(lengths.device)].max())
            pieces.append((rows, resample(waves[rows.to(waves.device), :longest], down, up)))
        result = waves.new_zeros(len(waves), int(new_lengths.max()))
        for rows, piece in pieces:
            kept = piece[:, : result.shape[1]]
            result[rows.to(waves.device), : kept.shape[1]] = kept
        return silence_padding(result, new_lengths), new_lengths

    def lengths(self, lengths: Tensor, seeds: Sequence[int]) -> Tensor:
        """Lengths [B] in samples at each utterance's drawn speed."""
        chosen = [self.ratios[index] for index in self._choice(seeds).tolist()]
        up = torch.tensor([ratio.denominator for ratio in chosen]).to(lengths)
        down = torch.tensor([ratio.numerator for ratio in chosen]).to(lengths)
        return torch.div(lengths * up + down - 1, down, rounding_mode="floor")

    def _choice(self, seeds: Sequence[int]) -> Tensor:
        """Number of each utterance's speed `[B]`, on the CPU."""
        return (uniforms(seeds, "speed", 1).squeeze(1) * len(self.ratios)).long()


class Gain(WaveAugmentation):
    """Changes the level, uniformly in dB."""

    def __init__(self, config: GainConfig, sample_rate: int) -> None:
        self.db = config.db

    def __call__(self, waves: Tensor, lengths: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `WaveAugmentation`."""
        gains_db = (uniforms(seeds, "gain", 1) * 2 - 1) * self.db
        return waves * torch.pow(10.0, gains_db / 20).to(waves), lengths
