"""Additive noise, generated or recorded, at a signal-to-noise ratio."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from configurable.lazy import torch
from devices.transfers import beside
from speech.features.augment.bank import Bank
from speech.features.augment.base import WaveAugmentation, between, power
from speech.features.augment.config import NoiseConfig
from speech.features.augment.draws import Drawn, uniforms

if TYPE_CHECKING:
    from torch import Tensor


_POOL = 1 << 20  # samples of generated noise: 65 s at 16 kHz, 4 MB


class Noise(WaveAugmentation):
    """Adds noise at a ratio to the power of the whole utterance; to digital silence it adds nothing."""

    def __init__(self, config: NoiseConfig, sample_rate: int) -> None:
        self.config = config
        self.sample_rate = sample_rate
        self.bank = Bank(config.files, sample_rate) if config.files else None

    def draw(self, lengths: Tensor, seeds: Sequence[int]) -> Drawn:
        """See `WaveAugmentation`; recorded noise is read here."""
        draws = uniforms(seeds, "noise", 6)
        noise = torch.zeros(len(seeds), int(lengths.max()))
        for row, length in enumerate(lengths.tolist()):
            if length and draws[row, 0] < self.config.probability:
                noise[row, :length] = self._noise(length, draws[row, 2:].tolist())
        ratio_db = between(self.config.snr_db, draws[:, 1:2])
        return {"noise": noise, "factors": torch.pow(10.0, -ratio_db / 20)}

    def apply(self, waves: Tensor, lengths: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """See `WaveAugmentation`."""
        noise = beside(drawn["noise"], waves).to(waves)
        if extra := waves.shape[1] - noise.shape[1]:  # less than was drawn for, in a part of a batch
            noise = torch.nn.functional.pad(noise, (0, extra))
        ratio = power(waves, lengths) / power(noise, lengths).clamp(min=torch.finfo(torch.float32).tiny)
        return (noise * (ratio.sqrt() * beside(drawn["factors"], waves).to(waves))).add_(waves), lengths

    def _noise(self, length: int, draws: list[float]) -> Tensor:
        """Noise of any level: `[length]`."""
        source, kind, item, place = draws
        if self.bank is not None and source < self.config.file_share:
            return self.bank.segment(item, place, length)
        chosen = self.config.generated[int(kind * len(self.config.generated))]
        return cut_noise(chosen, self.sample_rate, place, length)


def cut_noise(kind: str, sample_rate: int, place: float, num_samples: int) -> Tensor:
    """Generated noise of any level, from a place in [0, 1) of what `generated` gives: `[num_samples]`."""
    pool = generated(kind, sample_rate)
    start = int(place * len(pool))
    laps = -(-(start + num_samples) // len(pool))
    return (pool.repeat(laps) if laps > 1 else pool)[start : start + num_samples]


@lru_cache(maxsize=8)
def generated(kind: str, sample_rate: int) -> Tensor:
    """About a minute of white or pink noise of any level, whose end fits its beginning.

    Utterances take their noise from any place in it: to draw new noise for each would cost more than their features.
    Pink noise has a power spectrum that falls with 1/f above 50 Hz.
    """
    generator = torch.Generator().manual_seed(0)
    if kind == "white":
        return torch.randn(_POOL, generator=generator)
    frequencies = torch.fft.rfftfreq(_POOL, 1.0 / sample_rate).clamp(min=50.0)
    # Drawn as a spectrum: that of white noise would be Gaussian, too.
    spectrum = torch.view_as_complex(torch.randn(len(frequencies), 2, generator=generator))
    noise: Tensor = torch.fft.irfft(spectrum * frequencies.rsqrt(), n=_POOL)
    return noise
