"""Pauses before, within and after an utterance: digital silence, faint noise, or the utterance's own room tone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from configurable.lazy import torch
from devices.transfers import beside
from speech.features.augment.base import WaveAugmentation, between, fft_size
from speech.features.augment.config import PauseConfig
from speech.features.augment.draws import Drawn, uniforms
from speech.features.augment.noise import cut_noise

if TYPE_CHECKING:
    from torch import Tensor


_BLOCK_S = 0.05  # in which quiet places are looked for
_DRAWS = 5  # for each pause


class _Pause(NamedTuple):
    """A drawn pause: what it is made of, which of the configured kinds it is, its level if it is noise."""

    noise: Tensor
    kind: int
    level_db: float


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

    def draw(self, lengths: Tensor, seeds: Sequence[int]) -> Drawn:
        """See `WaveAugmentation`; lengths change, the noise of an utterance's pauses is drawn one behind the other."""
        draws = self._draws(seeds)
        added = self._added(lengths, draws)
        _, kinds, levels, colors, places = draws[:, 1:].view(-1, 3, _DRAWS).unbind(2)
        kinds = (kinds * len(self.config.kinds)).long()
        noises = [
            torch.cat([self._noise(*pause) for pause in zip(*row, strict=True)]) if any(row[0]) else torch.zeros(0)
            for row in zip(added.tolist(), kinds.tolist(), colors.tolist(), places.tolist(), strict=True)
        ]
        return {
            "before": lengths,
            "lengths": lengths + added.sum(1).to(lengths),
            "added": added,
            "kinds": kinds,
            "levels_db": self.config.level_db[0] + levels * (self.config.level_db[1] - self.config.level_db[0]),
            "noise": torch.nn.utils.rnn.pad_sequence(noises, batch_first=True),
        }

    def apply(self, waves: Tensor, lengths: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """Insert the drawn pauses; lengths change."""
        changed = [wave[:length] for wave, length in zip(waves, drawn["before"].tolist(), strict=True)]
        added, noise = drawn["added"].tolist(), beside(drawn["noise"], waves).to(waves)
        kinds, levels_db = drawn["kinds"].tolist(), drawn["levels_db"].tolist()
        for row, sizes in enumerate(added):
            if any(sizes):
                parts = noise[row, : sum(sizes)].split_with_sizes(sizes)
                pauses = [_Pause(*pause) for pause in zip(parts, kinds[row], levels_db[row], strict=True)]
                changed[row] = self._interrupted(changed[row], pauses)
        return torch.nn.utils.rnn.pad_sequence(changed, batch_first=True), beside(drawn["lengths"], lengths)

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

    def _noise(self, num_samples: int, kind: int, color: float, place: float) -> Tensor:
        """What a pause is made of, at any level: `[num_samples]`."""
        chosen = self.config.kinds[kind]
        if chosen == "zeros":
            return torch.zeros(num_samples)
        return cut_noise("white" if chosen == "room" or color < 0.5 else "pink", self.sample_rate, place, num_samples)

    def _interrupted(self, wave: Tensor, pauses: list[_Pause]) -> Tensor:
        """An utterance with pauses before, within and after it; places depend on the audio, and stay on its device."""
        whole = wave.unfold(0, self.block, self.block) if len(wave) >= self.block else wave.new_zeros(1, 1)
        energies = whole.square().mean(1)
        quiet = _quietest(energies, 0, len(energies)) * self.block
        middle = _quietest(energies, len(energies) // 4, len(energies) - len(energies) // 4)
        cut = torch.div((2 * middle + 1) * self.block, 2, rounding_mode="floor").clamp(max=len(wave))
        tone = wave[quiet + torch.arange(min(self.block, len(wave)), device=wave.device)]
        before, within, after = (self._leveled(pause, wave, tone) for pause in pauses)
        places = torch.arange(len(wave) + len(within), device=wave.device)
        # of the utterance and the pause behind it: those of the pause come between the two parts of the utterance
        sources = torch.where(places < cut, places, places - len(within))
        sources = torch.where((places >= cut) & (places < cut + len(within)), len(wave) + places - cut, sources)
        return torch.cat([before, torch.cat([wave, within])[sources], after])

    def _leveled(self, pause: _Pause, wave: Tensor, tone: Tensor) -> Tensor:
        """A pause for an utterance whose quietest part is `tone`."""
        chosen = self.config.kinds[pause.kind]
        if chosen == "zeros" or len(pause.noise) == 0:
            return pause.noise
        if chosen == "room":
            return _scaled(_shaped(pause.noise, tone), tone)
        return _scaled(pause.noise, wave) * math.pow(10.0, pause.level_db / 20)


def _quietest(energies: Tensor, first: int, end: int) -> Tensor:
    """The first of the smallest energies from `first` to `end`."""
    return energies[first : max(end, first + 1)].argmin() + first


def _shaped(noise: Tensor, tone: Tensor) -> Tensor:
    """White noise with the spectrum of another signal: `[num_samples]`."""
    spectrum = torch.fft.rfft(noise, n=fft_size(len(noise)))
    magnitudes = torch.fft.rfft(tone * torch.hann_window(len(tone), device=tone.device)).abs()
    shape = torch.nn.functional.interpolate(
        magnitudes[None, None], size=len(spectrum), mode="linear", align_corners=True
    )[0, 0]
    shaped: Tensor = torch.fft.irfft(spectrum * shape, n=fft_size(len(noise)))
    return shaped[: len(noise)]


def _scaled(noise: Tensor, like: Tensor) -> Tensor:
    """Noise with the power of another signal."""
    tiny = torch.finfo(torch.float32).tiny
    return noise * (like.square().mean() / noise.square().mean().clamp(min=tiny)).sqrt()
