"""Log-mel energies as sherpa-onnx computes them on all its interfaces, and icefall's recipes in training.

They differ from Kaldi's defaults: samples are in ±1, so that energies are floored 90 dB higher; there is a frame for
each hop, centred in it, and an utterance's ends are mirrored (`--snip-edges=false`); the last filter ends 400 Hz below
half the sample rate. An exported model that was trained on them hears the same on a phone as in training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from configurable.lazy import torch
from speech.features.config import FilterBankConfig

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank

_UNIT_SCALE = 2.0**-30
"""Energy of samples in ±1, relative to samples in the range of int16."""


class SherpaLogMelConfig(FilterBankConfig):
    """Log-mel energies as sherpa-onnx computes them, for models that are exported."""

    kind: Literal["sherpa_logmel"] = "sherpa_logmel"
    high_freq: float = -400.0
    """Upper edge of the last filter in Hz; 0 or less is an offset from the Nyquist frequency."""

    @override
    def lead(self, bank: FilterBank) -> int:
        return bank.frame_length // 2 - bank.hop_length // 2

    @override
    def num_frames(self, bank: FilterBank, lengths: Tensor) -> Tensor:
        return torch.div(lengths + bank.hop_length // 2, bank.hop_length, rounding_mode="floor")

    @override
    def waves_before(self, bank: FilterBank, waves: Tensor, lengths: Tensor) -> Tensor:
        if not waves.shape[1]:
            return waves
        places = torch.arange(-self.lead(bank), waves.shape[1] + bank.frame_length, device=waves.device)
        ends = lengths.to(waves.device).clamp(min=1).unsqueeze(1)
        # mirrored as often as a short utterance needs it: there and back is a period
        places = places % (2 * ends)
        return waves.gather(1, torch.where(places < ends, places, 2 * ends - 1 - places))

    @override
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        return bank.log(bank.energies(bank.centred(frames)) * _UNIT_SCALE)
