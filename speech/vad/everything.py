"""No detection: everything counts as speech, so recordings are cut by length only."""

from typing import Literal

from torch import Tensor

from speech.vad.base import Interval, Vad, VadConfig


class EverythingConfig(VadConfig):
    """No detection: recordings are cut by length only."""

    kind: Literal["none"] = "none"


class EverythingVad(Vad):
    """Takes everything for speech."""

    config = EverythingConfig

    def speech(self, wave: Tensor, sample_rate: int) -> list[Interval]:
        """The whole waveform."""
        return [(0, len(wave))] if len(wave) else []
