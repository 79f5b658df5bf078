"""No detection: everything counts as speech, so recordings are cut by length only."""

from typing import Literal

from torch import Tensor
from typing_extensions import override

from speech.vad.base import Interval, Vad, VadConfig


class EverythingConfig(VadConfig):
    """No detection: recordings are cut by length only."""

    kind: Literal["none"] = "none"

    @override
    def build(self) -> Vad:
        return EverythingVad(self)


class EverythingVad(Vad):
    """Takes everything for speech."""

    def speech(self, wave: Tensor, sample_rate: int) -> list[Interval]:
        """The whole waveform."""
        return [(0, len(wave))] if len(wave) else []
