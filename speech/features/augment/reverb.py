"""Reverberation: convolution with impulse responses, measured or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from configurable.lazy import torch
from devices.transfers import beside
from speech.features.augment.bank import Bank
from speech.features.augment.base import WaveAugmentation, fft_size, power, silence_padding
from speech.features.augment.config import ReverbConfig
from speech.features.augment.draws import Drawn, uniforms
from speech.features.augment.rooms import simulate

if TYPE_CHECKING:
    from torch import Tensor


_LONGEST_S = 2.0  # of a measured response
_KEPT = 256  # responses in memory: 25 MB of one second at 16 kHz


class Reverb(WaveAugmentation):
    """Reverberates utterances; neither length, timing nor power change (the tail beyond the end is cut off)."""

    def __init__(self, config: ReverbConfig, sample_rate: int) -> None:
        self.config = config
        self.sample_rate = sample_rate
        self.bank = Bank(config.files, sample_rate, "impulse response") if config.files else None
        self.count = len(self.bank) if self.bank else config.rooms
        self.response = lru_cache(maxsize=_KEPT)(self._response)

    def draw(self, lengths: Tensor, seeds: Sequence[int]) -> Drawn:
        """See `WaveAugmentation`; measured responses are read here, and simulated ones computed."""
        draws = uniforms(seeds, "reverb", 2)
        given = draws[:, 0] < self.config.probability
        numbers = (draws[:, 1] * self.count).long()
        pairs = zip(given.tolist(), numbers.tolist(), strict=True)
        responses = [self.response(number) if some else torch.zeros(0) for some, number in pairs]
        sizes = torch.tensor([len(response) for response in responses])
        return {"responses": torch.nn.utils.rnn.pad_sequence(responses, batch_first=True), "sizes": sizes}

    def apply(self, waves: Tensor, lengths: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """See `WaveAugmentation`."""
        rows = drawn["sizes"].nonzero().squeeze(1)
        if len(rows) == 0 or waves.shape[1] == 0:
            return waves, lengths
        longest, rows = int(drawn["sizes"].max()), beside(rows, waves)
        responses = beside(drawn["responses"], waves).to(waves)[rows, :longest]
        result = waves.clone()
        result[rows] = convolve(waves[rows], lengths.to(waves.device)[rows], responses)
        return result, lengths

    def _response(self, number: int) -> Tensor:
        """An impulse response from its direct sound (its largest sample) on: `[num_samples]`."""
        if self.bank is None:
            return simulate(self.config, number, self.sample_rate)
        measured = self.bank.whole((number + 0.5) / self.count, _LONGEST_S)
        return measured[int(measured.abs().argmax()) :].clone()


def convolve(waves: Tensor, lengths: Tensor, responses: Tensor) -> Tensor:
    """Convolve each utterance with its impulse response and keep its power.

    Args:
        waves: `[B, N]`, zero beyond each utterance.
        lengths: `[B]`, samples of each utterance.
        responses: `[B, M]`, zero beyond each response.

    Returns:
        `[B, N]`, zero beyond each utterance.
    """
    num_samples = waves.shape[1]
    size = fft_size(num_samples + responses.shape[1])
    spectrum = torch.fft.rfft(waves, n=size) * torch.fft.rfft(responses, n=size)
    wet = silence_padding(torch.fft.irfft(spectrum, n=size)[:, :num_samples], lengths)
    loudness = power(waves, lengths) / power(wet, lengths).clamp(min=torch.finfo(torch.float32).tiny)
    return wet * loudness.sqrt()
