"""Pauses before, within and after an utterance: digital silence, faint noise, or the utterance's own room tone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from speech.features.augment.base import WaveAugmentation, between, fft_size
from speech.features.augment.config import PauseConfig
from speech.features.augment.draws import uniforms
from speech.features.augment.noise import cut_noise

_BLOCK_S = 0.05  # in which quiet places are looked for
_DRAWS = 5  # for each pause


class Pauses(WaveAugmentation):
    """Puts a pause before some utterances, one behind them, and one into the quietest place of their middle half.

    A length is uniform in its square root, so that short pauses are the more frequent. Each pause is of a kind of its
    own: zeros, white or pink noise of a level relative to the utterance's, or its room tone: noise with spectrum and
    level of its quietest 50 ms.
    """

    def __init__(self, config: PauseConfig, sample_rate: int) -> None:
        self.config = config
        self.sample_rate = sample_rate
        self.block = max(1, int(_BLOCK_S * sample_rate))

    def __call__(self, waves: Tensor, lengths: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Insert the drawn pauses; lengths change."""
        draws = self._draws(seeds)
        added = self._added(lengths, draws)
        rows = zip(waves, lengths.tolist(), added.tolist(), draws, strict=True)
        changed = [
            self._interrupted(wave[:length], pauses, draw[1:].view(3, _DRAWS)) if any(pauses) else wave[:length]
            for wave, length, pauses, draw in rows
        ]
        return torch.nn.utils.rnn.pad_sequence(changed, batch_first=True), lengths + added.sum(1).to(lengths)

    def lengths(self, lengths: Tensor, seeds: Sequence[int]) -> Tensor:
        """Lengths [B] in samples with each utterance's drawn pauses."""
        return lengths + self._added(lengths, self._draws(seeds)).sum(1).to(lengths)

    def _draws(self, seeds: Sequence[int]) -> Tensor:
        """Whether there are pauses, and five numbers for each of the three."""
        return uniforms(seeds, "pauses", 1 + 3 * _DRAWS)

    def _added(self, lengths: Tensor, draws: Tensor) -> Tensor:
        """Samples of the pauses before, within and after each utterance, int64 `[B, 3]`; an empty one gets none."""
        ends = (self.config.edge_s, self.config.inner_s, self.config.edge_s)
        seconds = [between(range_s, draws[:, 1 + n * _DRAWS].square()) for n, range_s in enumerate(ends)]
        given = (draws[:, 0] < self.config.probability) & (lengths.to(draws.device) > 0)
        return (torch.stack(seconds, dim=1) * self.sample_rate).long() * given.unsqueeze(1)

    def _interrupted(self, wave: Tensor, added: list[int], draws: Tensor) -> Tensor:
        """An utterance with pauses of `added` samples before, within and after it; `draws` `[3, 5]` are theirs."""
        energies = self._energies(wave)
        quiet = _quietest(energies, 0, len(energies)) * self.block
        middle = _quietest(energies, len(energies) // 4, len(energies) - len(energies) // 4)
        cut = min(int((middle + 0.5) * self.block), len(wave))
        tone = wave[quiet : quiet + self.block]
        before, within, after = (
            self._pause(wave, tone, num_samples, draw) for num_samples, draw in zip(added, draws, strict=True)
        )
        return torch.cat([before, wave[:cut], within, wave[cut:], after])

    def _energies(self, wave: Tensor) -> list[float]:
        """Mean squares of the whole blocks, at least one."""
        if len(wave) < self.block:
            return [0.0]
        found: list[float] = wave.unfold(0, self.block, self.block).square().mean(1).tolist()
        return found

    def _pause(self, wave: Tensor, tone: Tensor, num_samples: int, draws: Tensor) -> Tensor:
        """A pause for an utterance whose quietest part is `tone`: `[num_samples]`."""
        _, kind, level, color, place = draws.tolist()
        chosen = self.config.kinds[int(kind * len(self.config.kinds))]
        if chosen == "zeros" or num_samples == 0:
            return wave.new_zeros(num_samples)
        name = "white" if chosen == "room" or color < 0.5 else "pink"
        noise = cut_noise(name, self.sample_rate, place, num_samples).to(wave)
        if chosen == "room":
            return _scaled(_shaped(noise, tone), tone)
        gain_db = self.config.level_db[0] + level * (self.config.level_db[1] - self.config.level_db[0])
        return _scaled(noise, wave) * math.pow(10.0, gain_db / 20)


def _quietest(energies: list[float], first: int, end: int) -> int:
    """The first of the smallest energies from `first` to `end`."""
    return min(range(first, max(end, first + 1)), key=energies.__getitem__)


def _shaped(noise: Tensor, tone: Tensor) -> Tensor:
    """White noise with the spectrum of another signal: `[num_samples]`."""
    spectrum = torch.fft.rfft(noise, n=fft_size(len(noise)))
    magnitudes = torch.fft.rfft(tone * torch.hann_window(len(tone), device=tone.device)).abs()
    shape = F.interpolate(magnitudes[None, None], size=len(spectrum), mode="linear", align_corners=True)[0, 0]
    found: Tensor = torch.fft.irfft(spectrum * shape, n=fft_size(len(noise)))
    return found[: len(noise)]


def _scaled(noise: Tensor, like: Tensor) -> Tensor:
    """Noise with the power of another signal."""
    tiny = torch.finfo(torch.float32).tiny
    return noise * (like.square().mean() / noise.square().mean().clamp(min=tiny)).sqrt()
