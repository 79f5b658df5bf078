"""Speed and gain."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from configurable.lazy import torch
from devices.padding import rounded_up, sample_multiple
from devices.transfers import beside
from speech.audio import resample
from speech.features.augment.base import WaveAugmentation, silence_padding
from speech.features.augment.config import GainConfig, SpeedConfig
from speech.features.augment.draws import Drawn, uniforms

if TYPE_CHECKING:
    from torch import Tensor


class Speed(WaveAugmentation):
    """Plays each utterance at one of some speeds, pitch following (Ko et al. 2015)."""

    def __init__(self, config: SpeedConfig, sample_rate: int) -> None:
        self.ratios = [Fraction(factor).limit_denominator(100) for factor in config.factors]

    def draw(self, lengths: Tensor, seeds: Sequence[int]) -> Drawn:
        """See `WaveAugmentation`; lengths change."""
        choice = self._choice(seeds)
        return {"choice": choice, "before": lengths, "lengths": self._changed(lengths, choice)}

    def apply(self, waves: Tensor, lengths: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """See `WaveAugmentation`; lengths change."""
        choice, pieces = drawn["choice"], []
        for index in sorted(set(choice.tolist())):  # those of one speed are resampled together
            rows = (choice == index).nonzero().squeeze(1)
            up, down = self.ratios[index].denominator, self.ratios[index].numerator
            longest, rows = int(drawn["before"][rows].max()), beside(rows, waves)
            chosen = rounded_up(waves[rows, :longest], sample_multiple(waves.device))
            pieces.append((rows, resample(chosen, down, up)))
        result = waves.new_zeros(len(waves), int(drawn["lengths"].max()))
        for rows, piece in pieces:
            kept = piece[:, : result.shape[1]]
            result[rows, : kept.shape[1]] = kept
        lengths = beside(drawn["lengths"], lengths)
        return silence_padding(result, lengths), lengths

    def moved(self, labels: Tensor, drawn: Drawn) -> Tensor:
        """See `WaveAugmentation`: frame i is heard at the time of frame i * ratio before."""
        ratio = self.ratios[int(drawn["choice"])]
        num_frames = -(-len(labels) * ratio.denominator // ratio.numerator)
        middles = (torch.arange(num_frames) * 2 + 1) * ratio.numerator
        places = torch.div(middles, 2 * ratio.denominator, rounding_mode="floor")
        return labels[places.clamp(max=max(0, len(labels) - 1))] if len(labels) else labels

    def lengths(self, lengths: Tensor, seeds: Sequence[int]) -> Tensor:
        """Lengths [B] in samples at each utterance's drawn speed."""
        return self._changed(lengths, self._choice(seeds))

    def _changed(self, lengths: Tensor, choice: Tensor) -> Tensor:
        chosen = [self.ratios[index] for index in choice.tolist()]
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

    def draw(self, lengths: Tensor, seeds: Sequence[int]) -> Drawn:
        """See `WaveAugmentation`."""
        gains_db = (uniforms(seeds, "gain", 1) * 2 - 1) * self.db
        return {"factors": torch.pow(10.0, gains_db / 20)}

    def apply(self, waves: Tensor, lengths: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """See `WaveAugmentation`."""
        return waves * beside(drawn["factors"], waves).to(waves), lengths
