"""Pauses before, within and after an utterance: digital silence, faint noise, or the utterance's own room tone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from configurable.lazy import torch
from speech.features.augment.base import WaveAugmentation, beside, between, fft_size
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
        rows = [row for row, pauses in enumerate(added) if any(pauses)]
        for row, energies in zip(rows, self._energies([changed[row] for row in rows]), strict=True):
            parts = noise[row, : sum(added[row])].split_with_sizes(added[row])
            pauses = [_Pause(*pause) for pause in zip(parts, kinds[row], levels_db[row], strict=True)]
            changed[row] = self._interrupted(changed[row], energies, pauses)
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

    def _energies(self, utterances: list[Tensor]) -> list[list[float]]:
        """Mean squares of each utterance's whole blocks, at least one; a GPU is waited for once."""
        found = [
            wave.unfold(0, self.block, self.block).square().mean(1) if len(wave) >= self.block else wave.new_zeros(1)
            for wave in utterances
        ]
        return (
            [part.tolist() for part in torch.cat(found).cpu().split_with_sizes([len(one) for one in found])]
            if found
            else []
        )

    def _interrupted(self, wave: Tensor, energies: list[float], pauses: list[_Pause]) -> Tensor:
        """An utterance, whose blocks have these energies, with pauses before, within and after it."""
        quiet = _quietest(energies, 0, len(energies)) * self.block
        middle = _quietest(energies, len(energies) // 4, len(energies) - len(energies) // 4)
        cut = min(int((middle + 0.5) * self.block), len(wave))
        tone = wave[quiet : quiet + self.block]
        before, within, after = (self._leveled(pause, wave, tone) for pause in pauses)
        return torch.cat([before, wave[:cut], within, wave[cut:], after])

    def _leveled(self, pause: _Pause, wave: Tensor, tone: Tensor) -> Tensor:
        """A pause for an utterance whose quietest part is `tone`."""
        chosen = self.config.kinds[pause.kind]
        if chosen == "zeros" or len(pause.noise) == 0:
            return pause.noise
        if chosen == "room":
            return _scaled(_shaped(pause.noise, tone), tone)
        return _scaled(pause.noise, wave) * math.pow(10.0, pause.level_db / 20)


def _quietest(energies: list[float], first: int, end: int) -> int:
    """The first of the smallest energies from `first` to `end`."""
    return min(range(first, max(end, first + 1)), key=energies.__getitem__)


def _shaped(noise: Tensor, tone: Tensor) -> Tensor:
    """White noise with the spectrum of another signal: `[num_samples]`."""
    spectrum = torch.fft.rfft(noise, n=fft_size(len(noise)))
    magnitudes = torch.fft.rfft(tone * torch.hann_window(len(tone), device=tone.device)).abs()
    shape = torch.nn.functional.interpolate(
        magnitudes[None, None], size=len(spectrum), mode="linear", align_corners=True
    )[0, 0]
    found: Tensor = torch.fft.irfft(spectrum * shape, n=fft_size(len(noise)))
    return found[: len(noise)]


def _scaled(noise: Tensor, like: Tensor) -> Tensor:
    """Noise with the power of another signal."""
    tiny = torch.finfo(torch.float32).tiny
    return noise * (like.square().mean() / noise.square().mean().clamp(min=tiny)).sqrt()
