"""What cepstral features have in common: their number, the lifter, and the frame's energy in the first coefficient."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from pydantic import Field
from typing_extensions import override

from speech.features.config import FrameEnergyConfig

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank


class CepstraConfig(FrameEnergyConfig):
    """Liftered cepstral coefficients; the frame's log energy may replace the first one."""

    num_ceps: int = Field(default=13, ge=1)
    """Number of cepstral coefficients, at most `num_mels`."""
    cepstral_lifter: float = Field(default=22.0, ge=0)
    """Length of the cepstral lifter; 0 is none."""

    @property
    @override
    def width(self) -> int:
        return self.num_ceps

    @abstractmethod
    def cepstra(self, bank: FilterBank, centred: Tensor) -> Tensor:
        """Frames without their means `[..., frame_length]` to liftered cepstra `[..., num_ceps]`."""

    @abstractmethod
    def smoothed(self, bank: FilterBank, cepstra: Tensor) -> Tensor:
        """Log energies of the filters `[..., num_mels]`, without the details that liftered cepstra leave out."""

    @override
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        centred = bank.centred(frames)
        feats = self.cepstra(bank, centred)
        if self.use_energy:
            feats[..., :1] = bank.log_energy(centred)
        return feats

    @override
    def levels(self, bank: FilterBank, feats: Tensor) -> Tensor:
        return feats[..., 0] if self.use_energy else bank.level(self.smoothed(bank, feats))
